"""What only fully_shard can do trains as torch's own does, to rounding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from harness import models
from harness.adapter import STOCK, Case
from harness.covering import SCOPES, over_each, over_pairs
from harness.fsdp2 import Fsdp2
from harness.pool import Pool
from harness.training import gradients, largest_distance, trained_weights
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard

from fsdp_zpp import Strategy

OFFLOAD = Fsdp2(arguments=(("offload_policy", CPUOffloadPolicy(pin_memory=False)),))
WIDER = (("width", 24), ("hidden", 36))


def second_dimension(parameter: nn.Parameter) -> Shard | None:
    """Shard every matrix whose second dimension divides by four there."""
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 4 == 0 else None


def prefetch(model: Any) -> None:
    """Prefetch two blocks ahead in both directions."""
    blocks = list(model.blocks)
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
        block.set_modules_to_backward_prefetch(blocks[max(i - 2, 0) : i][::-1])


def divide_by(factor: float, force_sum: bool, model: Any) -> None:
    """Another divide factor than the world size."""
    for module in (model, *model.blocks):
        module.set_gradient_divide_factor(factor)
        module.set_force_sum_reduction_for_comms(force_sum)


def divide_by_three(model: Any) -> None:
    """In sums that every backend knows."""
    divide_by(3.0, True, model)


def unshard_async(model: Any) -> None:
    """Unsharding in the default stream."""
    model._set_unshard_async_op(True)


CASES = {
    "a list of modules": (Fsdp2(pairs=True), Case()),
    "keep after forward": (Fsdp2(arguments=(("reshard_after_forward", False),)), Case()),
    "reshard after forward": (Fsdp2(arguments=(("reshard_after_forward", True),)), Case()),
    "no sync kept unsharded": (Fsdp2(keep_unsharded=True), Case(micro_batches=3)),
    "accumulate synced kept unsharded": (Fsdp2(keep_unsharded=True), Case(micro_batches=3, synced=True)),
    "second dimension": (Fsdp2(arguments=(("shard_placement_fn", second_dimension),)), Case(model=WIDER)),
    "prefetch": (Fsdp2(tune=prefetch), Case()),
    "divide factor": (Fsdp2(tune=divide_by_three), Case(clip=None)),
    "async unshard": (Fsdp2(tune=unshard_async), Case()),
    "cpu offload": (OFFLOAD, Case(clip=None)),
}


@over_each(2, name=list(CASES), scopes=SCOPES)
def test_equals_stock(pool: Callable[[int], Pool], name: str, scopes: str) -> None:
    if (name, scopes) == ("reshard after forward", "NNG"):
        pytest.skip("what is to be kept unsharded can't be resharded after the forward")
    adapter, case = CASES[name]
    assert max(pool(4).run(largest_distance, adapter, case, Strategy(scopes, gpus_per_node=2))) <= 1e-6


def offloaded(strategy: Strategy) -> float:
    """In a worker: the distance of parameters that live on the CPU from others."""
    case = Case(clip=None)
    return models.distance(trained_weights(Fsdp2(), case, strategy), trained_weights(OFFLOAD, case, strategy))


def test_cpu_offload_changes_no_weight(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(offloaded, Strategy.zeropp(gpus_per_node=2)) == [0.0] * 4


def gradient_distance(ours: Fsdp2, strategy: Strategy, stock: Fsdp2) -> float:
    """In a worker: the distance of the gradient from stock."""
    return models.distance(gradients(ours, Case(), strategy), gradients(stock, Case(), STOCK))


@over_pairs(factor=[1.0, 4.0, 6.0], force_sum={"sum": True, "premultiplied": False}, scopes=SCOPES)
def test_gradient_divide_factors_equal_stock(
    pool: Callable[[int], Pool], factor: float, force_sum: bool, scopes: str
) -> None:
    """Gloo can't premultiply; torch's own are forced to sum, which is the same but for rounding."""
    ours, stock = (Fsdp2(tune=partial(divide_by, factor, forced)) for forced in (force_sum, True))
    assert max(pool(4).run(gradient_distance, ours, Strategy(scopes, gpus_per_node=2), stock)) <= 1e-6
