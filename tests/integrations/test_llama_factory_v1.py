"""LLaMA-Factory's V1 with a strategy: its losses, checkpoints and adapters, and what it may not be asked for."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from framework_workers import framework_workers
from harness import lora
from peft import PeftModel
from tiny_chats import TOKENS, write_models_and_chats
from transformers import AutoModelForCausalLM

from fsdp_zpp import Int8, Strategy

os.environ["DISABLE_VERSION_CHECK"] = "1"  # which LLaMA-Factory looks at when it is imported, here and in workers
pytest.importorskip("llamafactory.v1.plugins.trainer_plugins.distributed.interface")  # which 0.9.5 lacks

from llama_factory_training import import_llama_factory, v1_arguments_for, v1_trained, write_datasets

NODES = {"gpus_per_node": 2}
FULL: dict[str, Any] = {"peft_config": None, "learning_rate": 2e-3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small model in fp32, the same in bf16, and chats."""
    folder = tmp_path_factory.mktemp("llama_factory_v1")
    for each in write_models_and_chats(folder):
        write_datasets(each)
    return folder


@pytest.fixture(scope="module")
def workers() -> Iterator[Callable[..., list[Any]]]:
    """Return ``workers(function, *args)`` on four ranks, in processes of their own."""
    yield from framework_workers(import_llama_factory)


@pytest.mark.parametrize("kind", ["adapters", "whole"])
def test_losses_are_those_of_v1s_own_fsdp(
    workers: Callable[..., list[Any]], folder: Path, tmp_path: Path, kind: str
) -> None:
    options = FULL if kind == "whole" else {}
    own, plain, zeropp = (
        workers(v1_trained, v1_arguments_for(folder, tmp_path / name, **options, **each))[0]
        for name, each in {
            "own": {},
            "plain": {"fsdp_zpp": {"levels": "GGG"} | NODES},
            "zeropp": {"fsdp_zpp": {"preset": "zeropp"} | NODES},
        }.items()
    )
    assert own.losses[-1] < 0.97 * own.losses[0]
    assert plain.losses == pytest.approx(own.losses, rel=1e-5)  # sums in another order
    assert zeropp.losses == pytest.approx(own.losses, rel=0.01)
    for hop in ("gather", "reduce"):
        assert 0 < 3 * zeropp.sent[hop]["inter"] < plain.sent[hop]["inter"]
    if kind == "whole":
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
        torch.testing.assert_close(loaded(input_ids=TOKENS).logits, plain.logits, rtol=1e-4, atol=1e-4)


def test_weights_may_be_loaded_after_sharding(workers: Callable[..., list[Any]], folder: Path, tmp_path: Path) -> None:
    options = FULL | {"fsdp_zpp": {"preset": "zeropp"} | NODES}
    first, second = (
        workers(v1_trained, v1_arguments_for(folder, tmp_path, **options, **each))[0]
        for each in ({}, {"init_config": {"name": "init_on_meta"}})
    )
    assert second.losses == first.losses


@pytest.mark.parametrize("replicas", [1, 2])
def test_adapters_on_a_quantized_bf16_base_are_read_by_plain_peft(
    workers: Callable[..., list[Any]], folder: Path, tmp_path: Path, replicas: int
) -> None:
    strategy = {"preset": "mixzpp"} | NODES
    arguments = v1_arguments_for(
        folder / "bf16", tmp_path, bf16=True, mp_replicate_size=replicas, save_ckpt_as_hf=True, fsdp_zpp=strategy
    )
    first = workers(v1_trained, arguments)[0]
    assert first.losses[-1] < first.losses[0]
    for files in (tmp_path, tmp_path / "checkpoint-4" / "hf_model"):
        base = AutoModelForCausalLM.from_pretrained(folder / "bf16" / "model", dtype=torch.float32)
        for parameter in base.parameters():
            if parameter.dim() == 2:
                lora.round_weight(parameter, Int8(256))
        loaded = PeftModel.from_pretrained(base, files).eval()
        torch.testing.assert_close(loaded(input_ids=TOKENS).logits, first.logits, rtol=0.05, atol=0.05)
    with loaded.disable_adapter():
        assert not torch.allclose(loaded(input_ids=TOKENS).logits, first.logits, rtol=0.05, atol=0.05)
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = workers(v1_trained, arguments | {"resume_from_checkpoint": "auto"})[0]
    assert resumed.losses == first.losses[2:]
    assert torch.equal(resumed.logits, first.logits)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dist_config": {"name": "deepspeed"}}, "dist_config.name: 'deepspeed' .* takes the place of fsdp2"),
    ({"cp_size": 2}, "cp_size: 2 .* not been tried"),
    ({"quant_config": {"name": "bnb"}}, r"quant_config: .* not been tried .* \{preset: mixzpp, frozen: nf4\}"),
    ({"init_config": {"name": "init_on_meta"}}, "init_config: 'init_on_meta' .* or frozen"),
]


@pytest.mark.parametrize(
    ("options", "message"), REFUSED, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_conflicts_are_refused_by_key(options: dict[str, Any], message: str) -> None:
    from fsdp_zpp.integrations._llama_factory_v1 import check_arguments

    check_arguments({"init_config": {"name": "init_on_default"}}, Strategy.mixzpp())
    with pytest.raises(ValueError, match=message):
        check_arguments(options, Strategy.mixzpp())
