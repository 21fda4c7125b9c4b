"""Units whose weights a training step may have changed, and whose copies are stale after it.

[Note: What a step changes]
A step may write to whatever was ever trained and to whatever an optimizer was ever given: weight decay and momentum
move parameters that are frozen by now, and adapters that are switched off while the optimizer steps. So no decision
hangs on what requires a gradient at the moment of asking. Once a unit is found to change, it counts as changing for
good, and this is checked where all ranks pass: at the end of every backward and at every step.

Users may leave parameters of which their rank has no element out of their optimizers. So a unit of which some rank has
none changes with every step: it is too small for that to matter, and ranks could not tell otherwise.

A step after the backward changes all units that change at all, whichever of them its optimizer holds. A step in the
backward, by one of many optimizers, changes only those that it holds: the backward still needs the others' weights, and
if they were stale, it would send all of them between nodes again. When gradients are synchronized, all units that
change are declared stale, on all ranks. So ranks can differ only on a unit of which some step and others hold nothing,
and only until then, which matters if the backward uses the unit again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence, Set

from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_zpp.collectives.agreement import agree_on_use

from .unit import StrategyUnit, Unit

IN_OPTIMIZER = "_fsdp_zpp_in_optimizer"
"""Attribute of parameters that were given to some optimizer."""

logger = logging.getLogger("fsdp_zpp")


class WeightChanges:
    """Tells the units of a model that a step may have changed their weights. See [Note: What a step changes].

    Args:
        units: The units.
        too_small: Those of which some rank has no element; the same on all ranks.
    """

    def __init__(self, units: Sequence[Unit], too_small: Collection[Unit] = ()) -> None:
        self._changing = [unit for unit in units if unit in too_small]
        self._others = [unit for unit in units if unit not in too_small]
        self._has_warned = False

    def look(self, ids: Collection[int] = ()) -> None:
        """Find the units that have begun to change; to be called at a point that all ranks pass.

        Args:
            ids: The ids of the parameters of an optimizer that has stepped.
        """
        others: list[Unit] = []
        untrained: list[Unit] = []
        for unit in self._others:
            if unit.sharded.is_trained():
                self._changing.append(unit)
            elif any(id(p) in ids or getattr(p, IN_OPTIMIZER, False) for p in unit.sharded.parameters()):
                self._changing.append(unit)
                untrained.append(unit)
            else:
                others.append(unit)
        self._others = others
        self._warn_of([unit for unit in untrained if unit.keeps_weights])

    def step(self, ids: Collection[int] = ()) -> None:
        """Declare the weights of units that change stale, for a step made or to come; ``ids`` as of :meth:`look`."""
        self._invalidate(ids, by_step=True)

    def step_in_backward(self, ids: Set[int]) -> None:
        """Declare the units stale that an optimizer in the backward holds a part of; ``ids`` as of :meth:`look`."""
        self.look(ids)
        for unit in self._changing:
            if not ids.isdisjoint(map(id, unit.sharded.parameters())):
                unit.invalidate(by_step=True)

    def written(self, ids: Collection[int]) -> None:
        """Declare these weights stale after other writes of an optimizer, which may change them by more."""
        self._invalidate(ids, by_step=False)

    def _invalidate(self, ids: Collection[int], *, by_step: bool) -> None:
        self.look(ids)
        for unit in self._changing:
            unit.invalidate(by_step=by_step)

    def _warn_of(self, untrained: list[Unit]) -> None:
        if not untrained or self._has_warned:
            return
        self._has_warned = True
        if untrained[0].ranks.rank == 0:
            logger.info(
                "an optimizer was given parameters of %d frozen unit%s (%s%s), which are sent anew after each of its "
                "steps; to send them once, give it only parameters that require gradients",
                len(untrained),
                "" if len(untrained) == 1 else "s",
                ", ".join(unit.sharded.name for unit in untrained[:3]),
                ", ..." if len(untrained) > 3 else "",
            )


def too_small_units(units: Sequence[StrategyUnit]) -> set[Unit]:
    """Return the units of which some rank has no element; the same on all ranks. Collective, once a mesh."""
    flags = [(unit, unit.ranks, [not any(map(local_numel, unit.sharded.parameters()))]) for unit in units]
    return {unit for unit, on_any_rank in agree_on_use(flags) if any(on_any_rank())}


def local_numel(parameter: nn.Parameter) -> int:
    """Return the number of elements that this rank holds."""
    return parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()
