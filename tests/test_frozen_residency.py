"""Which frozen units are gathered when: each at most once a pass, ahead of its use once the order is known."""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_zpp.frozen.residency import Residency


class Unit:
    """A unit whose gathered bytes are its number; notes each gather."""

    def __init__(self, number: int, log: list[int], nbytes: int = 16) -> None:
        self.label, self.number, self.log = f"unit {number}", number, log
        self.device, self.gathered_shape = torch.device("cpu"), (2, nbytes)

    def gather(self, out: Tensor) -> None:
        """Fill ``out``."""
        self.log.append(self.number)
        out.fill_(self.number)


def demanded(residency: Residency, unit: Unit) -> list[int]:
    """The gathers that a demand makes; its bytes must be the unit's."""
    before = len(unit.log)
    rows = residency.demand(unit)
    assert rows.shape == unit.gathered_shape
    assert bool((rows == unit.number).all())
    return unit.log[before:]


def step(residency: Residency, units: list[Unit]) -> list[list[int]]:
    """The gathers of a forward and a backward."""
    return [demanded(residency, unit) for unit in (*units, *reversed(units))]


def test_next_is_gathered_ahead() -> None:
    log: list[int] = []
    residency, units = Residency(), [Unit(i, log, nbytes=16 * (1 + i % 3)) for i in range(5)]
    # The first step knows no order. The unit before the last is still there when the backward comes to it.
    assert step(residency, units) == [[0], [1], [2], [3], [4], [], [], [2], [1], [0]]
    # From then on each is gathered as the one before it is asked for, and turning round costs nothing.
    for _ in range(2):
        assert step(residency, units) == [[], [2], [3], [4], [], [], [2], [1], [0], []]


def test_generation_between_steps() -> None:
    log: list[int] = []
    residency, units = Residency(), [Unit(i, log) for i in range(4)]
    for _ in range(3):
        step(residency, units)
        passes = [[demanded(residency, unit) for unit in units] for _ in range(3)]
        # In a row of forwards each unit is gathered once, ahead; the first one as the last is in use.
        assert passes[-1] == [[1], [2], [3], [0]]


def test_two_units_stay() -> None:
    log: list[int] = []
    residency, units = Residency(), [Unit(i, log) for i in range(2)]
    for _ in range(3):
        step(residency, units)
    assert log == [0, 1]


def test_forgotten_units_are_gathered_anew() -> None:
    log: list[int] = []
    residency, unit = Residency(), Unit(7, log)
    demanded(residency, unit)
    assert demanded(residency, unit) == []
    residency.forget(unit)
    assert demanded(residency, unit) == [7]
