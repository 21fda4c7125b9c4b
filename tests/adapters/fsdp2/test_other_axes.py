"""Every axis beside data parallelism, with every scope: weights as by torch, equal copies, and bytes by a formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from axis_trainings import AXES, WORLD, Training
from harness.pool import Pool
from torch.distributed import fsdp
from torch.distributed.fsdp._fully_shard import _fsdp_common

from fsdp_zpp import Int4Delta, Strategy, fully_shard, traffic
from fsdp_zpp.runtime.unit import StrategyUnit, named_units

STEPS = 10
EXACT = {levels: Strategy(levels) for levels in ("GGG", "IGG", "IIG", "III", "NNG")}
CODED = {
    "zeropp": Strategy.zeropp(),
    "delta": Strategy.zeropp(levels="IIG", weights=Int4Delta()),
    "LoCo": Strategy.loco(),
}
FEW = [("tp", "III"), ("ep", "IGG"), ("tp x ep", "LoCo"), ("pp", "IIG"), ("hsdp", "delta")]
"""Those of every run; the others are slow ones."""


@dataclass
class Outcome:
    """What a rank has seen of ten steps by a strategy and by torch.

    Attributes:
        losses: By a strategy.
        expected: By torch.
        distance: Between the weights, relative to them.
        copies_differ: Whether any copy of a weight differs from another.
        sent: Bytes that were gathered between nodes after the first step.
        once_a_step: What they are if each shard crosses nodes once a step.
    """

    losses: list[float]
    expected: list[float]
    distance: float
    copies_differ: bool
    sent: int
    once_a_step: int


def trained(axis_name: str, strategy: Strategy) -> Outcome:
    """In a worker: train by a strategy and by torch."""
    axis = AXES[axis_name]

    def wrap(module: Any, **arguments: Any) -> Any:
        return fully_shard(module, strategy=strategy, **arguments)

    ours, stock = Training(axis, wrap, ours=True), Training(axis, fsdp.fully_shard, ours=False)
    losses = ours.step(0)  # in which a pipeline's schedule may run a stage once more, to learn shapes
    before = traffic(ours.model)["gather"]["inter"]
    losses += [loss for step in range(1, STEPS) for loss in ours.step(step)]
    expected = [loss for step in range(STEPS) for loss in stock.step(step)]
    theirs = stock.weights()
    units = [unit for unit in named_units(ours.model) if isinstance(unit, StrategyUnit)]
    shards = sum(shard.numel() for unit in units if unit.ranks.inter for shard in unit.sharded.shards())
    return Outcome(
        losses,
        expected,
        float((ours.weights() - theirs).norm() / theirs.norm()),
        ours.copies_differ(axis),
        traffic(ours.model)["gather"]["inter"] - before,
        (STEPS - 1) * shards * 4,
    )


CASES = [
    pytest.param(axis, name, id=f"{axis}, {name}", marks=() if (axis, name) in FEW else pytest.mark.slow)
    for axis in AXES
    for name in (*EXACT, *CODED)
]


@pytest.mark.parametrize(("axis", "name"), CASES)
def test_an_axis_beside_a_strategy(pool: Callable[[int], Pool], axis: str, name: str) -> None:
    if AXES[axis].has("ep") and not hasattr(_fsdp_common, "ShardPlacementResult"):
        pytest.skip("this torch has no mesh for a parameter")
    if axis == "hsdp" and name == "GGG":
        pytest.skip("refused: it shards over all ranks")
    strategy = Strategy(**vars(EXACT.get(name) or CODED[name]) | {"gpus_per_node": AXES[axis].gpus_per_node})
    outcomes = pool(WORLD).run(trained, axis, strategy)
    assert sum(len(outcome.losses) for outcome in outcomes) > 0
    for outcome in outcomes:
        assert not outcome.copies_differ
        if name in CODED:
            assert outcome.losses == pytest.approx(outcome.expected, rel=2e-2)
            continue
        assert outcome.losses == pytest.approx(outcome.expected, rel=1e-5)
        assert outcome.distance <= 1e-5
        if name in ("IGG", "IIG", "NNG"):
            assert outcome.sent == outcome.once_a_step
        elif name == "III":
            assert outcome.sent == 0
