"""What ``gathered_weights(merged=True)`` takes: the memory of one unit, and PEFT's copies while it merges a layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from adapted_llama import sharded
from harness import llama
from harness.adapter import Adapter
from harness.covering import ADAPTERS, over_pairs
from harness.live_bytes import LiveBytes
from harness.pool import Pool
from torch import Tensor, nn

from fsdp_zpp import Strategy, gathered_weights
from fsdp_zpp.inference import merged_layer

EXACT = Strategy("IGG", gpus_per_node=2)
COPIES = {"lora": 2, "embedding": 2, "dora": 4, "two adapters": 3}
"""Copies that PEFT makes of the weight that it merges into, in the dtype of the adapters."""


def make(adapter: Adapter, kind: str, is_quantized: bool) -> Any:
    """In a worker: a model whose adapters are in fp32, and its base in bf16 where the adapter takes both."""
    adapters = {"one": "lora", "two": "lora"} if kind == "two adapters" else {"one": kind}
    if is_quantized:
        model = sharded(adapter, adapters)
    else:
        dtype = torch.float32 if adapter == ADAPTERS[0] else llama.ADAPTED
        model = llama.shard(adapter, llama.adapt(llama.make_base(dtype), adapters), EXACT)
    llama.peft_of(model).base_model.set_adapter(list(adapters))
    llama.logits_of(model)  # a quantized base makes its buffers at the first forward
    return model


@dataclass
class Merges:
    """Notes what merges take, and keeps it out of the peak of ``live``.

    Attributes:
        live: Counts the bytes, if they are counted.
        largest: The most bytes of parameters that a merge was given.
        copies: The most that a merge has allocated, in copies of its largest parameter in fp32.
    """

    live: LiveBytes | None = None
    largest: int = 0
    copies: float = 0

    def __call__(self, layer: nn.Module, values: Any) -> dict[str, Tensor]:
        given = [tensor for of_module in values.values() for tensor in of_module.values()]
        self.largest = max(self.largest, sum(tensor.nbytes for tensor in given))
        if self.live is None:
            return _merge(layer, values)
        live, peak, bound, before = self.live, self.live.peak, self.live.bound, self.live.now
        live.peak, live.bound = before, float("inf")
        merged = _merge(layer, values)
        self.copies = max(self.copies, (live.peak - before) / max(4 * tensor.numel() for tensor in given))
        live.peak, live.bound = peak, bound  # what is left of it counts with the next allocation
        return merged


_merge = merged_layer._merge


def taken(adapter: Adapter, kind: str, is_quantized: bool, dtype: torch.dtype | None) -> tuple[int, int, float]:
    """In a worker: the most that is alive but for what merges allocate, what may be, and their copies."""
    model, merges = make(adapter, kind, is_quantized), Merges()
    with patch.object(merged_layer, "_merge", merges):
        full = {name: weight.nbytes for name, weight in gathered_weights(model, merged=True, dtype=dtype)}
    units: dict[str, int] = {}
    for name, nbytes in full.items():
        unit = ".".join(name.split(".")[:3])  # a layer, or one of the modules beside them
        units[unit] = units.get(unit, 0) + nbytes
    # A tensor that the caller has may be there beside the next one, which is merged as it is stored, and then cast.
    held = max(full.values())
    allowed = max(*units.values(), held + max(held, merges.largest + held * (dtype is not None)))
    with LiveBytes(allowed) as live:
        merges = Merges(live)
        with patch.object(merged_layer, "_merge", merges):
            for _ in gathered_weights(model, merged=True, dtype=dtype):
                pass
    return live.peak, allowed, merges.copies


@over_pairs(adapter=ADAPTERS, kind=list(COPIES), is_quantized=[False, True], dtype=[None, torch.bfloat16])
def test_it_takes_one_unit_and_the_copies_that_peft_makes(
    pool: Callable[[int], Pool], adapter: Adapter, kind: str, is_quantized: bool, dtype: torch.dtype | None
) -> None:
    for peak, allowed, copies in pool(4).run(taken, adapter, kind, is_quantized, dtype):
        assert 0 < peak <= allowed
        assert 0 < copies <= COPIES[kind] * 1.05  # and vectors
