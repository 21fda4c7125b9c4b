"""What a reader of the documentation has before a block of code, and how its Python is run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from harness import llama
from harness.adapter import Adapter
from harness.fsdp1 import Fsdp1
from harness.fsdp2 import Fsdp2
from harness.pool import device_type
from pages import Block, added_lines
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fsdp_zpp import Strategy

RANKS, GPUS_PER_NODE = 4, 2


def run_python(blocks: list[Block], folder: Path) -> None:
    """In a worker: run the blocks of a page, one after the other, as on two nodes of two.

    Args:
        blocks: Python, or diffs of Python.
        folder: Empty; the same for all ranks.

    Raises:
        AssertionError: If one fails; it names the page and the line.
    """
    namespace: dict[str, Any] = {}
    with _as_torchrun(folder):
        for number, block in enumerate(blocks):
            if block.given or not number:
                # What was sharded before must be gone, as its process groups, before there is more of it.
                namespace.clear()
                namespace |= {"__name__": "__main__"} | _given(block.given or "model", folder / str(number))
            code = added_lines(block.code) if block.language == "diff" else block.code
            # Lines count as in the page, also in the traceback.
            padded = "\n" * (block.line - 1) + code
            exec(compile(padded, block.page, "exec", dont_inherit=True), namespace)


@contextmanager
def _as_torchrun(folder: Path) -> Iterator[None]:
    environment = {"LOCAL_WORLD_SIZE": str(GPUS_PER_NODE), "LOCAL_RANK": str(dist.get_rank() % GPUS_PER_NODE)}
    if device_type() == "cuda":
        del environment["LOCAL_RANK"]  # the GPU, which the pool has chosen
    work = folder / f"rank{dist.get_rank()}"
    work.mkdir()
    construct = FullyShardedDataParallel.__init__

    def construct_here(self: FullyShardedDataParallel, *args: Any, **kwargs: Any) -> None:
        # Without a GPU, it wants to be told that it runs on the CPU, which would only distract a reader.
        construct(self, *args, **({"device_id": torch.device(device_type())} | kwargs))

    with (
        chdir(work),
        mock.patch.dict(os.environ, environment),
        mock.patch.object(FullyShardedDataParallel, "__init__", construct_here),
    ):
        yield


def _given(kind: str, path: Path) -> dict[str, Any]:
    """The names that a block starts with.

    Args:
        kind: ``nothing``, ``model``, ``lora``, ``fsdp1`` or ``fsdp2``; ``docs/design/testing.md`` says what they are.
        path: Of a folder that is not there yet.

    Raises:
        KeyError: If there is no such kind.
    """
    path.mkdir(exist_ok=True)
    dist.barrier()
    if kind == "nothing":
        return {"torch": torch}
    return {"model": _model, "lora": _lora, "fsdp1": _fsdp1, "fsdp2": _fsdp2}[kind](path)


def _model(path: Path) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(llama.VOCABULARY, (2, 2, 16), generator=generator).to(device_type())
    return {
        "torch": torch,
        "nn": nn,
        "model": llama.make_base(),
        "Layer": LlamaDecoderLayer,
        "batches": [{"input_ids": part, "labels": part} for part in tokens],
        "path": path,
    }


def _lora(path: Path) -> dict[str, Any]:
    names, model = _model(path), llama.make_base(llama.ADAPTED)
    if dist.get_rank() == 0:
        model.save_pretrained(path / "base")
    dist.barrier()
    model = get_peft_model(model, LoraConfig(target_modules="all-linear", r=4))
    return names | {"model": model, "base": path / "base"}


def _fsdp1(path: Path) -> dict[str, Any]:
    return _trained(_model(path), Fsdp1())


def _fsdp2(path: Path) -> dict[str, Any]:
    return _trained(_model(path), Fsdp2())


def _trained(names: dict[str, Any], adapter: Adapter) -> dict[str, Any]:
    model = llama.shard(adapter, names["model"], Strategy.zeropp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**names["batches"][0]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return names | {"model": model, "optimizer": optimizer}
