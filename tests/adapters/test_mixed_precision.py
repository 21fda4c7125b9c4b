"""Mixed precision, and fp16 with a gradient scaler."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import STOCK, Adapter, Case, Precision
from harness.covering import ADAPTERS, SCOPES, over_adapters, over_each, over_pairs
from harness.pool import Pool, device_type
from harness.training import gradients, train
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from fsdp_zpp import Strategy
from fsdp_zpp.collectives.gradient_reduce import GradientReduce

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
HALF = Case(precision=Precision(FP16, FP16))
ZEROPP = Strategy.zeropp(gpus_per_node=2)


def gradient_distances(adapter: Adapter, precision: Precision, strategy: Strategy) -> tuple[float, float]:
    """In a worker: the distances of the gradients of ours and of torch's from torch's reduced in fp32."""
    exact, ours = stock_gradients(adapter, replace(precision, reduce=FP32)), Case(precision=precision)
    return (
        models.distance(gradients(adapter, ours, strategy), exact),
        models.distance(stock_gradients(adapter, precision), exact),
    )


@cache
def stock_gradients(adapter: Adapter, precision: Precision) -> dict[str, Tensor]:
    """In a worker: torch's own."""
    return gradients(adapter, Case(precision=precision), STOCK)


PRECISIONS = {
    "bf16-fp32": Precision(BF16, FP32),
    "bf16-bf16": Precision(BF16, BF16),
    "bf16": Precision(BF16),
    "fp16-fp32": Precision(FP16, FP32),
    "fp16-fp16": Precision(FP16, FP16),
    "fp16": Precision(FP16),
    "fp32-bf16": Precision(FP32, BF16),
    "none-bf16": Precision(None, BF16),
}


@over_each(3, adapter=ADAPTERS, precision=PRECISIONS, scopes=SCOPES)
def test_gradients_are_as_near_to_fp32_as_stocks(
    pool: Callable[[int], Pool], adapter: Adapter, precision: Precision, scopes: str
) -> None:
    """In fp32 sums differ in order only; in 16 bits ours round once a hop, torch's at every rank: a few times both."""
    strategy = Strategy(scopes, gpus_per_node=2)
    for ours, stock in pool(4).run(gradient_distances, adapter, precision, strategy):
        assert ours <= max(1e-6, 1.5 * stock)


def reduced_dtypes(adapter: Adapter, precision: Precision, strategy: Strategy | None) -> set[torch.dtype]:
    """In a worker: the dtypes of gradients at the start of a reduction, in steps of one micro-batch and of two."""
    dtypes: set[torch.dtype] = set()

    def recorded(original: Any, argument: str, position: int) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            dtypes.add((kwargs[argument] if argument in kwargs else args[position]).dtype)
            return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in ("reduce_scatter_single", "reduce_scatter_tensor") if strategy is STOCK else ():
            if hasattr(dist, name):
                stack.enter_context(patch.object(dist, name, recorded(getattr(dist, name), "input", 1)))
        # With gradient scope N, all that earlier micro-batches do is to add up on the rank, in fp32.
        for name in () if strategy is STOCK else ("start",) if strategy.gradients == "N" else ("start", "accumulate"):
            original = getattr(GradientReduce, name)
            stack.enter_context(patch.object(GradientReduce, name, recorded(original, "gradient", 1)))
        for micro_batches in (1, 2):
            case = Case(precision=precision, micro_batches=micro_batches, steps=1)
            train(adapter, adapter.make(case, strategy), case)
    return dtypes


def compare_reduced_dtypes(adapter: Adapter, precision: Precision) -> None:
    """In a worker: ours reduces in torch's dtypes."""
    stock = reduced_dtypes(adapter, precision, STOCK)
    assert len(stock) == 1
    for scopes in SCOPES:
        ours = reduced_dtypes(adapter, precision, Strategy(scopes, gpus_per_node=2))
        assert ours == stock, scopes


@over_each(adapter=ADAPTERS, precision=[Precision(BF16), Precision(BF16, FP32), Precision(BF16, BF16)])
def test_gradients_are_reduced_in_the_dtype_that_torch_reduces_in(
    pool: Callable[[int], Pool], adapter: Adapter, precision: Precision
) -> None:
    """It depends on torch: fully_shard without a reduce_dtype reduces in that of the parameters from 2.15 on."""
    pool(4).run(compare_reduced_dtypes, adapter, precision)


def scaled(adapter: Adapter, strategy: Strategy | None) -> tuple[list[float], dict[str, Tensor]]:
    """In a worker: fp16 with a sharded gradient scaler."""
    case = replace(HALF, steps=3, scaler=True)
    model = adapter.make(case, strategy)
    return train(adapter, model, case), adapter.full_weights(model)


@over_adapters
def test_a_gradient_scaler_trains_as_under_stock(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    stock = pool(4).run(scaled, adapter, STOCK)
    for scopes in SCOPES:
        ours = pool(4).run(scaled, adapter, Strategy(scopes, gpus_per_node=2))
        for (losses, weights), (stock_losses, stock_weights) in zip(ours, stock, strict=True):
            assert losses == pytest.approx(stock_losses, rel=2**-10)  # stock sums in fp16
            assert models.distance(weights, stock_weights) <= 2**-7
    for (losses, _), (stock_losses, _) in zip(pool(4).run(scaled, adapter, ZEROPP), stock, strict=True):
        assert losses == pytest.approx(stock_losses, rel=0.01)


def overflow(adapter: Adapter, bad: float, everywhere: bool) -> tuple[list[bool], float]:
    """In a worker: one rank's gradient overflows in the second of three steps.

    Args:
        adapter: The adapter.
        bad: What it then is.
        everywhere: In all elements, or in one only.

    Returns:
        Whether each step changed weights, and the scale at the end.
    """
    model = adapter.make(HALF, ZEROPP)
    optimizer = models.make_optimizer("sgd", model.parameters())
    scaler = ShardedGradScaler(device=device_type(), init_scale=2.0**8)
    poisons = False

    def poison(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient.flatten()[slice(None) if everywhere else slice(1)] = bad
        return gradient

    def poison_gradient_of(out: Tensor) -> None:
        if poisons:
            out.register_hook(poison)

    block = next(module for module in model.modules() if isinstance(module, models.Block))
    block.register_forward_hook(lambda module, args, out: poison_gradient_of(out))
    changed = []
    for step in range(3):
        poisons = step == 1 and dist.get_rank() == 1
        before = adapter.full_weights(model)
        scaler.scale(models.loss_of(model, models.batch(step, 0))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed.append(models.distance(adapter.full_weights(model), before) > 0)
    return changed, scaler.get_scale()


@over_pairs(
    adapter=ADAPTERS, bad=[float("inf"), float("nan")], everywhere={"everywhere": True, "in one element": False}
)
def test_overflow_skips_the_step_on_every_rank(
    pool: Callable[[int], Pool], adapter: Adapter, bad: float, everywhere: bool
) -> None:
    for changed, scale in pool(4).run(overflow, adapter, bad, everywhere):
        assert changed == [True, False, True]
        assert scale == 2.0**7


def thawed(adapter: Adapter, precision: Precision, strategy: Strategy) -> float:
    """In a worker: how far gradients are from those without it if a unit was frozen in the first backward."""
    found = []
    for is_frozen in (False, True):
        model = adapter.make(Case(precision=precision), strategy)
        block = next(module for module in model.modules() if isinstance(module, models.Block))
        block.requires_grad_(not is_frozen)
        models.loss_of(model, models.batch(0, 0)).backward()
        block.requires_grad_(True)
        model.zero_grad()
        models.loss_of(model, models.batch(1, 0)).backward()
        found.append(adapter.full_gradients(model))
    return models.distance(*found)


@over_each(3, adapter=ADAPTERS, precision=PRECISIONS, scopes=SCOPES)
def test_a_unit_that_was_frozen_first_reduces_as_if_it_had_not_been(
    pool: Callable[[int], Pool], adapter: Adapter, precision: Precision, scopes: str
) -> None:
    assert max(pool(4).run(thawed, adapter, precision, Strategy(scopes, gpus_per_node=2))) == 0
