"""Error feedback in training: errors follow the optimizer's steps, whatever happens between them."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from harness import models
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, SCOPES, over_adapters, over_each
from harness.pool import Pool
from harness.strategies import COARSE, FEEDBACKS, INTER
from harness.training import make_scaler, scaled_steps, train, trained_weights
from torch import Tensor

from fsdp_zpp import CodecState, LoCo, Strategy


def with_and_without_resets(adapter: Adapter, case: Case, strategy: Strategy, hops: Any) -> list[dict[str, Tensor]]:
    """In a worker: weights trained without feedback, with errors reset at every step, and with feedback."""
    # Without feedback, as with it, the hop that compresses is to see the sum of the micro-batches.
    gradients = "N" if hops == "both" else "I"
    scopes = strategy.levels[0] + min(gradients, strategy.levels[1], key="NIG".index) + strategy.levels[2]
    strategies = [
        replace(strategy, levels=scopes),
        *(replace(strategy, error_feedback=LoCo(hops=hops, reset_every=every)) for every in (1, 0)),
    ]
    return [trained_weights(adapter, case, each) for each in strategies]


@over_each(adapter=ADAPTERS, scopes=SCOPES, hops=["inter", "both"])
def test_resetting_errors_at_every_step_is_no_feedback(
    pool: Callable[[int], Pool], adapter: Adapter, scopes: str, hops: Any
) -> None:
    """Errors that are forgotten after every step of several micro-batches have never been there."""
    strategy = replace(COARSE, levels=scopes)
    case = Case(steps=3, micro_batches=2)
    for plain, reset, fed_back in pool(4).run(with_and_without_resets, adapter, case, strategy, hops):
        assert models.distance(reset, plain) == 0
        assert models.distance(fed_back, plain) > 1e-4


class QuietSgd(models.PlainSgd):
    """An optimizer that torch knows nothing of, but that its gradient scaler takes."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.param_groups = [{"params": self.parameters}]


def scaled_run(
    adapter: Adapter, strategy: Strategy, optimizer_name: str, overflow_at: int | None, scaled: bool, backwards: int = 1
) -> dict[str, Tensor]:
    """In a worker: weights after four steps, with a step that overflows in between, on a growing loss scale."""
    model = adapter.make(Case(), strategy)
    if optimizer_name == "quiet":
        optimizer: Any = QuietSgd(model)
    else:
        optimizer = models.make_optimizer(optimizer_name, model.parameters())
    steps = list(range(4))
    if overflow_at is not None:
        steps.insert(overflow_at, -1)
    scaled_steps(model, optimizer, make_scaler(scaled), steps, backwards)
    return adapter.full_weights(model)


@cache
def unscaled_run(adapter: Adapter, strategy: Strategy, optimizer_name: str, backwards: int) -> dict[str, Tensor]:
    """In a worker: the same without a scaler and without that step."""
    return scaled_run(adapter, strategy, optimizer_name, None, False, backwards)


def scaled_distance(
    adapter: Adapter, strategy: Strategy, optimizer_name: str, backwards: int, overflow_at: int | None
) -> float:
    """In a worker: the distance of the two."""
    scaled = scaled_run(adapter, strategy, optimizer_name, overflow_at, True, backwards)
    return models.distance(scaled, unscaled_run(adapter, strategy, optimizer_name, backwards))


@over_each(
    2,
    adapter=ADAPTERS,
    feedback=FEEDBACKS,
    optimizer=["sgd", "adamw-fused", "quiet"],
    backwards=[1, 2],
    overflow_at=[None, 0, 2],
)
def test_a_step_that_the_scaler_skips_leaves_errors_as_they_were(
    pool: Callable[[int], Pool],
    adapter: Adapter,
    feedback: LoCo,
    optimizer: str,
    backwards: int,
    overflow_at: int | None,
) -> None:
    """And errors follow the loss scale: powers of two change nothing, so weights are the same without a scaler."""
    strategy = replace(COARSE, error_feedback=feedback)
    assert pool(4).run(scaled_distance, adapter, strategy, optimizer, backwards, overflow_at) == [0] * 4


def beside_a_scaled_model(adapter: Adapter, beside: bool) -> dict[str, Tensor]:
    """In a worker: weights of a model without a scaler, while another model trains with a scaler in between."""
    strategy = replace(COARSE, error_feedback=INTER)
    model, other = adapter.make(Case(), strategy), adapter.make(Case(), strategy)
    optimizers = [models.make_optimizer("sgd", each.parameters()) for each in (model, other)]
    scaler = make_scaler()
    for step in range(3):
        if beside:
            scaled_steps(other, optimizers[1], scaler, [step])
        scaled_steps(model, optimizers[0], make_scaler(False), [step])
    return adapter.full_weights(model)


@over_adapters
def test_the_scaler_of_another_model_changes_nothing(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    alone, beside = (pool(4).run(beside_a_scaled_model, adapter, which)[0] for which in (False, True))
    assert models.distance(beside, alone) == 0


def unknown_optimizer(adapter: Adapter, feedback: LoCo | None) -> dict[str, Tensor]:
    """In a worker: weights under an optimizer that announces no steps."""
    model = adapter.make(Case(), replace(COARSE, levels="IIG", error_feedback=feedback))
    train(adapter, model, Case(steps=3, clip=None), optimizer=models.PlainSgd(model))
    return adapter.full_weights(model)


@over_adapters
def test_errors_are_fed_back_under_optimizers_that_torch_does_not_know(
    pool: Callable[[int], Pool], adapter: Adapter
) -> None:
    plain, reset, fed_back = (
        pool(4).run(unknown_optimizer, adapter, feedback)[0]
        for feedback in (None, LoCo(reset_every=1), LoCo(reset_every=0))
    )
    assert models.distance(reset, plain) == 0
    assert models.distance(fed_back, plain) > 1e-4


class Scale(models.Block):
    """A unit so small that most ranks hold nothing of it."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.factor = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def steps_counted(adapter: Adapter) -> list[int]:
    """In a worker: the steps that each unit has counted, some of them with no element here, one left out at times."""
    strategy = replace(COARSE, error_feedback=INTER)
    net = models.make_net()
    net.blocks.append(Scale().to(models.device()))
    model = adapter.shard(net, Case(), strategy)
    optimizer = models.make_optimizer("sgd", model.parameters())
    scaler = make_scaler()
    for step in range(4):
        net.skipped = 1 if step == 2 else None
        scaled_steps(model, optimizer, scaler, [step])
    parts = [torch.load(io.BytesIO(part)) for name, part in CodecState(model).state_dict().items() if name != "layout"]
    return [part["steps"] for part in parts]


@over_adapters
def test_all_units_of_all_ranks_count_the_same_steps(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for counted in pool(4).run(steps_counted, adapter):
        assert counted == [4] * 5
