"""Optimizers that step a model's parameters, by numbers that are the same on all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from torch.optim import Optimizer


class KnownOptimizers:
    """Optimizers in the order in which they became known, by events that all ranks see.

    It keeps none of them alive: ranks may free one at different times, but its number stays.

    Attributes:
        count: How many became known so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._numbers = weakref.WeakKeyDictionary[Optimizer, int]()

    def add(self, optimizer: Optimizer) -> None:
        """Give an optimizer a number, unless it has one, or it wraps one that has."""
        if optimizer not in self._numbers and all(optimizer.state is not each.state for each in self._numbers):
            self._numbers[optimizer] = self.count
            self.count += 1

    def alive(self) -> Mapping[int, Optimizer]:
        """Return those that still exist."""
        return {number: optimizer for optimizer, number in self._numbers.items()}
