"""Strategies without codecs train as stock FULL_SHARD does, to rounding, with every feature of FSDP."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness import models
from harness.models import Case
from harness.pool import Pool
from torch.distributed.fsdp import (
    BackwardPrefetch,
    MixedPrecision,
    ShardingStrategy,
)

from fsdp_zpp import Strategy

ORIG = ("use_orig_params", True)
FLAT = ("use_orig_params", False)
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)

CASES = {
    "orig": Case(),
    "flat": Case(fsdp=(FLAT,)),
    "one unit": Case(wrap_blocks=False),
    "adamw": Case(optimizer="adamw"),
    "adamw foreach": Case(optimizer="adamw-foreach"),
    "no limit": Case(fsdp=(ORIG, ("limit_all_gathers", False))),
    "forward prefetch": Case(fsdp=(ORIG, ("forward_prefetch", True))),
    "backward post": Case(fsdp=(ORIG, ("backward_prefetch", BackwardPrefetch.BACKWARD_POST))),
    "no backward prefetch": Case(fsdp=(ORIG, ("backward_prefetch", None))),
    "no_sync": Case(micro_batches=3),
    "accumulate synced": Case(micro_batches=3, no_sync=False),
    "no_sync flat": Case(micro_batches=2, fsdp=(FLAT,)),
    "tied": Case(model=(("tied", True),)),
    "tied flat": Case(model=(("tied", True),), fsdp=(FLAT,)),
    "twice": Case(model=(("twice", True),)),
    "unused": Case(model=(("unused", True),)),
    "frozen": Case(frozen=True),
    "inside reentrant": Case(checkpointing="inside reentrant"),
    "inside no_reentrant": Case(checkpointing="inside no_reentrant"),
    "outside no_reentrant": Case(checkpointing="outside no_reentrant"),
    "outside reentrant": Case(checkpointing="outside reentrant"),
}


def _weights_after_each_step(case: Case, strategy: Strategy | ShardingStrategy) -> list[dict[str, torch.Tensor]]:
    model = models.wrap(case, strategy)
    weights: list[dict[str, torch.Tensor]] = []
    models.train(model, case, after_step=lambda step, optimizer: weights.append(models.full_weights(model)))
    return weights


def largest_distance(case: Case, strategy: Strategy) -> float:
    """In a worker: the largest distance from stock FULL_SHARD after any step."""
    ours = _weights_after_each_step(case, strategy)
    theirs = _weights_after_each_step(case, ShardingStrategy.FULL_SHARD)
    assert len(ours) == case.steps
    return max(map(models.distance, ours, theirs))


@pytest.mark.parametrize("levels", ["GGG", "IGG"])
@pytest.mark.parametrize("name", CASES)
def test_equals_full_shard(pool: Callable[[int], Pool], name: str, levels: str) -> None:
    distances = pool(4).run(largest_distance, CASES[name], Strategy(levels, gpus_per_node=2))
    assert max(distances) <= (1e-4 if "adamw" in name else 1e-6)


@pytest.mark.parametrize(("optimizer", "bound"), [("sgd", 1e-6), ("adamw", 1e-4)])
@pytest.mark.parametrize("levels", ["GGG", "IGG"])
@pytest.mark.parametrize(("world", "gpus_per_node"), [(4, 2), (4, 1), (4, 4), (2, 1), (2, 2)])
def test_twenty_steps(
    pool: Callable[[int], Pool], world: int, gpus_per_node: int, levels: str, optimizer: str, bound: float
) -> None:
    case = Case(optimizer=optimizer, steps=20)
    assert max(pool(world).run(largest_distance, case, Strategy(levels, gpus_per_node=gpus_per_node))) <= bound
