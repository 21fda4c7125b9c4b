"""What is said of outer steps: figures beside those of the whole weights by hand, and a warning of those too large."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from harness import models
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, over_adapters, over_pairs
from harness.messages import collected
from harness.outer_fit import correlation_by_search
from harness.pool import Pool
from harness.training import train
from local_nodes import LAYOUTS, sgd, strategy_of
from torch import Tensor, nn

from fsdp_zpp import LocalSteps, Strategy, exchange_weights, monitor

LR, MOMENTUM = 0.5, 0.6
Named = dict[str, Tensor]


def product(one: Named, other: Named) -> float:
    return sum((one[name].double() * other[name].double()).sum().item() for name in one)


def by_hand(agreed: list[Named]) -> dict[str, float]:
    """The figures of the last outer step but one, from the whole weights after each."""
    steps = [{name: (old[name] - new[name]) / LR for name in old} for old, new in pairwise(agreed)]
    kept, moved = steps[-3:-1]  # without Nesterov's, the momentum is the step
    change = {name: moved[name] - MOMENTUM * kept[name] for name in moved}
    weighted = total = 0.0
    for unit in {name.partition("blocks.")[2][:1] for name in change}:
        own = {name: change[name] for name in change if name.partition("blocks.")[2][:1] == unit}
        norm = product(own, own)
        weighted += norm * correlation_by_search(MOMENTUM, product({name: kept[name] for name in own}, own) / norm)
        total += norm
    gain = product(moved, change) / product(change, change)
    return {"outer/gain": LR * gain, "outer/momentum": MOMENTUM, "outer/correlation": weighted / total}


def said_and_by_hand(adapter: Adapter, strategy: Strategy) -> tuple[dict[str, float], dict[str, float]]:
    """In a worker: the figures that a monitor says after several exchanges, and those by hand."""
    model = adapter.make(Case(), strategy)
    optimizer, agreed = sgd(model), [adapter.full_weights(adapter.make(Case(), None))]
    with monitor(model) as watch:
        for step in range(4):
            train(adapter, model, Case(steps=2, clip=None), optimizer=optimizer, first_step=2 * step)
            exchange_weights(model)
            agreed.append(adapter.full_weights(model))
        figures = watch.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            figures = watch._latest()
    return {name: figure for name, figure in figures.items() if name.startswith("outer/")}, by_hand(agreed)


@over_pairs(adapter=ADAPTERS, layout=LAYOUTS)
def test_figures_are_those_by_hand(pool: Callable[[int], Pool], adapter: Adapter, layout: tuple[str, int]) -> None:
    strategy = strategy_of(*layout, every=64, codec=None, outer_lr=LR, outer_momentum=MOMENTUM, nesterov=False)
    results = pool(4).run(said_and_by_hand, adapter, strategy)
    for said, expected in results:
        assert said == results[0][0]  # bit for bit
        assert said == pytest.approx(expected, rel=1e-3)


class Valley(nn.Module):
    """Weights, and their loss: a slope, or a bowl."""

    def __init__(self, slope: float, curvature: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.slope, self.curvature = slope, curvature

    def forward(self, unused: Tensor) -> Tensor:
        return self.slope * self.weight.sum() + 0.5 * self.curvature * self.weight.square().sum()


SLOPE, BOWL = (1.0, 0.0), (0.0, 1.0)
"""Where changes are all alike, and where a step of a node is the last one that it needs."""
OVERSHOOTING = {
    "DiLoCo's": (
        LocalSteps(1, outer_momentum=0.9),
        SLOPE,
        "outer_momentum=0.9 or outer_lr=0.7, or pass outer_momentum='auto'",
    ),
    "large lr": (
        LocalSteps(1, outer_lr=1.9, outer_momentum=0.0, nesterov=False),
        BOWL,
        "(now 1.90 times, correlation -1.00); lower outer_lr=1.9",
    ),
    "large lr, too large for auto": (
        LocalSteps(1, outer_lr=1.5, outer_momentum=0.5),
        SLOPE,
        "; lower outer_momentum=0.5 or outer_lr=1.5",
    ),
}
QUIET = {
    "auto": (LocalSteps(1, outer_momentum="auto"), SLOPE),
    "auto, not Nesterov's": (LocalSteps(1, outer_momentum="auto", nesterov=False), SLOPE),
    "low momentum": (LocalSteps(1, outer_momentum=0.5), SLOPE),
    "low lr": (LocalSteps(1, outer_lr=0.7, outer_momentum=0.1), BOWL),
}


def logged(adapter: Adapter, config: LocalSteps, shape: tuple[float, float], rounds: int) -> list[tuple[str, str]]:
    """In a worker: what is logged of outer steps, at any level."""
    model: Any = adapter.wrap(Valley(*shape).to(models.device()), Strategy("III", local_steps=config, gpus_per_node=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.ones(1, device=models.device())  # for torch 2.11, which on GPUs can't call modules without an input
    with collected() as records:
        logging.getLogger("fsdp_zpp").setLevel(logging.DEBUG)
        for _ in range(rounds):
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        model(x)
    return [record for record in records if "outer" in record[1] and "local steps" not in record[1]]


@pytest.mark.parametrize("name", OVERSHOOTING)
@over_adapters
def test_large_outer_steps_are_warned_of_once(pool: Callable[[int], Pool], adapter: Adapter, name: str) -> None:
    config, shape, remedy = OVERSHOOTING[name]
    first, *others = pool(4).run(logged, adapter, config, shape, 16)
    (warning,) = (text for level, text in first if level == "WARNING")
    assert "outer steps overshoot: in 5 exchanges in a row" in warning
    assert remedy in warning
    assert ("'auto'" in warning) == ("'auto'" in remedy)
    assert others == [[]] * 3


@pytest.mark.parametrize("name", QUIET)
@over_adapters
def test_others_are_not(pool: Callable[[int], Pool], adapter: Adapter, name: str) -> None:
    first, *others = pool(4).run(logged, adapter, *QUIET[name], 16)
    assert {level for level, _ in first} == {"DEBUG"}
    assert others == [[]] * 3


@over_adapters
def test_a_line_is_logged_for_each_round(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    first, *_ = pool(4).run(logged, adapter, LocalSteps(1, outer_momentum="auto"), SLOPE, 6)
    # Of changes that are all alike, the first one has none before it. Then the momentum is what fits them.
    tails = [text.split(": ", 1)[1] for _, text in first]
    assert tails[0] == "outer correlation unknown, outer gain 1.050, outer momentum 0.500"
    assert tails[-1].startswith("outer correlation 0.9")
    assert len(tails) == 5
