"""LLaMA-Factory with a strategy: its losses, checkpoints and adapters, and what its arguments may not ask for."""

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

from fsdp_zpp import Int8

os.environ["DISABLE_VERSION_CHECK"] = "1"  # which LLaMA-Factory looks at when it is imported, here and in workers
pytest.importorskip("llamafactory")
pytest.importorskip("fsdp_zpp.integrations.transformers", exc_type=ImportError)  # LLaMA-Factory pins an older one

from llama_factory_training import arguments_for, import_llama_factory, trained, write_datasets

NODES = {"gpus_per_node": 2}
FULL: dict[str, Any] = {"finetuning_type": "full", "learning_rate": 2e-3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small model in fp32, the same in bf16, and chats."""
    folder = tmp_path_factory.mktemp("llama_factory")
    for each in write_models_and_chats(folder):
        write_datasets(each)
    return folder


@pytest.fixture(scope="module")
def workers() -> Iterator[Callable[..., list[Any]]]:
    """Return ``workers(function, *args)`` on four ranks, in processes of their own: LLaMA-Factory patches there."""
    yield from framework_workers(import_llama_factory)


@pytest.mark.parametrize("kind", ["adapters", "whole", "pt", "dpo"])
def test_losses_are_those_of_llama_factorys_own_fsdp(
    workers: Callable[..., list[Any]], folder: Path, tmp_path: Path, kind: str
) -> None:
    kinds = {
        "adapters": {},
        "whole": FULL,
        "pt": FULL | {"stage": "pt", "packing": False},
        "dpo": FULL | {"stage": "dpo", "dataset": "pairs", "learning_rate": 1e-3},
    }
    own, plain, zeropp = (
        workers(trained, arguments_for(folder, tmp_path / name, **kinds[kind], **each))[0]
        for name, each in {
            "own": {},
            "plain": {"fsdp_zpp": {"levels": "GGG"} | NODES},
            "zeropp": {"fsdp_zpp": {"preset": "zeropp"} | NODES},
        }.items()
    )
    assert own.losses[-1] < 0.97 * own.losses[0]
    assert plain.losses == pytest.approx(own.losses, rel=1e-4 if kind == "dpo" else 1e-5)  # sums in another order
    assert zeropp.losses == pytest.approx(own.losses, rel=0.1 if kind == "dpo" else 0.01)
    for hop in ("gather", "reduce"):
        assert 0 < 3 * zeropp.sent[hop]["inter"] < plain.sent[hop]["inter"]
    if kind in ("whole", "pt"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
        torch.testing.assert_close(loaded(input_ids=TOKENS).logits, plain.logits, rtol=1e-4, atol=1e-4)


def test_adapters_on_a_quantized_bf16_base_are_read_by_plain_peft(
    workers: Callable[..., list[Any]], folder: Path, tmp_path: Path
) -> None:
    arguments = arguments_for(folder / "bf16", tmp_path, bf16=True, fsdp_zpp={"preset": "mixzpp"} | NODES)
    first = workers(trained, arguments)[0]
    assert first.losses[-1] < first.losses[0]
    base = AutoModelForCausalLM.from_pretrained(folder / "bf16" / "model", dtype=torch.float32)
    for parameter in base.parameters():
        if parameter.dim() == 2:
            lora.round_weight(parameter, Int8(256))
    loaded = PeftModel.from_pretrained(base, tmp_path).eval()
    torch.testing.assert_close(loaded(input_ids=TOKENS).logits, first.logits, rtol=0.05, atol=0.05)
    with loaded.disable_adapter():
        assert not torch.allclose(loaded(input_ids=TOKENS).logits, first.logits, rtol=0.05, atol=0.05)
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = workers(trained, arguments | {"resume_from_checkpoint": str(tmp_path / "checkpoint-2")})[0]
    assert resumed.losses == first.losses
    assert torch.equal(resumed.logits, first.logits)
