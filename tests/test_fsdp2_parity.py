"""Strategies without codecs train as torch's own fully_shard does, to rounding, with every feature of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import models
from harness.fully_sharded import STOCK, Case, largest_distance, make
from harness.pool import Pool
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from fsdp_zpp import Strategy

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def second_dimension(parameter: torch.nn.Parameter) -> Shard | None:
    """Shard every matrix whose second dimension divides by four there."""
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 4 == 0 else None


def prefetch(model: Any) -> None:
    """Prefetch two blocks ahead in both directions."""
    blocks = list(model.blocks)
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
        block.set_modules_to_backward_prefetch(blocks[max(i - 2, 0) : i][::-1])


def divide_by_three(model: Any) -> None:
    """Another divide factor than the world size, in sums that every backend knows."""
    for module in (model, *model.blocks):
        module.set_gradient_divide_factor(3.0)
        module.set_force_sum_reduction_for_comms(True)


def unshard_async(model: Any) -> None:
    """Unsharding in the default stream."""
    model._set_unshard_async_op(True)


CASES = {
    "plain": Case(),
    "one group": Case(wrap_blocks=False),
    "a list of modules": Case(pairs=True),
    "adamw": Case(optimizer="adamw"),
    "adamw foreach": Case(optimizer="adamw-foreach"),
    "adamw fused": Case(optimizer="adamw-fused"),
    "keep after forward": Case(shard=(("reshard_after_forward", False),)),
    "reshard after forward": Case(shard=(("reshard_after_forward", True),)),
    "no sync": Case(micro_batches=3),
    "no sync kept unsharded": Case(micro_batches=3, keep_unsharded=True),
    "accumulate synced": Case(micro_batches=3, sync_all=True),
    "accumulate synced kept unsharded": Case(micro_batches=3, sync_all=True, keep_unsharded=True),
    "tied": Case(model=(("tied", True),)),
    "twice": Case(model=(("twice", True),)),
    "unused": Case(model=(("unused", True),)),
    "frozen": Case(frozen=True),
    "inside reentrant": Case(checkpointing="inside reentrant"),
    "inside no_reentrant": Case(checkpointing="inside no_reentrant"),
    "second dimension": Case(model=(("width", 24), ("hidden", 36)), shard=(("shard_placement_fn", second_dimension),)),
    "prefetch": Case(tune=prefetch),
    "divide factor": Case(tune=divide_by_three, clip=None),
    "async unshard": Case(tune=unshard_async),
    "cpu offload": Case(shard=(("offload_policy", CPUOffloadPolicy(pin_memory=False)),), clip=None),
}


@pytest.mark.parametrize("levels", ["GGG", "IGG"])
@pytest.mark.parametrize("name", CASES)
def test_equals_stock(pool: Callable[[int], Pool], name: str, levels: str) -> None:
    distances = pool(4).run(largest_distance, CASES[name], Strategy(levels, gpus_per_node=2))
    assert max(distances) <= (1e-4 if "adamw" in name else 1e-6)


@pytest.mark.parametrize(("optimizer", "bound"), [("sgd", 1e-6), ("adamw-foreach", 1e-4), ("adamw-fused", 1e-4)])
@pytest.mark.parametrize("levels", ["GGG", "IGG"])
@pytest.mark.parametrize(("world", "gpus_per_node"), [(4, 2), (4, 1), (4, 4), (2, 1)])
def test_twenty_steps(
    pool: Callable[[int], Pool], world: int, gpus_per_node: int, levels: str, optimizer: str, bound: float
) -> None:
    case = Case(optimizer=optimizer, steps=20)
    assert max(pool(world).run(largest_distance, case, Strategy(levels, gpus_per_node=gpus_per_node))) <= bound


def gradient_distances(param: Any, reduce: Any, strategy: Strategy) -> tuple[float, float]:
    """In a worker: the distances of the gradients of ours and of torch's from torch's reduced in fp32."""

    def gradients(reduce: Any, strategy: Strategy | None) -> dict[str, torch.Tensor]:
        model = make(Case(shard=(("mp_policy", MixedPrecisionPolicy(param, reduce)),)), strategy)
        models.loss_of(model, models.batch(0, 0)).backward()
        assert {p.grad.dtype for p in model.parameters()} == {FP32}
        return {name: p.grad.full_tensor() for name, p in model.named_parameters()}

    exact = gradients(FP32, STOCK)
    return models.distance(gradients(reduce, strategy), exact), models.distance(gradients(reduce, STOCK), exact)


@pytest.mark.parametrize("levels", ["GGG", "IGG"])
@pytest.mark.parametrize(
    ("param", "reduce"),
    [(BF16, FP32), (FP16, FP32), (BF16, BF16), (BF16, None), (FP16, FP16), (None, BF16)],
    ids=["bf16-fp32", "fp16-fp32", "bf16-bf16", "bf16", "fp16-fp16", "fp32-bf16"],
)
def test_mixed_precision(pool: Callable[[int], Pool], param: Any, reduce: Any, levels: str) -> None:
    """In fp32 sums differ in order only; in 16 bits ours round once a hop, torch's at every rank."""
    for ours, stock in pool(4).run(gradient_distances, param, reduce, Strategy(levels, gpus_per_node=2)):
        assert ours <= max(1e-6, 1.5 * stock)
