"""Synchronous steps after nodes have trained on their own: nodes that become equal, and stay so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, over_adapters, over_pairs
from harness.messages import attempt
from harness.pool import Pool
from harness.training import differing_tensors, train
from local_nodes import LAYOUTS, strategy_of
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_zpp import Int4, LocalSteps, LoCo, Strategy, agreed_weights, exchange_weights, invalidate
from fsdp_zpp.runtime.unit import StrategyUnit, named_units


def states_of(optimizer: Any) -> list[Tensor]:
    """An optimizer's states on this rank, of parameters that it holds values of."""
    states = (optimizer.state[p] for group in optimizer.param_groups for p in group["params"])
    found = [value for state in states for _, value in sorted(state.items()) if isinstance(value, Tensor)]
    return [(each.to_local() if isinstance(each, DTensor) else each).detach().cpu().clone() for each in found]


def differing_states(optimizer: Any, gpus_per_node: int) -> int:
    """In a worker: how many states differ between ranks with the same local index."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, states_of(optimizer))
    same = found[dist.get_rank() % gpus_per_node :: gpus_per_node]
    return sum(any(not torch.equal(one, ones[0]) for one in ones) for ones in zip(*same, strict=True))


def rejoined(adapter: Adapter, strategy: Strategy, case: Case) -> tuple[list[int], list[int], int]:
    """In a worker: differing weights and states before the stop, and after each step that follows it."""
    gpus = strategy.gpus_per_node
    assert gpus is not None
    assert strategy.local_steps is not None
    assert strategy.local_steps.stop is not None
    model = adapter.make(case, strategy)
    optimizer = models.make_optimizer(case.optimizer, model.parameters())
    stop = strategy.local_steps.stop
    weights, states = [], []
    for steps, first in ((stop, 0), (1, stop), (1, stop + 1)):
        train(adapter, model, replace(case, steps=steps), optimizer=optimizer, first_step=first)
        weights.append(differing_tensors(adapter, model))
        states.append(differing_states(optimizer, gpus))
    before = adapter.full_weights(model)
    exchange_weights(model)
    with agreed_weights(model):
        return weights, states, int(models.distance(before, adapter.full_weights(model)) > 0)


@over_pairs(
    adapter=ADAPTERS,
    layout=LAYOUTS,
    config={
        "int4": LocalSteps(2, stop=3),
        "after a start": LocalSteps(2, start=1, stop=3, error_feedback=LoCo()),
        "on its way": LocalSteps(4, overlap=2, mix=0.5, stop=5),
        "due at the stop": LocalSteps(2, spread=False, stop=4, moments_every=1),
    },
    case={
        "sgd": Case(),
        "adamw": Case(optimizer="adamw-foreach", micro_batches=2),
        "scaler": Case(optimizer="adamw-foreach", scaler=True),
    },
    gradients=[None, Int4(32)],
)
def test_after_the_stop_nodes_are_equal_bit_for_bit(
    pool: Callable[[int], Pool],
    adapter: Adapter,
    layout: tuple[str, int],
    config: LocalSteps,
    case: Case,
    gradients: Int4 | None,
) -> None:
    strategy = Strategy(layout[0], gpus_per_node=layout[1], gradients=gradients, local_steps=config)
    for weights, states, moved in pool(4).run(rejoined, adapter, strategy, case):
        assert weights[0] > 0
        assert states[0] > 0
        assert (weights[1:], states[1:], moved) == ([0, 0], [0, 0], 0)


def went_on(adapter: Adapter, strategy: Strategy) -> float:
    """In a worker: how far weights after the stop are from those of the strategy that takes over by hand.

    It takes over the mean of nodes' weights and moments, by collectives of torch's own.
    """
    assert strategy.local_steps is not None
    assert strategy.local_steps.stop is not None
    stop, gpus = strategy.local_steps.stop, strategy.gpus_per_node or 1
    peers, _ = dist.new_subgroups_by_enumeration([list(range(index, 4, gpus)) for index in range(gpus)])
    case, found = Case(optimizer="adamw-foreach"), []
    for each in (strategy, replace(strategy, local_steps=replace(strategy.local_steps, every=100, stop=None, start=0))):
        model = adapter.make(case, each)
        optimizer = models.make_optimizer(case.optimizer, model.parameters())
        train(adapter, model, replace(case, steps=stop), optimizer=optimizer)
        if each is not strategy:
            plain = adapter.make(case, replace(strategy, local_steps=None))
            theirs, optimizer = optimizer, models.make_optimizer(case.optimizer, plain.parameters())
            # A step that makes states to write to.
            train(adapter, plain, replace(case, steps=1), optimizer=optimizer)
            for source, target in zip(model.parameters(), plain.parameters(), strict=True):
                pairs = [(source, target)]
                pairs += [(value, optimizer.state[target][name]) for name, value in theirs.state[source].items()]
                for mine, other in pairs:
                    own = (mine.to_local() if isinstance(mine, DTensor) else mine).detach()
                    mean = own.to(models.device(), torch.float64, copy=True)  # counts of steps are on the CPU
                    dist.all_reduce(mean, group=peers)
                    held = (other.to_local() if isinstance(other, DTensor) else other).data
                    held.copy_(mean / dist.get_world_size(peers))
            invalidate(plain)
            model = plain
        train(adapter, model, replace(case, steps=3), optimizer=optimizer, first_step=stop)
        found.append(adapter.full_weights(model))
    dist.destroy_process_group(peers)
    return models.distance(*found)


@over_pairs(adapter=ADAPTERS, layout=LAYOUTS)
def test_the_steps_after_the_stop_are_those_of_the_strategy_from_the_mean_of_nodes(
    pool: Callable[[int], Pool], adapter: Adapter, layout: tuple[str, int]
) -> None:
    mean = LocalSteps(100, outer_lr=1.0, outer_momentum=0.0, nesterov=False, codec=None, stop=4)
    strategy = Strategy(layout[0], gpus_per_node=layout[1], local_steps=mean)
    for distance in pool(4).run(went_on, adapter, strategy):
        assert distance < 2e-5


def released(adapter: Adapter, strategy: Strategy) -> tuple[int, int]:
    """In a worker: parameters with agreed weights before and after the stop."""
    model, found = adapter.make(Case(), strategy), []
    optimizer = models.make_optimizer("sgd", model.parameters())
    for steps, first in ((3, 0), (2, 3)):
        train(adapter, model, Case(steps=steps), optimizer=optimizer, first_step=first)
        fragments = [unit.fragment for unit in named_units(model) if isinstance(unit, StrategyUnit)]
        found.append(sum(len(fragment.outer.names) for fragment in fragments if fragment is not None))
    return found[0], found[1]


@over_adapters
def test_after_the_stop_no_outer_state_is_kept(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for before, after in pool(4).run(released, adapter, strategy_of("III", 2, every=2, stop=3)):
        assert before > 0
        assert after == 0


def stopped_without_an_optimizer_of_torchs(adapter: Adapter) -> tuple[str, str]:
    """In a worker: the error of an optimizer whose moments are not known, long before the stop."""
    model = adapter.make(Case(), strategy_of("III", 2, every=2, stop=1000))
    run = partial(train, adapter, model, Case(steps=4, clip=None), optimizer=models.PlainSgd(model))
    return attempt((run, ValueError, ""))[:2]


@over_adapters
def test_moments_of_an_unknown_optimizer_can_not_be_averaged(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for kind, message in pool(4).run(stopped_without_an_optimizer_of_torchs, adapter):
        assert kind == "ValueError", message
        assert "local steps without moments_every and stop" in message
