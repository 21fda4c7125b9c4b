"""Nets whose linear layers encode themselves for the all-gather: a stand-in, and torchao's float8 training."""

from __future__ import annotations

import importlib.util
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Case, Precision
from harness.fsdp2 import Fsdp2
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fsdp_zpp.collectives.streams import keep_until_read

SIZES = (("width", 32), ("hidden", 48), ("vocabulary", 64))
# Gradients in bf16 have so few bits that fp32 sums of them are exact, in whatever order: weights are equal bit by bit.
CASE = Case(model=SIZES, precision=Precision(torch.bfloat16, torch.float32), clip=None)
NBYTES = {"rows": 3 * (2 * 32 * 48 + 4 * (32 + 48)), "float8": 3 * 2 * 32 * 48}
"""Bytes of all encoded weights of a net."""

NO_TORCHAO = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
FORMATS = [pytest.param("rows", id="rows"), pytest.param("float8", id="float8", marks=NO_TORCHAO)]

_PRESERVED = {
    getattr(torch.ops.aten, packet).default
    for packet in ("empty_like", "new_zeros", "copy_", "view", "as_strided", "_to_copy", "clone", "detach")
} | {torch.ops.aten.slice.Tensor, torch.ops.aten.split.Tensor}


class RowScaled(Tensor):
    """A trained weight in full precision that travels as int8 codes and a scale for each row.

    The scales are relative to the largest value on all ranks, which is no tensor of the gather but its metadata.
    """

    values: Tensor
    encoded: ClassVar[int] = 0
    """How often this rank has encoded a shard."""

    @staticmethod
    def __new__(cls, values: Tensor) -> RowScaled:
        """Wrap ``values``."""
        made = Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), values.storage_offset(), dtype=values.dtype, device=values.device
        )
        made.values = values
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values"], None

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, Tensor], *unused: Any) -> RowScaled:
        return RowScaled(tensors["values"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(RowScaled, lambda each: each.values, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return tree_map_only(Tensor, RowScaled, out) if func in _PRESERVED else out

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        """Codes [rows, columns] and scales [rows]; collective."""
        RowScaled.encoded += 1
        largest = self.values.abs().max()
        dist.all_reduce(largest, dist.ReduceOp.MAX, mesh.get_group())
        scales = self.values.abs().amax(1) / largest
        steps = (scales * largest / 127).clamp(min=1e-20)
        return ((self.values / steps[:, None]).round().to(torch.int8), scales), (largest,)

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        """The values of all ranks."""
        (codes, scales), (largest,) = outputs, metadata
        # It was made in the stream of the gather, where torch lets its memory be reused once this has returned.
        keep_until_read(largest)
        values = (codes.float() * (scales * largest / 127)[:, None]).to(dtype)
        if out is None:
            return values, (values,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(values)
        return None


torch.serialization.add_safe_globals([RowScaled])  # for checkpoints, as torchao does


def convert(net: nn.Module, kind: str) -> None:
    """Let the linear layers of all blocks encode themselves; ``kind`` is one of ``FORMATS``."""
    if kind == "rows":
        for block in net.blocks:
            for layer in (block.up, block.down):
                layer.weight = nn.Parameter(RowScaled(layer.weight.detach()))
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(net, config=config, module_filter_fn=lambda module, name: "blocks" in name)


def make(kind: str, strategy: Any, case: Case = CASE) -> Any:
    """In a worker: a sharded net with such layers."""
    net = models.make_net(**dict(case.model))
    convert(net, kind)
    return Fsdp2().shard(net, case, strategy)
