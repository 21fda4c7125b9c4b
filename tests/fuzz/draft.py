"""A program that is being drawn, and what torch's own rules leave legal of it.

Every unit is gathered on all ranks in the same order, so all ranks run the same units. FSDP1 reduces a unit when its
flat parameter gets a gradient, so every rank uses something trainable of each unit that runs. fully_shard reduces what
has a gradient, so what ranks have used since the last reduction must be the same when they reduce again, unless unused
parameters are reduced too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from .features import Feature
from .program import Branch, Model, Op, Pass, Use


@dataclass
class Draft:
    """What is drawn so far of a program, and what that leaves legal."""

    draw: Any
    adapter: str
    models: tuple[Model, ...]
    zero_unused: bool
    load_kinds: tuple[str, ...]
    world: int = 4
    features: frozenset[Feature] = frozenset()
    local_steps: bool = False
    optimizers: tuple[tuple[tuple[int, int], ...], ...] = ()
    ops: list[Op] = field(default_factory=list)
    # By (model, unit, branch), the ranks that have used it in micro-batches that are not reduced yet.
    pending: dict[tuple[int, int, int], set[int]] = field(default_factory=dict)
    # By (model, unit, branch), what is frozen now.
    frozen: set[tuple[int, int, int]] = field(default_factory=set)
    # The features that the program does have, as far as drawing has come.
    marked: list[Feature] = field(default_factory=list)
    # Whether a forward has gone through the models.
    has_run: bool = False
    # Whether all branches are in use: fully_shard can't reduce gradients of two dtypes, of which some have accumulated.
    uses_all: bool = False
    # Whether gradients may be clipped: the error of a large one may be more than all of the next, which is not.
    clips: bool = True
    # Whether anything may be frozen.
    freezes: bool = True

    def __post_init__(self) -> None:
        self.frozen = self.frozen_for_good()

    def frozen_for_good(self) -> set[tuple[int, int, int]]:
        """What is frozen before anything is sharded."""
        return {
            (i, unit, b)
            for i, model in enumerate(self.models)
            for unit, branches in enumerate(branches_of(model))
            for b, branch in enumerate(branches)
            if branch.frozen or (model.rootless and unit == len(model.units))
        }

    def has(self, feature: Feature, n: int = 1) -> bool:
        """Whether a feature is to be drawn here; notes that it was."""
        if feature not in self.features or (n > 1 and not self.one_in(n)):
            return False
        self.mark(feature)
        return True

    def mark(self, feature: Feature) -> None:
        """Note that the program has a feature."""
        if feature not in self.marked:
            self.marked.append(feature)

    def is_uneven(self, keys: set[tuple[int, int, int]]) -> bool:
        """Whether some ranks only have gradients that are not reduced yet."""
        return any(len(self.pending.get(key, ())) not in (0, self.world) for key in keys)

    def one_in(self, n: int) -> bool:
        """True once in n draws; shrinks to False."""
        return self.draw(st.integers(0, n - 1)) == n - 1

    # ---- who uses what

    def passes(self, reducing: bool, same: bool = False) -> tuple[Pass, ...]:
        """A pass through each model, whose gradients are to be reduced after it or not."""
        return tuple(self._pass(i, model, reducing, same) for i, model in enumerate(self.models))

    def _pass(self, i: int, model: Model, reducing: bool, same: bool) -> Pass:
        order = self._order(i, model, reducing)
        by_rank = not same and self.one_in(2)
        n = self.world if by_rank else 1
        uses = [self._use(i, model) for _ in range(n)]
        if reducing:
            uses = self._evened_out(i, model, order, uses)
        uses = [uses[0]] if all(use == uses[0] for use in uses) else uses
        return Pass(order, tuple(uses))

    def _order(self, i: int, model: Model, reducing: bool) -> tuple[int, ...]:
        order = list(range(len(model.units)))
        free = order[2:] if model.listed else list(order)  # those of a list run together
        if free and self.one_in(4):
            skipped = self.draw(st.sampled_from(free))
            if not (reducing and self._must_run(i, skipped)) and not (model.rootless and len(order) == 1):
                order.remove(skipped)
                free.remove(skipped)
        if free and self.one_in(6):
            again = self.draw(st.sampled_from(free))
            # fully_shard reduces after each of the two backwards, of which only the last has all gradients.
            if not (reducing and self._uneven(i, again)):
                order.append(again)
        return tuple(order)

    def _must_run(self, i: int, unit: int) -> bool:
        """Whether a unit can't be left out of a micro-batch that reduces what earlier ones have left to it."""
        if self.adapter != "fsdp2":  # which would not reduce it
            return any(key[:2] == (i, unit) for key in self.pending)
        return self._uneven(i, unit)

    def _uneven(self, i: int, unit: int) -> bool:
        """Whether earlier micro-batches have left fully_shard another set of gradients of a unit on each rank."""
        left = [ranks for key, ranks in self.pending.items() if key[:2] == (i, unit)]
        return self.adapter == "fsdp2" and not self.zero_unused and any(len(ranks) < self.world for ranks in left)

    def _use(self, i: int, model: Model) -> Use:
        return tuple(self._use_of(i, unit, branches) for unit, branches in enumerate(branches_of(model)))

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
        """``uses`` after which all ranks reduce the same."""
        if self.adapter != "fsdp2" or self.zero_unused:
            return uses
        ranks = [list(map(list, uses[rank % len(uses)])) for rank in range(self.world)]
        for unit, branches in enumerate(branches_of(model)):
            runs = unit == len(model.units) or unit in order
            twice = order.count(unit) > 1
            for branch in range(len(branches)):
                if (i, unit, branch) in self.frozen:
                    continue
                before = self.pending.get((i, unit, branch), set())
                now = {rank for rank in range(self.world) if branch in ranks[rank][unit]} if runs else set()
                in_part = twice and 0 < len(now) < self.world
                if not (before | now) or (len(before | now) == self.world and not in_part):
                    continue
                for rank in range(self.world):
                    if branch not in ranks[rank][unit]:
                        ranks[rank][unit].append(branch)
        return [tuple(map(tuple, use)) for use in ranks]

    def used(self, passes: tuple[Pass, ...], units: tuple[tuple[int, int], ...] | None = None) -> None:
        """Note what a micro-batch that is not reduced has used, or in which ``units`` it is not."""
        for i, part in enumerate(passes):
            for rank in range(self.world):
                for unit, branches in enumerate(part.use(rank)):
                    runs = unit in part.order or unit == len(self.models[i].units)
                    if runs and (units is None or (i, unit) in units):
                        for branch in set(branches) - {b for j, u, b in self.frozen if (j, u) == (i, unit)}:
                            self.pending.setdefault((i, unit, branch), set()).add(rank)


def branches_of(model: Model) -> list[tuple[Branch, ...]]:
    """The branches of each unit, and of the root at the end."""
    return [*(unit.branches for unit in model.units), model.root]
