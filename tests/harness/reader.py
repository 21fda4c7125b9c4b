"""What a reader of the documentation has before a block of code, and how its Python is run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_zpp import Strategy, fully_shard

from .markdown import Block, added_lines
from .pool import device_type

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
    before = Path.cwd()
    work = folder / f"rank{dist.get_rank()}"
    work.mkdir()
    construct = FullyShardedDataParallel.__init__

    def construct_here(self: FullyShardedDataParallel, *args: Any, **kwargs: Any) -> None:
        # Without a GPU, it wants to be told that it runs on the CPU, which would only distract a reader.
        construct(self, *args, **({"device_id": torch.device(device_type())} | kwargs))

    os.chdir(work)
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(FullyShardedDataParallel, "__init__", construct_here),
    ):
        try:
            yield
        finally:
            os.chdir(before)


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
    return {"nothing": lambda path: {"torch": torch}, "model": _model, "lora": _lora, "fsdp1": _fsdp1, "fsdp2": _fsdp2}[
        kind
    ](path)


def _model(path: Path) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        use_cache=False,
    )
    device = torch.device(device_type())
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(256, (2, 2, 16), generator=generator).to(device)
    return {
        "torch": torch,
        "nn": nn,
        "model": LlamaForCausalLM(config).to(device),
        "Layer": LlamaDecoderLayer,
        "batches": [{"input_ids": part, "labels": part} for part in tokens],
        "path": path,
    }


def _lora(path: Path) -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model

    names = _model(path)
    if dist.get_rank() == 0:
        names["model"].save_pretrained(path / "base")
    dist.barrier()
    model = get_peft_model(names["model"], LoraConfig(target_modules="all-linear", r=4))
    return names | {"model": model, "base": path / "base"}


def _fsdp1(path: Path) -> dict[str, Any]:
    def shard(model: nn.Module, layer: type[nn.Module]) -> nn.Module:
        return FullyShardedDataParallel(
            model,
            sharding_strategy=Strategy.zeropp(),  # type: ignore[arg-type]
            auto_wrap_policy=ModuleWrapPolicy({layer}),
            use_orig_params=True,
        )

    return _trained(_model(path), shard)


def _fsdp2(path: Path) -> dict[str, Any]:
    def shard(model: nn.Module, layer: type[nn.Module]) -> nn.Module:
        for module in [*(each for each in model.modules() if isinstance(each, layer)), model]:
            fully_shard(module, strategy=Strategy.zeropp())
        return model

    return _trained(_model(path), shard)


def _trained(names: dict[str, Any], shard: Callable[[nn.Module, type[nn.Module]], nn.Module]) -> dict[str, Any]:
    model = shard(names["model"], names["Layer"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**names["batches"][0]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return names | {"model": model, "optimizer": optimizer}
