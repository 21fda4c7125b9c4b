"""Frozen units are gathered at most once a pass, ahead of their use once the order is known."""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_zpp.frozen.double_buffer import DoubleBuffer


class Unit:
    """A unit whose gathered bytes are its number; notes each gather."""

    def __init__(self, number: int, log: list[int], nbytes: int = 16) -> None:
        self.label, self.number, self.log = f"unit {number}", number, log
        self.device, self.gathered_shape = torch.device("cpu"), (2, nbytes)

    def gather(self, out: Tensor) -> None:
        """Fill ``out``."""
        self.log.append(self.number)
        out.fill_(self.number)

    def split(self, gathered: Tensor) -> tuple[Tensor, ...]:
        """Two parts."""
        return gathered.split([5, gathered.shape[1] - 5], dim=1)


def demanded(buffers: DoubleBuffer, unit: Unit) -> list[int]:
    """The gathers that a demand makes; its bytes must be the unit's."""
    before = len(unit.log)
    rows = torch.cat(list(buffers.get(unit)), dim=1)
    assert rows.shape == unit.gathered_shape
    assert bool((rows == unit.number).all())
    return unit.log[before:]


def step(buffers: DoubleBuffer, units: list[Unit]) -> list[list[int]]:
    """The gathers of a forward and a backward."""
    return [demanded(buffers, unit) for unit in (*units, *reversed(units))]


def test_the_next_unit_is_gathered_ahead_once_the_order_is_known() -> None:
    log: list[int] = []
    buffers, units = DoubleBuffer(), [Unit(i, log, nbytes=16 * (1 + i % 3)) for i in range(5)]
    # The first step knows no order. The unit before the last is still there when the backward comes to it.
    assert step(buffers, units) == [[0], [1], [2], [3], [4], [], [], [2], [1], [0]]
    # From then on each is gathered as the one before it is asked for, and turning round costs nothing.
    for _ in range(2):
        assert step(buffers, units) == [[], [2], [3], [4], [], [], [2], [1], [0], []]


def test_forwards_between_steps_gather_each_unit_once() -> None:
    log: list[int] = []
    buffers, units = DoubleBuffer(), [Unit(i, log) for i in range(4)]
    for _ in range(3):
        step(buffers, units)
        passes = [[demanded(buffers, unit) for unit in units] for _ in range(3)]
        # In a row of forwards each unit is gathered once, ahead; the first one as the last is in use.
        assert passes[-1] == [[1], [2], [3], [0]]


def test_two_units_stay_gathered() -> None:
    log: list[int] = []
    buffers, units = DoubleBuffer(), [Unit(i, log) for i in range(2)]
    for _ in range(3):
        step(buffers, units)
    assert log == [0, 1]


def test_forgotten_units_are_gathered_anew() -> None:
    log: list[int] = []
    buffers, unit = DoubleBuffer(), Unit(7, log)
    demanded(buffers, unit)
    assert demanded(buffers, unit) == []
    buffers.drop(unit)
    assert demanded(buffers, unit) == [7]
