"""Order in which the units of a model reduce gradients before the last micro-batch of a step.

[Note: The order of reductions]
All ranks must issue collectives in the same order. Torch itself reduces in the last micro-batch only, in which all
ranks must use the same units in the same order; in earlier ones, each rank may use other units in another order. A
strategy that reduces earlier micro-batches, too, can therefore not reduce units in the order in which autograd finishes
them. It reduces every unit that ranks have gathered for the micro-batch, used or not, once, in the order of the last
backward that synchronized gradients, which is the same on all ranks. Before the first such backward, the order is the
reverse of the model's. A unit that autograd finishes before its turn keeps its gradients until then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar


class OrderedGradients(Protocol):
    """Gradients of a unit, which are reduced in their turn."""

    @property
    def takes_part(self) -> bool:
        """Return whether ranks gathered it for the micro-batch whose backward runs; the same on all ranks."""


U = TypeVar("U", bound=OrderedGradients)


class ReductionOrder(Generic[U]):
    """Tells which units to reduce next; see [Note: The order of reductions].

    Args:
        units: The units of a model, in the model's order.

    Attributes:
        synchronized: The units that reduced in this backward, which synchronizes gradients, in order. An adapter
            appends each when it reduces it.
    """

    def __init__(self, units: Iterable[U]) -> None:
        self._order: list[U] = list(units)[::-1]
        self.synchronized: list[U] = []
        self._turn = 0
        self._finished: set[int] = set()
        self._returned: set[int] = set()

    def finished(self, unit: U) -> list[U]:
        """Note that autograd has finished a unit's gradients; return the units whose turn it is, maybe not this one."""
        self._finished.add(id(unit))
        due = []
        while self._turn < len(self._order):
            following = self._order[self._turn]
            if following.takes_part:
                if id(following) not in self._finished:
                    break
                due.append(following)
            self._turn += 1
        self._returned.update(map(id, due))
        return due

    def remaining(self) -> list[U]:
        """End the backward of a micro-batch; return the units that have not had their turn in it."""
        order, returned = self._order, self._returned
        self.restart()
        # A unit may be gathered only after its turn: in the second of two backwards after two forwards, say.
        return [unit for unit in order if unit.takes_part and id(unit) not in returned]

    def restart(self) -> None:
        """End a backward: start the next one at the first turn, in the order in which this one synchronized."""
        first = dict.fromkeys(self.synchronized)
        self._order = [*first] + [unit for unit in self._order if unit not in first]
        self.abandon()

    def abandon(self) -> None:
        """Forget a backward that was not ended: ranks may have got further than others, so its order says nothing."""
        self.synchronized, self._finished, self._returned, self._turn = [], set(), set(), 0
