"""Quantizing what was sharded in one way or another: it computes what a model with rounded weights does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import lora, models
from harness.fsdp1 import Fsdp1
from harness.pairs import FLAT_WAYS, WAYS, Pair, flat_tied, replaced, tied_after, tied_before
from harness.pool import Pool
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_zpp import Int8, quantize_frozen_params

CODEC = Int8(64)


def as_rounded(way: Callable[[Pair], Any]) -> bool:
    """In a worker: whether a sharded pair, quantized, computes what one with rounded weights does, and loads itself."""
    pair = way(Pair())
    quantize_frozen_params(pair, CODEC, gpus_per_node=2)
    alone = Pair()
    if way in (tied_before, tied_after, flat_tied):
        alone.second.weight = alone.first.weight
    if way is replaced:
        alone.second.weight.data *= 2
    for weight in {alone.first.weight, alone.second.weight}:
        lora.round_weight(weight, CODEC)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(models.device())
    for _ in range(2):
        out, expected = pair(x), alone(x)
        assert torch.equal(out, expected)
        out.sum().backward()
        expected.sum().backward()
        pair.load_state_dict(pair.state_dict())
    wanted = alone.last.weight.grad
    if isinstance(pair, FullyShardedDataParallel):
        (found,) = Fsdp1().full_gradients(pair).values()
        wanted, pair = wanted.cpu(), pair.module
    else:
        found = pair.last.weight.grad.full_tensor()
    first = pair.first.module if isinstance(pair.first, FullyShardedDataParallel) else pair.first
    return models.distance({"": found}, {"": wanted}) <= 1e-6 and type(first).__name__.startswith("Frozen")


@pytest.mark.parametrize("way", WAYS + FLAT_WAYS, ids=lambda way: way.__name__)
def test_ways_to_shard(pool: Callable[[int], Pool], way: Callable[[Pair], Any]) -> None:
    assert pool(4).run(as_rounded, way) == [True] * 4
