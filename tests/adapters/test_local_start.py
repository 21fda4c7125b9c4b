"""Synchronous steps before nodes train on their own: beside the same strategy without local steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from harness import models
from harness.adapter import Adapter, Case, Precision
from harness.covering import ADAPTERS, over_adapters, over_pairs
from harness.fsdp2 import Fsdp2
from harness.messages import attempt
from harness.pool import Pool
from harness.training import differing_tensors, train
from harness.wiretap import sent_in
from local_nodes import LAYOUTS, sgd, strategy_of
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fsdp_zpp import Int4, Int8, LocalSteps, LoCo, Strategy, agreed_weights, exchange_weights, traffic

CODECS: dict[str, dict[str, Any]] = {
    "no codec": {},
    "int4": {"gradients": Int4(32)},
    "errors between nodes": {"gradients": Int4(32), "error_feedback": LoCo()},
    "errors on both hops": {"gradients": Int4(32), "intra_gradients": Int8(32), "error_feedback": LoCo(hops="both")},
}


def with_start(strategy: Strategy, **local_steps: Any) -> Strategy:
    """The same strategy, with local steps after synchronous ones."""
    return replace(strategy, local_steps=LocalSteps(**local_steps))


def side_by_side(
    adapter: Adapter, strategy: Strategy, case: Case, divide_factor: float | None = None
) -> tuple[float, int, int]:
    """In a worker: how far weights are apart after any step, differing losses, and how nodes differ in the end.

    All steps are synchronous, the last of which ends the start.
    """
    found: list[tuple[list[float], list[dict[str, Tensor]]]] = []
    models_ = [adapter.make(case, each) for each in (strategy, with_start(strategy, every=2, start=case.steps))]
    for model in models_:
        for module in model.modules() if divide_factor is not None else ():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(divide_factor)
        weights: list[dict[str, Tensor]] = []
        losses = train(adapter, model, case, lambda *_: weights.append(adapter.full_weights(model)))  # noqa: B023
        found.append((losses, weights))
    (losses, weights), (ours, our_weights) = found
    assert len(weights) == len(our_weights) == case.steps
    differing = sum(a != b for a, b in zip(losses, ours, strict=True))
    return max(map(models.distance, weights, our_weights)), differing, differing_tensors(adapter, models_[1])


@over_pairs(
    adapter=ADAPTERS,
    layout=LAYOUTS,
    codecs=CODECS,
    case={
        "clipped": Case(steps=4),
        "micro-batches": Case(steps=4, micro_batches=3, optimizer="adamw-foreach"),
        "scaler": Case(steps=4, scaler=True, micro_batches=2, synced=True),
        "partly frozen": Case(steps=4, frozen=True, clip=None),
        "bf16": Case(steps=4, precision=Precision(torch.bfloat16, torch.float32), micro_batches=2),
    },
)
def test_the_start_is_the_strategy_without_local_steps_bit_for_bit(
    pool: Callable[[int], Pool], adapter: Adapter, layout: tuple[str, int], codecs: dict[str, Any], case: Case
) -> None:
    strategy = Strategy(layout[0], gpus_per_node=layout[1], **codecs)
    assert pool(4).run(side_by_side, adapter, strategy, case) == [(0, 0, 0)] * 4


def bytes_of_each_step(adapter: Adapter, strategy: Strategy, steps: int) -> list[dict[str, dict[str, int]]]:
    """In a worker: what each step sends, of two micro-batches."""
    model, case, sent = adapter.make(Case(), strategy), Case(steps=1, micro_batches=2), []
    optimizer = sgd(model)
    for step in range(steps):
        traffic(model, reset=True)
        train(adapter, model, case, optimizer=optimizer, first_step=step)
        sent.append({kind: dict(of_hop) for kind, of_hop in traffic(model).items()})
    return sent


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_divide_factor_divides_the_sum_over_all_ranks_in_the_start(
    pool: Callable[[int], Pool], layout: tuple[str, int]
) -> None:
    strategy, case = Strategy(layout[0], gpus_per_node=layout[1]), Case(steps=3, micro_batches=2, clip=None)
    assert pool(4).run(side_by_side, Fsdp2(), strategy, case, 2.0) == [(0, 0, 0)] * 4


def _inside(step: dict[str, dict[str, int]]) -> int:
    return sum(of_hop["intra"] for of_hop in step.values())


@over_pairs(adapter=ADAPTERS, layout=LAYOUTS, codecs=list(CODECS))
def test_each_phase_sends_what_it_sends_alone(
    pool: Callable[[int], Pool], adapter: Adapter, layout: tuple[str, int], codecs: str
) -> None:
    levels, gpus = layout
    given = CODECS[codecs]
    synchronous = Strategy(levels, gpus_per_node=gpus, **given)
    config: dict[str, Any] = {"every": 2, "codec": Int8(32), "spread": False}
    # In a node there is nothing that codecs and errors of the inter-node hop do.
    inside = {"intra_gradients": given["intra_gradients"]} if "intra_gradients" in given else {}
    feedback = {"error_feedback": given["error_feedback"]} if inside else {}
    local = Strategy(levels, gpus_per_node=gpus, local_steps=LocalSteps(**config), **inside, **feedback)
    run = partial(pool(4).run, bytes_of_each_step, adapter)
    ours, *alone = run(with_start(synchronous, start=4, **config), 8), run(synchronous, 4), run(local, 4)
    for phases, in_sync, on_its_own in zip(ours, *alone, strict=True):
        assert phases[:4] == in_sync
        assert all(step["reduce"]["inter"] for step in phases[:4])
        if (str(adapter), levels) == ("fsdp1", "NNN"):
            # FSDP1 pads an unsharded flat parameter by the ranks that it knows: all of them, not those of the node.
            assert [_inside(step) for step in phases[4:]] == pytest.approx(list(map(_inside, on_its_own)), rel=2e-3)
        else:
            assert phases[4:] == on_its_own
        assert [step["reduce"]["inter"] > 0 for step in phases[4:]] == [False, False, True, False]


def switched(adapter: Adapter, strategy: Strategy, case: Case, steps: int) -> tuple[float, int]:
    """In a worker: a training with a start, and local steps that begin with the weights that the start ends with."""
    assert strategy.local_steps is not None
    start = strategy.local_steps.start
    first = adapter.make(case, strategy)
    train(adapter, first, replace(case, steps=start), optimizer=sgd(first))
    second = adapter.make(case, replace(strategy, gradients=None, local_steps=replace(strategy.local_steps, start=0)))
    adapter.load_from(first, second, adapter.state_dict_kinds[0])
    for model in (first, second):
        train(adapter, model, replace(case, steps=steps), optimizer=sgd(model), first_step=start)
        exchange_weights(model)
    return models.distance(adapter.full_weights(first), adapter.full_weights(second)), differing_tensors(adapter, first)


@over_pairs(adapter=ADAPTERS, layout=LAYOUTS, gradients=[None, Int4(32)], overlap=[0, 1], micro_batches=[1, 2])
def test_local_steps_go_on_from_where_the_start_ends(
    pool: Callable[[int], Pool],
    adapter: Adapter,
    layout: tuple[str, int],
    gradients: Int4 | None,
    overlap: int,
    micro_batches: int,
) -> None:
    # Without momentum, which would have been warmed up. A start of whole exchanges, after which all are due as usual.
    config = LocalSteps(2, outer_momentum=0.0, nesterov=False, outer_lr=0.5, overlap=overlap, start=4)
    strategy = Strategy(layout[0], gpus_per_node=layout[1], gradients=gradients, local_steps=config)
    case = Case(micro_batches=micro_batches)
    assert pool(4).run(switched, adapter, strategy, case, 5) == [(0, 0)] * 4


def shown_in_the_start(adapter: Adapter, strategy: Strategy) -> list[float]:
    """In a worker: what an exchange and the agreed weights are while nodes are alike."""
    model = adapter.make(Case(), strategy)
    optimizer = models.make_optimizer("sgd", model.parameters())
    found = []
    for steps in (3, 1):  # in the start, and after its last step
        train(adapter, model, Case(steps=steps), optimizer=optimizer, first_step=3 - 3 * (steps == 3))
        before = adapter.full_weights(model)

        def look() -> None:
            exchange_weights(model)
            with agreed_weights(model):
                found.append(models.distance(adapter.full_weights(model), before))  # noqa: B023

        tap, _ = sent_in(look, model, strategy.gpus_per_node or 1)
        found += [tap.total("inter", "all_to_all"), models.distance(adapter.full_weights(model), before)]
    reference = adapter.make(Case(), strategy)
    optimizers = optimizer, models.make_optimizer("sgd", reference.parameters())
    train(adapter, reference, Case(steps=4), optimizer=optimizers[1])
    for each, of in ((model, optimizers[0]), (reference, optimizers[1])):
        train(adapter, each, Case(steps=3), optimizer=of, first_step=4)
        exchange_weights(each)
    return [*found, models.distance(adapter.full_weights(model), adapter.full_weights(reference))]


@over_pairs(adapter=ADAPTERS, layout=LAYOUTS)
def test_while_nodes_are_alike_an_exchange_does_nothing_and_their_weights_are_the_agreed_ones(
    pool: Callable[[int], Pool], adapter: Adapter, layout: tuple[str, int]
) -> None:
    strategy = strategy_of(*layout, every=2, start=4, codec=None)
    assert pool(4).run(shown_in_the_start, adapter, strategy) == [[0] * 7] * 4


def put_back(adapter: Adapter, strategy: Strategy) -> float:
    """In a worker: a model whose weights are replaced and put back in the start, against one left alone."""
    average, own, *trained = (adapter.make(Case(), strategy) for _ in range(4))
    optimizers = [models.make_optimizer("sgd", model.parameters()) for model in trained]
    kind = adapter.state_dict_kinds[0]
    for model, optimizer in zip(trained, optimizers, strict=True):
        train(adapter, model, Case(steps=2), optimizer=optimizer)
        models.loss_of(model, models.batch(0, 0))  # before which the momentum is warmed up
    adapter.load_from(trained[0], own, kind)
    for source in (average, own):
        adapter.load_from(source, trained[0], kind)
    for model, optimizer in zip(trained, optimizers, strict=True):
        train(adapter, model, Case(steps=5), optimizer=optimizer, first_step=2)
        exchange_weights(model)
    return models.distance(*(adapter.full_weights(model) for model in trained))


@over_adapters
def test_weights_that_are_put_back_leave_the_momentum_as_it_is(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    strategy = strategy_of("III", 2, every=2, start=4, spread=False)
    assert pool(4).run(put_back, adapter, strategy) == [0] * 4


def thawed(adapter: Adapter, strategy: Strategy) -> tuple[int, int, int]:
    """In a worker: differing tensors in the start, after it and after an exchange, of a block that thaws."""
    model = adapter.make(Case(frozen=True), strategy)
    found = []
    for steps, first in ((2, 0), (2, 2), (3, 4)):
        train(adapter, model, Case(steps=steps), first_step=first)
        found.append(differing_tensors(adapter, model))
        for parameter in model.parameters():
            parameter.requires_grad_(True)
    exchange_weights(model)
    assert found[0] == found[1] == 0
    return found[1], found[2], differing_tensors(adapter, model)


@over_adapters
def test_a_unit_that_is_thawed_in_the_start_is_exchanged_after_it(
    pool: Callable[[int], Pool], adapter: Adapter
) -> None:
    for in_start, after, exchanged in pool(4).run(thawed, adapter, strategy_of("III", 2, every=3, start=4)):
        assert (in_start, exchanged) == (0, 0)
        assert after > 0


def left_over(adapter: Adapter, cleared: bool) -> tuple[str, str]:
    """In a worker: the error of a switch while gradients of an earlier step wait."""
    model = adapter.make(Case(), Strategy("III", local_steps=LocalSteps(2, start=1), gpus_per_node=2))
    optimizer = sgd(model)

    def run() -> None:
        models.loss_of(model, models.batch(0, 0)).backward()
        with adapter.micro_batch(model, False, False):
            models.loss_of(model, models.batch(0, 1)).backward()
        optimizer.step()
        if cleared:
            optimizer.zero_grad()
        models.loss_of(model, models.batch(1, 0)).backward()

    if cleared:
        run()
        return "", ""
    return attempt((run, RuntimeError, ""))[:2]


@over_adapters
def test_gradients_that_wait_at_the_switch_are_refused(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    assert pool(4).run(left_over, adapter, True) == [("", "")] * 4
    for kind, message in pool(4).run(left_over, adapter, False):
        assert kind == "RuntimeError", message
        assert ", step 2: local_steps reduces gradients over other ranks from here on" in message
