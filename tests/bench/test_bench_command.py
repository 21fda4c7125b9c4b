"""``python -m fsdp_zpp bench``: end to end on four ranks, what it refuses, and the models that it makes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.launch import launch
from harness.pool import Pool, device_type
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_zpp.__main__ import main
from fsdp_zpp.bench.contenders import Training, base_of, layer_places, materialize, network, recommend
from fsdp_zpp.bench.results import Task, table
from fsdp_zpp.bench.run import PeakMemory, Schedule, attempt
from fsdp_zpp.codecs import Int4, Int8
from fsdp_zpp.planner.model_size import pretrained_size
from fsdp_zpp.planner.plan import plan

ATTENTION = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
ATTENTION |= {"vocab_size": 64, "max_position_embeddings": 2048}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **ATTENTION, "intermediate_size": 128}
QWEN = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **ATTENTION, "head_dim": 32}
QWEN |= {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
WORK = "--sequence 16 --steps 2 --warmup 1 --gpus-per-node 2".split()


def config(folder: Path, values: dict[str, Any]) -> Path:
    """A folder with a configuration."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def bench(folder: Path, values: dict[str, Any], *options: str) -> tuple[dict[str, Any], str]:
    """The result of a bench of a model on two nodes of two, and the text that it prints."""
    result = folder / "bench.json"
    command = ["--model", config(folder / "model", values), *WORK, "--json", result, *options]
    done = launch(4, "-m", "fsdp_zpp", "bench", *command, on_cpu=True)
    assert done.returncode == 0, done.stderr
    return json.loads(result.read_text()), done.stdout


def test_all_parameters_are_trained_under_each_strategy(tmp_path: Path) -> None:
    names = ["full_shard", "hybrid_shard", "zeropp", "fsdp1:zeropp-delta"]
    more = ("--micro-batches", "2", "--strategies", ",".join(names))
    result, printed = bench(tmp_path, LLAMA, *more)
    rows = {row["strategy"]: row for row in result["rows"]}
    assert list(rows) == names
    for row in rows.values():
        assert "failed" not in row
        assert 0 < row["fastest_ms"] <= row["quartiles_ms"][0] <= row["quartiles_ms"][1] <= row["slowest_ms"]
        assert row["tokens_per_s"] == pytest.approx(4 * 2 * 16 / row["step_ms"] * 1e3)
    # The same data and weights.
    losses = {name: row["loss"] for name, row in rows.items()}
    assert losses["full_shard"][0] == losses["hybrid_shard"][0]
    for loss in losses.values():
        assert loss == pytest.approx(losses["full_shard"], rel=0.01)
        assert loss[0] == pytest.approx(math.log(64), rel=0.05)
    # Bytes are the planner's: those of zeropp counted, those of torch's planned.
    codecs = {"weights": Int8(256), "gradients": Int4(128)}
    layout = {"nodes": 2, "gpus_per_node": 2, "inter_gbps": 1, "intra_gbps": 1, "micro_batches": 2}
    size = pretrained_size(str(tmp_path / "model"))
    sent = sum(mib for hop, mib in rows["zeropp"]["sent_mib_a_step"].items() if "inter" in hop)
    assert sent * 2**20 == pytest.approx(plan(size, **layout, **codecs)["IGG"].volume.inter, rel=0.05)
    assert rows["full_shard"]["sent_mib_a_step"]["inter"] * 2**20 == plan(size, **layout)["GNG"].volume.inter
    assert rows["full_shard"]["sent_is_planned"]
    # The text shows the result.
    made = recommend(result["rows"])
    assert result["recommendation"] == {"line": made.line, "strategy": made.strategy}
    assert made.line in printed.splitlines()
    assert all(text in printed for texts in table(result["rows"]).values() for text in texts)
    assert "zeropp(weights=Int4Delta(), gpus_per_node=2), FSDP1" in printed
    # The result says how it was made, and over which links.
    assert result["manifest"]["command"].startswith("python -m fsdp_zpp bench --model ")
    assert result["arguments"]["sequence"] == 16
    assert not {"json", "run", "parser"} & result["arguments"].keys()
    assert min(result["links"]["inter_gbps"], result["links"]["intra_gbps"]) > 0
    assert "between nodes, a whole node: " in printed


@pytest.mark.wide
def test_adapters_of_a_mixture_are_trained_on_each_kind_of_base(tmp_path: Path) -> None:
    names = "full_shard,hybrid_shard,once-zeropp,mixzpp"
    result, _ = bench(tmp_path, QWEN, "--lora", "4", "--checkpointing", "--strategies", names)
    rows = {row["strategy"]: row for row in result["rows"]}
    assert ",".join(rows) == names
    for row in rows.values():
        assert row["loss"] == pytest.approx(rows["full_shard"]["loss"], rel=0.01)


class _Idle(Training):
    """A training that does nothing."""

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.zeros(())


def _attempts(fails: int) -> list[dict[str, Any]]:
    """In a worker: a strategy that one rank runs out of memory under, then another."""
    config = type("Config", (), {"vocab_size": 8, "get_text_config": lambda self: self})()
    task = Task(config, 1, 2, sequence=4, device=device_type())

    def more(training: Training, memory: PeakMemory) -> dict[str, Any]:
        if dist.get_rank() == fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand more")
        return {}

    return [attempt(task, "one", _Idle, Schedule(), more), attempt(task, "two", _Idle, Schedule())]


def test_a_failure_on_one_rank_is_every_ranks_row_and_the_run_goes_on(pool: Callable[[int], Pool]) -> None:
    failed = {"strategy": "one", "failed": "out of memory", "error": "CUDA out of memory. Tried to allocate 2 GiB"}
    for first, second in pool(2).run(_attempts, 1):
        assert first == failed
        assert second["strategy"] == "two"
        assert second["step_ms"] >= 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "bench runs under torchrun only: torchrun --nproc-per-node NUMBER_OF_GPUS -m fsdp_zpp bench --model ..."),
        (("--strategies", "mixzpp"), "--strategies mixzpp is for a frozen base, which --lora has; add --lora 16, say"),
        (("--steps", "1"), "--steps must be a whole number of at least 2, got 1.0"),
        (("--sequence", "2049"), "--sequence must be at most 2,048, the positions that the model has, got 2,049"),
        (("--chart", "bench.svg"), "unrecognized arguments: --chart bench.svg"),
    ],
)
def test_arguments_that_can_not_be_are_refused_before_anything_runs(
    options: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["bench", "--model", str(config(tmp_path / "model", LLAMA)), *options])
    assert message in capsys.readouterr().err


def test_a_rank_without_others_is_refused(tmp_path: Path) -> None:
    done = launch(1, "-m", "fsdp_zpp", "bench", "--model", config(tmp_path / "model", LLAMA), on_cpu=True)
    assert "torchrun has started only one; start one for each GPU, two or more" in done.stderr


# ---- models that get their values a module at a time

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 1},
    "qwen3": {"num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True},
    "gemma3_text": {"num_key_value_heads": 1, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {},
}


def made(model_type: str, lora: int = 0) -> tuple[Task, nn.Module]:
    """The task of a tiny model of this type, and the model, layer by layer."""
    config = AutoConfig.for_model(model_type, **SIZES | MODELS[model_type])
    task = Task(config, 1, 1, lora=lora, sequence=8, device="cpu")
    model = network(task)
    base = base_of(model)
    for layers, index in list(layer_places(model)):
        materialize(layers[index], base, task.place)
    return task, materialize(model, base, task.place)


@pytest.mark.parametrize("model_type", MODELS)
def test_buffers_and_ties_are_those_of_a_model_made_at_once(model_type: str) -> None:
    task, model = made(model_type)
    whole = AutoModelForCausalLM.from_config(task.config)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in whole.named_parameters()}
    torch.testing.assert_close(dict(model.named_buffers()), dict(whole.named_buffers()), rtol=0, atol=0)
    # With the same weights, the same loss: nothing else is left without values.
    whole.load_state_dict(model.state_dict())
    tokens = task.tokens(0)[0]
    losses = [each.eval()(tokens, labels=tokens).loss.item() for each in (model, whole)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_adapters_stand_beside_a_frozen_base_in_bf16(model_type: str) -> None:
    """GPT-2 has none of the projections that adapters are on by name."""
    _, model = made(model_type, lora=2)
    kinds = {("lora_" in name, p.requires_grad, p.dtype) for name, p in model.named_parameters()}
    assert kinds == {(True, True, torch.float32), (False, False, torch.bfloat16)}
