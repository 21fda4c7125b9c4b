"""``python -m fsdp_zpp plan``, end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_zpp import Int4, Int8, LoCo, plan
from fsdp_zpp.__main__ import main
from fsdp_zpp.planner.json_report import plan_to_json

CLUSTER = "--nodes 16 --gpus-per-node 8 --inter-gbps 100 --intra-gbps 2400".split()
JOB = ["--params", "70e9", *CLUSTER, "--micro-batches", "10", "--gpu-memory", "80"]
SAME_JOB = {"params": 70e9, "nodes": 16, "gpus_per_node": 8, "inter_gbps": 100, "intra_gbps": 2400}
SAME_JOB |= {"micro_batches": 10, "gpu_memory": 80}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "tie_word_embeddings": False,
}
LAYER = 4 * 16 * 16 + 3 * 16 * 32 + 2 * 16  # attention, MLP, two norms
ROOT_UNIT = 2 * 64 * 16 + 16  # embedding, head, norm


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command where ``-m`` does not put the repository's root on the path."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True, timeout=120
    )


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON of a plan that something fits into."""
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A tiny model's config.json."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def test_the_table_is_the_plan() -> None:
    result = run(sys.executable, "-m", "fsdp_zpp", "plan", *JOB, "--no-presets", "--trainable", "0.3%")
    assert result.returncode == 0, result.stderr
    made = plan(**SAME_JOB, trainable=210e6, presets=False)
    assert result.stdout == f"{made}\n"
    lines = result.stdout.splitlines()
    assert "70,000,000,000 parameters, 210,000,000 (0.3 %) trainable, in 32 units; 10 micro-batches a step" in lines[0]
    rows = [line[3:6] for line in lines if line[:3] in ("-> ", "   ") and line[3:6].strip()]
    assert sorted(rows) == sorted(made[scopes].levels for scopes in rows)
    assert len(rows) == 14
    (chosen,) = (line for line in lines if line.startswith("-> "))
    assert chosen.startswith(f"-> {made.choice.levels}")
    assert lines[-9 - len(made.notes) : -6 - len(made.notes)] == [made.reason, "", made.choice.paste]
    fits = rows[: next(i for i, line in enumerate(lines) if line.startswith("does not fit")) - lines.index(chosen)]
    assert sorted(fits) == sorted(estimate.levels for estimate in made.estimates if estimate.fits)


def test_json_has_all_that_the_plan_has(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--weights int8:128 --gradients int4 --intra-gradients none --frozen int8 --trainable 210e6".split()
    arguments += ["--error-feedback", "inter:int8:64"]
    found = figures(capsys, *JOB, *arguments)
    asked = {"weights": Int8(128), "gradients": Int4(128), "intra_gradients": None, "frozen": Int8(256)}
    asked["error_feedback"] = LoCo(dtype=Int8(64))
    made = plan(**SAME_JOB, trainable=210e6, **asked)
    assert found == json.loads(plan_to_json(made))
    assert found["choice"] == made.choice.levels
    assert found["codecs"] == {
        "weights": "int8(128)",
        "gradients": "int4(128)",
        "intra_gradients": None,
        "frozen": "int8(256)",
        "error_feedback": "beta 0.8, reset every 1024 steps, kept in int8(64)",
    }
    assert len(found["strategies"]) == 14
    strategy = found["strategies"]["IIG"]
    assert strategy["memory_bytes"]["errors"] == made["IIG"].memory.errors > 0
    assert strategy["memory_bytes"]["total"] == made["IIG"].memory.total
    assert strategy["inter_node_bytes"] == 8 * strategy["sent_bytes_per_gpu"]["inter"] == made["IIG"].inter_node_bytes
    assert strategy["seconds"]["step"] == made["IIG"].time.total


@pytest.mark.parametrize(
    "arguments",
    [[], ["--gpu-memory", "1000"], ["--gpu-memory", "6"], ["--tokens", "9", "--tflops", "9"], ["--inter-gbps", "1"]],
)
def test_plot_is_an_image(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.png"
    main(["plan", *JOB, *arguments, "--plot", str(path)])
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    captured = capsys.readouterr()
    assert f"wrote {path}" in captured.err
    assert "predicted" in captured.out


def test_plot_of_a_single_gpu_has_no_times_to_put_on_a_log_axis(tmp_path: Path) -> None:
    assert main(["plan", *"--params 1e6 --nodes 1 --gpus-per-node 1 --plot".split(), str(tmp_path / "a.svg")]) == 0
    text = (tmp_path / "a.svg").read_text()
    assert "<svg" in text


def test_if_nothing_fits_it_says_so_and_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *JOB, "--no-presets", "--gpu-memory", "5"]) == 1
    table = capsys.readouterr().out
    assert "Nothing fits in 5 GiB a GPU: the smallest, GGG, takes" in table
    assert "-> " not in table
    assert main(["plan", *JOB, "--gpu-memory", "5", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["choice"] is None


@pytest.mark.parametrize("of", ["file", "directory"])
def test_a_model_is_sized_from_its_config(of: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, "--model", str(config if of == "file" else config.parent), *CLUSTER)
    assert found["model"]["units"] == [
        {"trainable": ROOT_UNIT, "frozen": 0, "count": 1, "reshard_after_forward": False},
        {"trainable": LAYER, "frozen": 0, "count": 3, "reshard_after_forward": True},
    ]


def test_a_percentage_of_a_model_may_be_trainable(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, "--model", str(config), "--trainable", "25%", *CLUSTER)["model"]
    assert found["params"] == ROOT_UNIT + 3 * LAYER
    assert found["trainable"] == round(found["params"] / 4)
    assert found["units"][0]["trainable"] == pytest.approx(ROOT_UNIT / 4, abs=1)


def test_dtypes_and_sizes_reach_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--compute fp32 --reduce fp16 --storage bf16 --frozen-storage fp16 --optimizer-bytes 2 --units 7 "
    arguments += "--activations 3 --reserve 1 --tokens 4096 --tflops 50"
    found = figures(capsys, *JOB, "--gpu-memory", "500", *arguments.split())
    names = ("compute", "reduce", "storage", "frozen_storage", "optimizer_bytes", "accumulation")
    dtypes = ("torch.float32", "torch.float16", "torch.bfloat16", "torch.float16", 2, "torch.float32")
    assert found["precision"] == dict(zip(names, dtypes, strict=True))
    assert found["budget_gib"] == {"gpu_memory": 500, "activations": 3, "reserve": 1}
    assert found["work"] == {"micro_batches": 10, "tokens": 4096, "tflops": 50, "launch_ms": 0}
    assert sum(unit["count"] for unit in found["model"]["units"]) == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of the arguments --params --model is required"),
        (["--params", "7e9", "--model", "x"], "not allowed with argument"),
        (["--params", "many"], "invalid float value: 'many'"),
        (["--params", "8X"], "invalid float value: '8X'; a number of parameters is written 8e9, or 8B with a suffix"),
        (["--params", "7e9"], "--nodes and --gpus-per-node must be given, or --measure under torchrun"),
        (["--params", "7e9", "--nodes", "2"], "--gpus-per-node must be given"),
        ([*JOB, "--inter-gbps", "-1"], "inter_gbps must be above 0, got -1.0"),
        ([*JOB, "--nodes", "1.5"], "nodes must be a whole number of at least 1, got 1.5"),
        (["--params", "7e9", "--nodes", "2", "--gpus-per-node", "1"], "inter_gbps is missing: there are 2 nodes"),
        ([*JOB, "--trainable", "0.003"], "got '0.003'; a share has a percent sign, 0.3%"),
        ([*JOB, "--trainable", "101%"], "above 0% and up to 100%, got '101%'"),
        ([*JOB, "--trainable", "0%"], "above 0% and up to 100%, got '0%'"),
        ([*JOB, "--trainable", "few"], "got 'few'"),
        ([*JOB, "--trainable", "80e9"], "at most the number of parameters, 70,000,000,000"),
        ([*JOB, "--weights", "int7"], "'int7' is not a codec; allowed are none, int8, int4"),
        ([*JOB, "--weights", "int8:"], "'int8:' is not a codec"),
        ([*JOB, "--weights", "int8:100"], "a block is a power of two"),
        ([*JOB, "--weights", "auto"], "weights can't be 'auto', which is for frozen weights alone"),
        ([*JOB, "--compute", "int8"], "'int8' is not a dtype; allowed are fp32, bf16, fp16"),
        ([*JOB, "--tokens", "4096"], "give both"),
        ([*JOB, "--frozen", "int8", "--frozen-storage", "bf16"], "has no meaning"),
        ([*JOB, "--measure"], "--measure has nothing to measure"),
        (["--params", "7e9", "--measure"], "--measure runs under torchrun"),
        (["--model", "nowhere/config.json", *CLUSTER], "no such file: nowhere/config.json"),
        ([*JOB, "--plot", "plan.xyz"], "xyz"),
        ([*JOB, "--plot", "no/such/folder/plan.png"], "no/such/folder/plan.png"),
        ([*JOB, "--speed", "1"], "unrecognized arguments: --speed 1"),
        ([*JOB, "--gpu-per-node", "8"], "unrecognized arguments: --gpu-per-node 8; did you mean --gpus-per-node?"),
        ([*JOB, "--net", "100gb"], "net '100gb' is not in the catalog; did you mean 100gbe?"),
        ([*JOB, "--weights", "int88"], "allowed are none, int8, int4, int4delta, nf4, topk; did you mean int8?"),
        ([*JOB, "--compute", "b16"], "allowed are fp32, bf16, fp16; did you mean bf16?"),
        # before the hub is asked for the model
        (["--model", "no/model", *CLUSTER, "--net", "100gb"], "net '100gb' is not in the catalog"),
        (["--model", "no/model", *CLUSTER, "--gpu", "a1000"], "gpu 'a1000' is not in the catalog"),
        (["--model", "no/model", *CLUSTER, "--experts-strategy", "iig"], "did you mean 'IIG'?"),
    ],
)
def test_wrong_options_exit_with_2_and_say_why(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["plan", *arguments])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "number"), [("8B", 8e9), ("1.5b", 1.5e9), ("124M", 124e6), ("2T", 2e12), ("7e9", 7e9)]
)
def test_numbers_of_parameters_have_suffixes(text: str, number: float, capsys: pytest.CaptureFixture[str]) -> None:
    job = [*CLUSTER, "--trainable", "10M"]
    assert figures(capsys, "--params", text, *job) == figures(capsys, "--params", str(int(number)), *job)


def test_units_are_refused_beside_a_model(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--model", str(config), "--units", "4", *CLUSTER])
    assert "--units 4 goes with --params" in capsys.readouterr().err


def test_configs_of_other_models_are_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(SystemExit):
        main(["plan", "--model", str(config), *CLUSTER])
    assert "is not a causal language model that transformers can build" in capsys.readouterr().err


@pytest.mark.parametrize(
    "bad", [{"hidden_size": "wide"}, {"num_attention_heads": 0}, {"vocab_size": -1}, {"model_type": "no such"}], ids=str
)
def test_configs_that_break_transformers_are_refused(
    bad: dict, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(json.dumps(json.loads(config.read_text()) | bad))
    with pytest.raises(SystemExit):
        main(["plan", "--model", str(config), *CLUSTER])
    assert "is not a causal language model that transformers can build" in capsys.readouterr().err


def test_a_hub_that_cannot_be_reached_is_named_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit):
        main(["plan", "--model", "nobody/no-such-model", *CLUSTER])
    assert "error: the hub could not be reached for the config of nobody/no-such-model" in capsys.readouterr().err


@pytest.mark.parametrize(("package", "option"), [("matplotlib", "--plot"), ("transformers", "--model")])
def test_missing_packages_are_named(
    package: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    size = [] if option == "--model" else ["--params", "1e9"]
    with pytest.raises(SystemExit):
        main(["plan", *size, *CLUSTER, option, str(tmp_path / "x.png")])
    error = capsys.readouterr().err
    assert package in error
    assert "pip install '.[examples]' in your clone" in error


def test_importing_the_package_imports_no_optional_one() -> None:
    code = "import sys, fsdp_zpp.__main__; print(sorted({'matplotlib', 'transformers', 'rich'} & set(sys.modules)))"
    result = run(sys.executable, "-c", code)
    assert result.stdout == "[]\n", result.stderr


def test_a_command_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([])
    assert exit_.value.code == 2
    assert "COMMAND" in capsys.readouterr().err
