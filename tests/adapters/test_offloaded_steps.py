"""Optimizers in the backward on offloaded parameters: as many steps, on the same gradients, behind the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from harness import models
from harness.adapter import STOCK, Adapter
from harness.covering import ADAPTERS, SCOPES, over_adapters, over_each
from harness.fsdp1 import Fsdp1
from harness.offload import offloading, without_pinning
from harness.pool import Pool
from harness.steps_in_backward import make
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_zpp import Int4, Int8, LoCo, Strategy
from fsdp_zpp.collectives.arriving_gradients import UNITS_BEHIND, ArrivingGradients

TWO: Any = {"gpus_per_node": 2}
STRATEGIES = {scopes: Strategy(scopes, **TWO) for scopes in SCOPES if scopes != "NNN"}
STRATEGIES["errors"] = Strategy("IGG", weights=Int8(64), gradients=Int4(64), error_feedback=LoCo(), **TWO)


class Counting(torch.optim.SGD):
    """An optimizer that notes its steps."""

    notes: ClassVar[list[str]] = []

    def step(self, closure: Any = None) -> Any:
        self.notes.append("step")
        return super().step(closure)


def stepped(adapter: Adapter, strategy: Strategy | None, micro_batches: int = 1) -> tuple[dict[str, Tensor], list[str]]:
    """Return weights after some steps, and in which order the last one stepped and went on with the backward."""
    model = make(adapter, strategy, Counting, lr=0.125)
    for block in model.modules():
        if isinstance(block, models.Block):
            block.up.register_full_backward_pre_hook(lambda *unused: Counting.notes.append("block"))
    for step in range(4):
        Counting.notes.clear()
        for micro_batch in range(micro_batches):
            with adapter.micro_batch(model, micro_batch == micro_batches - 1, False):
                models.loss_of(model, models.batch(step, micro_batch)).backward()
    order = list(Counting.notes)
    Counting.notes.clear()
    return adapter.full_weights(model), order


def distance_from_kept(adapter: Adapter, strategy: Strategy, micro_batches: int) -> float:
    """In a worker: the distance of offloaded weights from others that step in the backward, too."""
    with without_pinning():
        (kept, at_once), (offloaded, behind) = (
            stepped(each, strategy, micro_batches) for each in (adapter, offloading(adapter))
        )
        assert sorted(at_once) == sorted(behind)
        return models.distance(offloaded, kept)


@over_each(adapter=ADAPTERS, strategy=STRATEGIES, micro_batches=[1, 2])
def test_steps_on_offloaded_parameters_are_those_on_others(
    pool: Callable[[int], Pool], adapter: Adapter, strategy: Strategy, micro_batches: int
) -> None:
    assert pool(4).run(distance_from_kept, adapter, strategy, micro_batches) == [0.0] * 4


def distance_from_stock(adapter: Adapter) -> float:
    """In a worker: the distance from torch's own FSDP with the same optimizers.

    Torch's parameters stay where they are: before 2.13, its hooks see offloaded gradients that have not arrived.
    """
    with without_pinning():
        ours, stock = stepped(offloading(adapter), Strategy("GGG", **TWO))[0], stepped(adapter, STOCK)[0]
        return models.distance({name: weight.to(stock[name].device) for name, weight in ours.items()}, stock)


@over_adapters
def test_steps_on_offloaded_parameters_equal_stock(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    assert max(pool(4).run(distance_from_stock, adapter)) <= 1e-6  # sums in another order


def order(adapter: Adapter) -> list[str]:
    """In a worker: the order of what a backward does."""
    with without_pinning():
        return stepped(offloading(adapter), Strategy("IGG", **TWO))[1]


@over_adapters
def test_optimizers_step_behind_the_backward(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for found in pool(4).run(order, adapter):
        # The net has three blocks and the root, which comes last: all blocks are launched before the first step.
        assert found[:3] == ["block"] * 3
        assert set(found[3:]) == {"step"}


def after_an_exception(adapter: Adapter) -> float:
    """In a worker: the distance from a training without the step whose backward has failed in the last block."""
    strategy, weights = Strategy("IGG", **TWO), []

    def fail(module: nn.Module, gradients: Any) -> None:
        raise FloatingPointError

    with without_pinning():
        for failing in (False, True):
            model = make(offloading(adapter), strategy, Counting, lr=0.125)
            for step in range(3):
                if failing and step == 1:
                    handle = model.blocks[0].up.register_full_backward_pre_hook(fail)
                    with pytest.raises(FloatingPointError):
                        models.loss_of(model, models.batch(9, 9)).backward()
                    handle.remove()
                    model.zero_grad()
                    if isinstance(model, FSDPModule):
                        model.reset_iter_state()
                models.loss_of(model, models.batch(step, 0)).backward()
            weights.append(adapter.full_weights(model))
    return models.distance(*weights)


@over_adapters
def test_an_exception_in_a_backward_drops_the_steps_that_waited(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    """Two units wait for their steps when the third fails, so the backward has made none."""
    if not isinstance(adapter, Fsdp1) and not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("torch's fully_shard recovers from exceptions since 2.13")
    assert pool(4).run(after_an_exception, adapter) == [0.0] * 4


def test_steps_are_made_in_order_and_once() -> None:
    arriving, made = ArrivingGradients(), list[int]()
    for unit in range(5):
        arriving.step_on_arrival(None, lambda unit=unit: made.append(unit))
        assert made == list(range(max(unit + 1 - UNITS_BEHIND, 0)))
    arriving.step_all()
    arriving.step_all()
    assert made == list(range(5))
    arriving.step_on_arrival(None, lambda: made.append(5))
    arriving.drop()
    arriving.step_all()
    assert made == list(range(5))
