"""``python -m fsdp_zpp plan``: its options, its table, its JSON, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_zpp import Int4, Int8, LoCo, plan
from fsdp_zpp.__main__ import main
from fsdp_zpp.planner.report import plan_to_json

CLUSTER = "--nodes 16 --gpus-per-node 8 --inter-gbps 100 --intra-gbps 2400".split()
JOB = ["--params", "70e9", *CLUSTER, "--micro-batches", "10", "--gpu-memory", "80"]
SAME_JOB: dict[str, Any] = {"params": 70e9, "nodes": 16, "gpus_per_node": 8, "inter_gbps": 100, "intra_gbps": 2400}
SAME_JOB |= {"micro_batches": 10, "gpu_memory": 80}
CODECS: dict[str, Any] = {"weights": Int8(128), "gradients": Int4(128), "intra_gradients": None}
CODECS |= {"error_feedback": LoCo(dtype=Int8(64))}
DTYPES: dict[str, Any] = {"compute": torch.float32, "reduce": torch.float16, "storage": torch.bfloat16}
LLAMA: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
LLAMA |= {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "vocab_size": 64}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 2}
LAYER = 4 * 16 * 16 + 3 * 16 * 32 + 2 * 16  # attention, MLP, two norms
ROOT_UNIT = 2 * 64 * 16 + 16  # embedding, head, norm
QWEN = LLAMA | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 2}
QWEN |= {"num_key_value_heads": 1, "head_dim": 8, "moe_intermediate_size": 8, "num_experts": 4}
QWEN |= {"num_experts_per_tok": 2}


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON of a plan that something fits into."""
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Why a plan is refused."""
    with pytest.raises(SystemExit) as exited:
        main(["plan", *arguments])
    assert exited.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A tiny model's config.json."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


# ---- options, tables and JSON


def test_the_table_is_the_plan_and_needs_no_optional_package() -> None:
    then_print = "print(sorted({'matplotlib', 'transformers', 'rich'} & set(sys.modules)))"
    code = f"import sys, fsdp_zpp.__main__; fsdp_zpp.__main__.main(sys.argv[1:]); {then_print}"
    command = [sys.executable, "-c", code, "plan", *JOB, "--no-presets", "--trainable", "0.3%"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120, check=True)
    made = plan(**SAME_JOB, trainable=210e6, presets=False)
    assert done.stdout == f"{made}\n[]\n"
    lines = str(made).splitlines()
    assert "70,000,000,000 parameters, 210,000,000 (0.3 %) trainable, in 32 units; 10 micro-batches a step" in lines[0]
    rows = [line[3:6] for line in lines if line[:3] in ("-> ", "   ") and line[3:6].strip()]
    assert len(set(rows)) == len(rows) == 14
    (chosen,) = (line for line in lines if line.startswith("-> "))
    assert chosen.startswith(f"-> {made.choice.levels}")
    assert lines[-9 - len(made.notes) : -6 - len(made.notes)] == [made.reason, "", made.choice.paste]
    fits = rows[: next(i for i, line in enumerate(lines) if line.startswith("does not fit")) - lines.index(chosen)]
    assert sorted(fits) == sorted(estimate.levels for estimate in made.estimates if estimate.fits)


OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "codecs": (
        "--weights int8:128 --gradients int4 --intra-gradients none --frozen int8 --error-feedback inter:int8:64",
        CODECS | {"frozen": Int8(256)},
    ),
    "dtypes": (
        "--compute fp32 --reduce fp16 --storage bf16 --optimizer-bytes 2",
        DTYPES | {"optimizer_bytes": 2},
    ),
    "sizes": (
        "--trainable 210e6 --units 7 --activations 3 --tokens 4096 --tflops 50",
        {"trainable": 210e6, "units": 7, "activations": 3, "tokens": 4096, "tflops": 50},
    ),
    "hardware": (
        "--nodes 8 --gpus-per-node 4 --gpu h100 --tokens 4096",
        {"nodes": 8, "gpus_per_node": 4, "gpu": "h100", "tokens": 4096},
    ),
}


@pytest.mark.parametrize(("options", "asked"), OPTIONS.values(), ids=OPTIONS)
def test_options_reach_the_plan(options: str, asked: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    made = plan(**SAME_JOB | asked)
    assert figures(capsys, *JOB, *options.split()) == json.loads(plan_to_json(made))


def test_json_has_all_that_the_plan_has() -> None:
    made = plan(**SAME_JOB, **CODECS, **DTYPES)
    found = json.loads(plan_to_json(made))
    assert found["choice"] == made.choice.name
    assert found["codecs"] == {
        "weights": "int8(128)",
        "gradients": "int4(128)",
        "intra_gradients": None,
        "frozen": None,
        "error_feedback": "beta 0.8, reset every 1024 steps, kept in int8(64)",
    }
    assert found["precision"]["reduce"] == "torch.float16"
    assert found["budget_gib"] == {"gpu_memory": 80, "activations": 2, "reserve": 2}
    for name in ("IIG", "III"):
        strategy, estimate = found["strategies"][name], made[name]
        assert strategy["memory_bytes"]["errors"] == estimate.memory.errors > 0
        assert strategy["memory_bytes"]["total"] == estimate.memory.total
        assert strategy["inter_node_bytes"] == estimate.inter_node_bytes
        assert strategy["seconds"]["step"] == estimate.time.total


def test_if_nothing_fits_it_says_so_and_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *JOB, "--no-presets", "--gpu-memory", "5"]) == 1
    table = capsys.readouterr().out
    assert "Nothing fits in 5 GiB a GPU: the smallest, GGG, takes" in table
    assert "-> " not in table
    assert main(["plan", *JOB, "--gpu-memory", "5", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["choice"] is None


def test_numbers_of_parameters_have_suffixes(capsys: pytest.CaptureFixture[str]) -> None:
    for text, number in (("1.5b", "1500000000"), ("124M", "124000000"), ("2T", "2000000000000")):
        found, same = (figures(capsys, "--params", params, *CLUSTER, "--trainable", "10M") for params in (text, number))
        assert found == same


def test_a_model_is_sized_from_its_config(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (config, config.parent):
        assert figures(capsys, "--model", str(path), *CLUSTER)["model"]["units"] == [
            {"trainable": ROOT_UNIT, "frozen": 0, "count": 1, "reshard_after_forward": False},
            {"trainable": LAYER, "frozen": 0, "count": 3, "reshard_after_forward": True},
        ]
    found = figures(capsys, "--model", str(config), "--trainable", "25%", *CLUSTER)["model"]
    assert found["params"] == ROOT_UNIT + 3 * LAYER
    assert found["trainable"] == round(found["params"] / 4)
    assert found["units"][0]["trainable"] == pytest.approx(ROOT_UNIT / 4, abs=1)


def test_a_config_of_experts_reaches_the_plan(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(json.dumps(QWEN))
    found = figures(capsys, "--model", str(config), *CLUSTER)["model"]
    assert found["params"] - found["active"] == 2 * 2 * 3 * 16 * 8  # a token is routed to two of four


# ---- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of the arguments --params --model is required"),
        (["--params", "7e9"], "--nodes and --gpus-per-node must be given, or --measure under torchrun"),
        ([*JOB, "--inter-gbps", "-1"], "inter_gbps must be above 0, got -1.0"),
        ([*JOB, "--trainable", "0.003"], "got '0.003'; a share has a percent sign, 0.3%"),
        ([*JOB, "--weights", "int88"], "none, int8, int4, int3, int4delta, int2delta, nf4; did you mean int8?"),
        ([*JOB, "--weights", "auto"], "weights can't be 'auto', which is for frozen weights alone"),
        ([*JOB, "--compute", "b16"], "allowed are fp32, bf16, fp16; did you mean bf16?"),
        ([*JOB, "--measure"], "--measure has nothing to measure"),
        (["--model", "nowhere/config.json", *CLUSTER], "no such file: nowhere/config.json"),
        ([*JOB, "--gpu-per-node", "8"], "unrecognized arguments: --gpu-per-node 8; did you mean --gpus-per-node?"),
        # before the hub is asked for the model
        (["--model", "no/model", *CLUSTER, "--net", "100gb"], "net '100gb' is not in the catalog"),
        ([*JOB, "--local-steps", "64"], "unrecognized arguments: --local-steps 64"),
    ],
)
def test_wrong_options_exit_with_2_and_say_why(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *arguments)


def test_models_that_cannot_be_sized_are_refused(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ("--model", str(config), *CLUSTER)
    assert "--units 4 goes with --params" in refused(capsys, *model, "--units", "4")
    for wrong in (LLAMA | {"num_attention_heads": 0}, LLAMA | {"model_type": "no such"}, {"model_type": "vit"}):
        config.write_text(json.dumps(wrong))
        assert "is not a causal language model that transformers can build" in refused(capsys, *model)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    error = refused(capsys, "--model", "nobody/no-such-model", *CLUSTER)
    assert "error: nobody/no-such-model is not a causal language model that transformers can build" in error
    assert "We couldn't connect to 'https://huggingface.co'" in error


def test_a_missing_package_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "transformers", None)
    error = refused(capsys, "--model", "config.json", *CLUSTER)
    assert "needs transformers" in error
    assert "pip install '.[examples]' in your clone" in error
