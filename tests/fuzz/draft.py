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
from torch.distributed.fsdp import FSDPModule

from .program import (
    Branch,
    Model,
    Op,
    Pass,
    Use,
)

WORLD = 4
HAS_UNUSED_FLAG = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
HAS_RESET = hasattr(FSDPModule, "reset_iter_state")


@dataclass
class Draft:
    """What is drawn so far of a program, and what that leaves legal."""

    draw: Any
    adapter: str
    models: tuple[Model, ...]
    zero_unused: bool
    load_kinds: tuple[str, ...]
    optimizers: tuple[tuple[tuple[int, int], ...], ...] = ()
    ops: list[Op] = field(default_factory=list)
    # By (model, unit, branch), the ranks that have used it in micro-batches that are not reduced yet.
    pending: dict[tuple[int, int, int], set[int]] = field(default_factory=dict)
    frozen: set[tuple[int, int]] = field(default_factory=set)

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
        n = WORLD if by_rank else 1
        uses = [self._use(i, model) for _ in range(n)]
        if reducing:
            uses = self._evened_out(i, model, order, uses)
        uses = [uses[0]] if all(use == uses[0] for use in uses) else uses
        return Pass(order, tuple(uses))

    def _order(self, i: int, model: Model, reducing: bool) -> tuple[int, ...]:
        order = list(range(len(model.units)))
        if order and self.one_in(4):
            skipped = self.draw(st.sampled_from(order))
            if not (reducing and self._must_run(i, skipped)):
                order.remove(skipped)
        if order and self.one_in(6):
            again = self.draw(st.sampled_from(order))
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
        return self.adapter == "fsdp2" and not self.zero_unused and any(len(ranks) < WORLD for ranks in left)

    def _use(self, i: int, model: Model) -> Use:
        return tuple(self._use_of(i, unit, branches) for unit, branches in enumerate(_branches(model)))

    def _use_of(self, i: int, unit: int, branches: tuple[Branch, ...]) -> tuple[int, ...]:
        every = tuple(range(len(branches)))
        if self.one_in(2):
            return every
        used = tuple(self.draw(st.lists(st.sampled_from(every), unique=True, max_size=len(every))))
        trainable = tuple(b for b in every if not branches[b].frozen)
        if self.adapter != "fsdp2" and not set(trainable) & set(used):
            used += trainable[:1]
        return used

    def _evened_out(self, i: int, model: Model, order: tuple[int, ...], uses: list[Use]) -> list[Use]:
        """``uses`` after which all ranks reduce the same."""
        if self.adapter != "fsdp2" or self.zero_unused:
            return uses
        ranks = [list(map(list, uses[rank % len(uses)])) for rank in range(WORLD)]
        for unit, branches in enumerate(_branches(model)):
            runs = unit == len(model.units) or unit in order
            twice = order.count(unit) > 1
            for branch in range(len(branches)):
                before = self.pending.get((i, unit, branch), set())
                now = {rank for rank in range(WORLD) if branch in ranks[rank][unit]} if runs else set()
                if not (before | now) or (len(before | now) == WORLD and not (twice and 0 < len(now) < WORLD)):
                    continue
                for rank in range(WORLD):
                    if branch not in ranks[rank][unit]:
                        ranks[rank][unit].append(branch)
        return [tuple(map(tuple, use)) for use in ranks]

    def used(self, passes: tuple[Pass, ...]) -> None:
        """Note what a micro-batch that is not reduced has used."""
        for i, part in enumerate(passes):
            for rank in range(WORLD):
                for unit, branches in enumerate(part.use(rank)):
                    if unit in part.order or unit == len(self.models[i].units):
                        for branch in branches:
                            self.pending.setdefault((i, unit, branch), set()).add(rank)


def _branches(model: Model) -> list[tuple[Branch, ...]]:
    return [*(unit.branches for unit in model.units), model.root]
