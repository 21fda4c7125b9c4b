"""A program that is being drawn, and what torch's own rules leave legal of it.

Every unit is gathered on all ranks in the same order, so all ranks run the same units. FSDP1 reduces a unit when its
flat parameter gets a gradient, so every rank uses something trainable of each unit that runs. fully_shard reduces what
has a gradient, so what ranks have used since the last reduction must be the same when they reduce again, unless unused
parameters are reduced too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from .features import Feature
from .program import Branch, Model, Op, Pass, Use

Key = tuple[int, int, int]
"""A model, a unit and a branch."""


@dataclass
class Draft:
    """A program so far, and its state: features, gradients that are not reduced, and frozen branches."""

    draw: Any
    adapter: str
    models: tuple[Model, ...]
    zero_unused: bool
    load_kinds: tuple[str, ...]
    world: int
    features: frozenset[Feature]
    local_steps: bool
    optimizers: tuple[tuple[tuple[int, int], ...], ...] = ()
    ops: list[Op] = field(default_factory=list)
    pending: dict[Key, set[int]] = field(default_factory=dict)  # the ranks that have a gradient which is not reduced
    frozen: set[Key] = field(default_factory=set)  # now
    marked: list[Feature] = field(default_factory=list)  # features that the program does have so far
    has_run: bool = False  # a forward has gone through the models
    # fully_shard can't reduce gradients of two dtypes, of which some have accumulated: all branches are in use then.
    uses_all: bool = False
    # The error of a large gradient may be more than all of the next, which is not: then none is clipped.
    clips: bool = True
    freezes: bool = True  # something may be frozen

    def __post_init__(self) -> None:
        self.frozen = self.frozen_for_good()

    def frozen_for_good(self) -> set[Key]:
        """Return the branches that are frozen before anything is sharded."""
        return {
            (i, unit, b)
            for i, model in enumerate(self.models)
            for unit, branches in enumerate(model.branches)
            for b, branch in enumerate(branches)
            if branch.frozen or (model.rootless and unit == len(model.units))
        }

    def units(self) -> list[tuple[int, int]]:
        """Return the (model, unit) that are units of their own to FSDP, or roots."""
        return [
            (i, unit)
            for i, model in enumerate(self.models)
            for unit in range(len(model.units) + 1)
            if (model.units[unit].wrapped if unit < len(model.units) else not model.rootless)
        ]

    def has(self, feature: Feature, n: int = 1) -> bool:
        """Draw whether a feature, if it is one of the program's, comes here, once in n draws; mark it."""
        if feature not in self.features or (n > 1 and not self.one_in(n)):
            return False
        self.mark(feature)
        return True

    def mark(self, feature: Feature) -> None:
        """Note that the program has a feature."""
        if feature not in self.marked:
            self.marked.append(feature)

    def one_in(self, n: int) -> bool:
        """True once in n draws; shrinks to False."""
        return self.draw(st.integers(0, n - 1)) == n - 1

    def is_uneven(self, keys: Iterable[Key]) -> bool:
        """Return whether fully_shard can't reduce these now, since only some ranks have accumulated a gradient."""
        if self.adapter != "fsdp2" or self.zero_unused:
            return False
        return any(0 < len(self.pending.get(key, ())) < self.world for key in keys)

    # ---- who uses what

    def passes(self, reducing: bool, same: bool = False) -> tuple[Pass, ...]:
        """Draw a pass through each model, whose gradients are to be reduced after it or not."""
        return tuple(self._pass(i, model, reducing, same) for i, model in enumerate(self.models))

    def _pass(self, i: int, model: Model, reducing: bool, same: bool) -> Pass:
        order = self._order(i, model, reducing)
        n = self.world if not same and self.one_in(2) else 1
        units = list(enumerate(model.branches))
        uses: list[Use] = [tuple(self._use_of(i, unit, branches) for unit, branches in units) for _ in range(n)]
        if reducing and self.adapter == "fsdp2" and not self.zero_unused:
            uses = self._evened_out(i, model, order, uses)
        return Pass(order, tuple(uses[:1] if all(use == uses[0] for use in uses) else uses))

    def _order(self, i: int, model: Model, reducing: bool) -> tuple[int, ...]:
        order = list(range(len(model.units)))
        free = order[2:] if model.listed else list(order)  # those of a list run together
        if free and self.one_in(4):
            skipped = self.draw(st.sampled_from(free))
            left = self._left_to(i, skipped)
            # FSDP1 reduces nothing of a unit that does not run.
            must_run = reducing and (self.is_uneven(left) if self.adapter == "fsdp2" else bool(left))
            if not must_run and not (model.rootless and len(order) == 1):
                order.remove(skipped)
                free.remove(skipped)
        if free and self.one_in(6):
            again = self.draw(st.sampled_from(free))
            # fully_shard reduces after each of the two backwards, of which only the last has all gradients.
            if not (reducing and self.is_uneven(self._left_to(i, again))):
                order.append(again)
        return tuple(order)

    def _left_to(self, i: int, unit: int) -> list[Key]:
        return [key for key in self.pending if key[:2] == (i, unit)]

    def _use_of(self, i: int, unit: int, branches: tuple[Branch, ...]) -> tuple[int, ...]:
        every = tuple(range(len(branches)))
        units = self.models[i].units
        if self.uses_all or self.models[i].rootless or (unit < len(units) and units[unit].nested):
            return every
        if not self.has(Feature.IDLE_WITH_FEEDBACK) and self.one_in(2):
            return every
        thawed = {key[:2] for key in self.frozen_for_good() - self.frozen}
        if self.adapter != "fsdp2" and (i, unit) in thawed:  # a unit of its own to ours, which all ranks use or none
            return every
        used = tuple(self.draw(st.lists(st.sampled_from(every), unique=True, max_size=len(every))))
        trainable = tuple(b for b in every if (i, unit, b) not in self.frozen)
        if self.adapter != "fsdp2" and not set(trainable) & set(used):
            used += trainable[:1]
        return used

    def _evened_out(self, i: int, model: Model, order: tuple[int, ...], uses: list[Use]) -> list[Use]:
        """Add to ``uses`` until all ranks reduce the same."""
        ranks = [list(map(list, uses[rank % len(uses)])) for rank in range(self.world)]
        for unit, branches in enumerate(model.branches):
            runs = unit == len(model.units) or unit in order
            for branch in range(len(branches)):
                if (i, unit, branch) in self.frozen:
                    continue
                now = {rank for rank in range(self.world) if branch in ranks[rank][unit]} if runs else set()
                total = len(now | self.pending.get((i, unit, branch), set()))
                in_part = order.count(unit) > 1 and 0 < len(now) < self.world
                if 0 < total < self.world or in_part:
                    for rank in range(self.world):
                        if branch not in ranks[rank][unit]:
                            ranks[rank][unit].append(branch)
        return [tuple(map(tuple, use)) for use in ranks]

    def used(self, passes: tuple[Pass, ...], units: tuple[tuple[int, int], ...] | None = None) -> None:
        """Note the gradients of a micro-batch that is not reduced, or in which ``units`` are not."""
        for i, part in enumerate(passes):
            for rank in range(self.world):
                for unit, branches in enumerate(part.use(rank)):
                    runs = unit in part.order or unit == len(self.models[i].units)
                    if runs and (units is None or (i, unit) in units):
                        for branch in branches:
                            if (i, unit, branch) not in self.frozen:
                                self.pending.setdefault((i, unit, branch), set()).add(rank)
