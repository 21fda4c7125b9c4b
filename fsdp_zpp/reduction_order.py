"""The order in which the units of a model reduce gradients before the last micro-batch of a step.

[Note: The order of reductions]
Collectives must come in one order on all ranks, but which units a micro-batch uses, and in which order, is each rank's
own business as long as nothing is communicated: torch itself reduces in the last micro-batch only, which has to be
alike on all ranks. A strategy that reduces earlier ones, too, must therefore not reduce what autograd happens to
finish. It reduces every unit that ranks have gathered for the micro-batch, used or not, once, and in the order of the
last backward that synchronized gradients, which was one on all ranks. Before there was such a backward, the order is
the reverse of the model's. A unit that is finished before its turn keeps its gradients until its turn comes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar


class OrderedUnit(Protocol):
    """Has gradients to reduce in its turn."""

    @property
    def takes_part(self) -> bool:
        """Whether ranks have gathered it for the micro-batch whose backward runs; the same on all of them."""


U = TypeVar("U", bound=OrderedUnit)


class ReductionOrder(Generic[U]):
    """Whose turn it is to reduce; see [Note: The order of reductions].

    Args:
        units: The units of a model, in the model's order.
    """

    def __init__(self, units: Iterable[U]) -> None:
        self._order: list[U] = list(units)[::-1]
        self._synchronized: list[U] = []
        self._turn = 0
        self._finished: set[int] = set()

    def finished(self, unit: U) -> list[U]:
        """Autograd has finished a unit's gradients: the units whose turn has come, this one among them or not."""
        self._finished.add(id(unit))
        return self._advance(everything=False)

    def remaining(self) -> list[U]:
        """The backward of a micro-batch ends: the units that have not had their turn in it."""
        due = self._advance(everything=True)
        self.restart()
        return due

    def _advance(self, everything: bool) -> list[U]:
        due = []
        while self._turn < len(self._order):
            unit = self._order[self._turn]
            if unit.takes_part:
                if not everything and id(unit) not in self._finished:
                    break
                due.append(unit)
            self._turn += 1
        return due

    def synchronized(self, unit: U) -> None:
        """A unit reduces the gradients of a step."""
        self._synchronized.append(unit)

    def restart(self) -> None:
        """A backward ends, or one that failed is forgotten; adopt the order in which it synchronized gradients."""
        first = list(dict.fromkeys(self._synchronized))
        self._order = first + [unit for unit in self._order if unit not in first]
        self._synchronized, self._finished, self._turn = [], set(), 0
