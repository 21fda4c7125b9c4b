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

from . import program as ops
from .features import HAS_RESET, Feature
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


# ---- events in steps, between their micro-batches, and between steps


EVENTS = ("evaluate", "freeze", "load", "write", "summon", "move", "resume")
OF_FEATURES = {
    Feature.FREEZE_BRANCH: "freeze",
    Feature.FREEZE_KEEPING_GRADIENTS: "freeze",
    Feature.FROZEN_IN_OPTIMIZER: "freeze",
    Feature.ADAPTERS: "evaluate",
    Feature.INFERENCE: "evaluate",
    Feature.OPTIMIZERS_ANEW: "remake_optimizers",
    Feature.SHOWN: "show",
    Feature.RESHARD: "reshard",
    Feature.LOADS_IN_PLACE: "load_in_place",
}


def between_steps(draft: Draft) -> None:
    """Draw something between steps."""
    kinds = [kind for kind in EVENTS if not draft.local_steps or kind in ("evaluate", "freeze")]
    kinds += [kind for feature, kind in OF_FEATURES.items() if feature in draft.features for _ in range(3)]
    kind = draft.draw(st.sampled_from(kinds))
    draw, is_as_sharded = draft.draw, draft.frozen == draft.frozen_for_good()
    if kind == "evaluate":
        evaluate(draft)
    elif kind == "freeze":
        freeze(draft)
    elif kind == "load":
        assign = draft.adapter == "fsdp2" and is_as_sharded and draft.one_in(2)
        draft.ops.append(ops.Load(draw(st.sampled_from(draft.load_kinds)), assign))
    elif kind in ("load_in_place", "remake_optimizers"):
        draft.mark(Feature.LOADS_IN_PLACE if kind == "load_in_place" else Feature.OPTIMIZERS_ANEW)
        evaluate(draft)  # which leaves weights that are kept
        draft.ops.append(ops.Event(kind))
    elif kind == "write":
        draft.ops.append(ops.Write(draw(st.sampled_from(("in place", "data", "summon")))))
    elif kind == "resume":
        rootless = any(model.rootless for model in draft.models)
        of_one_model = all(len({i for i, _ in owned}) == 1 for owned in draft.optimizers)
        if is_as_sharded and not rootless and of_one_model and Feature.TWO_IN_A_UNIT not in draft.features:
            draft.ops += [ops.ZeroGrad("models"), ops.Event("resume")]
    elif kind == "show":
        _show(draft)
    elif kind == "reshard":
        draft.mark(Feature.RESHARD)
        draft.ops.append(ops.Tune("reshard", *_unit(draft)))
    else:
        draft.ops.append(ops.Event(kind))


def _within_a_step(draft: Draft) -> None:
    """Draw something between the micro-batches of a step."""
    if draft.has(Feature.FREEZE_WITHIN_STEP, 2):
        freeze(draft, within=True)
    elif draft.one_in(2):
        evaluate(draft)
    else:
        _clear_gradients(draft)


def _clear_gradients(draft: Draft) -> None:
    owned = range(len(draft.optimizers)) if Feature.TWO_IN_A_UNIT not in draft.features else ()
    choice = draft.draw(st.sampled_from((*owned, "models", "modules")))
    draft.ops.append(ops.ZeroGrad(choice))
    left = [] if isinstance(choice, str) else [key for key in draft.pending if key[:2] not in draft.optimizers[choice]]
    draft.pending = {key: draft.pending[key] for key in left}


def evaluate(draft: Draft) -> None:
    """Draw a forward in evaluation."""
    has_adapters = any(b.adapter for model in draft.models for unit in model.units for b in unit.branches)
    reference = has_adapters and draft.has(Feature.ADAPTERS, 2)
    # FSDP keeps tensors that it makes in its first forward, which are none to train with if they are of inference.
    inference = draft.has_run and draft.has(Feature.INFERENCE, 2)
    _unshard(draft)
    direct = _direct_call(draft)
    draft.ops.append(ops.Evaluation(draft.passes(False, same=True), reference, inference, direct))
    if draft.has(Feature.SHOWN, 2):
        _show(draft)


def _show(draft: Draft) -> None:
    draft.mark(Feature.SHOWN)
    draft.ops.append(ops.Event("show"))


def _direct_call(draft: Draft) -> tuple[int, int] | None:
    """A unit to call by itself, once models have run."""
    if Feature.DIRECT_CALL not in draft.features or not draft.has_run or not draft.one_in(2):
        return None
    units = [(i, u) for i, model in enumerate(draft.models) for u in range(2 * model.listed, len(model.units))]
    if not units:
        return None
    draft.mark(Feature.DIRECT_CALL)
    return draft.draw(st.sampled_from(units))


def _unshard(draft: Draft) -> None:
    """Perhaps gather a unit before a forward."""
    for feature, values in ((Feature.UNSHARD, (0,)), (Feature.UNSHARD_ASYNC, (1, 2))):
        if draft.has(feature, 2):
            draft.ops.append(ops.Tune("unshard", *_unit(draft), draft.draw(st.sampled_from(values))))


def set_up(draft: Draft) -> None:
    """Draw what is set before training."""
    if draft.adapter != "fsdp2":
        return
    draw = draft.draw
    if draft.has(Feature.PREFETCH):
        for _ in range(draw(st.integers(1, 3))):
            what = draw(st.sampled_from(("forward prefetch", "backward prefetch")))
            draft.ops.append(ops.Tune(what, *_unit(draft), draw(st.integers(1, 15))))
    if draft.has(Feature.DIVIDE_FACTOR):
        for _ in range(draw(st.integers(1, 2))):
            draft.ops.append(ops.Tune("divide factor", *_unit(draft), draw(st.integers(1, 5))))
    if draft.has(Feature.RESHARD):
        draft.ops.append(ops.Tune("reshard after forward", *_unit(draft), draw(st.integers(0, 1))))


def _unit(draft: Draft) -> tuple[int, int]:
    """Any unit: the root of a model comes first, to which draws shrink."""
    i = draft.draw(st.integers(0, len(draft.models) - 1))
    n = len(draft.models[i].units)
    return i, n - draft.draw(st.integers(0, n))


def freeze(draft: Draft, within: bool = False) -> None:
    """Draw a unit or a branch that is frozen, or no longer."""
    wholes = [] if within and Feature.FREEZE_BRANCH in draft.features else _wholes(draft)
    choices: list[tuple[int, int, int | None]] = [*((*unit, None) for unit in wholes), *_parts(draft)]
    if not choices or not draft.freezes:
        return
    i, unit, branch = draft.draw(st.sampled_from(choices))
    all_keys = {(i, unit, b) for b in range(len(draft.models[i].branches[unit]))}
    keys = all_keys if branch is None else {(i, unit, branch)}
    if within and draft.is_uneven(keys):
        return  # could not be evened out any more
    if within and draft.adapter != "fsdp2" and all_keys <= draft.frozen | keys and all_keys & set(draft.pending):
        return  # stock would not reduce what has accumulated, and fused optimizers would not notice
    if within:
        draft.mark(Feature.FREEZE_WITHIN_STEP)
    elif draft.has(Feature.FREEZE_KEEPING_GRADIENTS, 1 if Feature.ZEROS in draft.features else 2):
        pass
    else:
        draft.ops.append(ops.ZeroGrad("models"))
    if branch is not None:
        draft.mark(Feature.FREEZE_BRANCH)
    frozen = not keys <= draft.frozen
    draft.ops.append(ops.Freeze(i, unit, frozen, branch))
    draft.frozen = draft.frozen | keys if frozen else draft.frozen - keys


def _wholes(draft: Draft) -> list[tuple[int, int]]:
    """Units that may be frozen or unfrozen as a whole."""
    for_good = draft.frozen_for_good()
    return [
        (i, unit)
        for i, model in enumerate(draft.models)
        for unit, each in enumerate(model.units)
        if each.wrapped
        and not any(branch.adapter for branch in each.branches)
        and (Feature.FROZEN_IN_OPTIMIZER in draft.features or not any(key[:2] == (i, unit) for key in for_good))
        and not any(branch.half for branch in each.branches)
    ]


def _parts(draft: Draft) -> list[tuple[int, int, int]]:
    """Branches that may be frozen or unfrozen."""
    if not draft.features & {Feature.FREEZE_BRANCH, Feature.FROZEN_IN_OPTIMIZER} or draft.adapter == "fsdp1 flat":
        return []
    for_good = set() if Feature.FROZEN_IN_OPTIMIZER in draft.features else draft.frozen_for_good()
    return [
        (i, unit, b)
        for i, model in enumerate(draft.models)
        for unit, each in enumerate(model.units)
        for b, branch in enumerate(each.branches)
        if not branch.adapter and not branch.half and not (each.tied and b < 2) and (i, unit, b) not in for_good
    ]


FAILS = {
    "fsdp1": ("loss",),  # FSDP1 itself does not come back from exceptions within a forward or backward
    "fsdp1 flat": ("loss",),
    "fsdp2": ("loss", "forward", "backward") if HAS_RESET else ("loss",),
}


WITHIN_STEPS = {
    Feature.FREEZE_WITHIN_STEP,
    Feature.REQUIRES_ALL_REDUCE,
    Feature.PARTIAL_SYNC,
    Feature.RESHARD,
    Feature.DIRECT_CALL,
}
"""Features that only show before the last micro-batch of a step."""


def step(draft: Draft, scaler: bool) -> None:
    """Draw micro-batches and the steps of some optimizers."""
    draw = draft.draw
    if draft.has(Feature.SAM) or draft.has(Feature.LBFGS):
        steps = [ops.SharpStep(draft.passes(True, same=True), at) for at in range(len(draft.optimizers))]
        draft.ops += [ops.ZeroGrad("models"), *steps, ops.ZeroGrad("models")]
        draft.has_run = True
        return
    last = draw(st.integers(2 if draft.features & WITHIN_STEPS else 1, 3)) - 1
    for number in range(last + 1):
        _micro_batch(draft, number == last, scaler)
        if number < last and draft.one_in(2 if Feature.FREEZE_WITHIN_STEP in draft.features else 8):
            _within_a_step(draft)
    all_ = tuple(range(len(draft.optimizers)))
    # With local steps, all of them: what others keep is not what the simulation keeps.
    stepping = all_ if scaler or draft.local_steps or not draft.one_in(4) else (draw(st.sampled_from(all_)),)
    draft.ops.append(ops.Step(stepping, clip=0.3 if draft.clips and draft.one_in(4) else None))
    if draft.has(Feature.SHOWN, 3):
        _show(draft)
    zeros = draft.has(Feature.ZEROS, 1 if Feature.FREEZE_KEEPING_GRADIENTS in draft.features else 2)
    if draft.one_in(6):
        draft.ops.append(ops.ZeroGrad(draw(st.sampled_from(("models", "modules"))), not zeros))
    else:
        draft.ops.extend(ops.ZeroGrad(optimizer, not zeros) for optimizer in stepping)


def _micro_batch(draft: Draft, last: bool, scaler: bool) -> None:
    draw = draft.draw
    sync = last or draft.one_in(3)
    fails = None
    if not draft.local_steps and draft.one_in(20):
        fails = draw(st.sampled_from(FAILS[draft.adapter]))
    several = {} if fails else _backwards(draft)
    same = bool(several)  # since each backward may reduce what has a gradient then
    if direct := None if fails or last or draft.pending else _direct_call(draft):
        several, same, sync = {}, True, False
    passes = draft.passes(sync, same)
    overflows = draw(st.integers(0, draft.world - 1)) if scaler and draft.one_in(4) else None
    unsynced: tuple[tuple[int, int], ...] = ()
    if sync and not last and not fails and not several and draft.has(Feature.PARTIAL_SYNC, 2):
        unsynced = _unsynced(draft)
    # Gradients of some units may not be even where all reduce, so the last micro-batch evens them out.
    all_reduce = last or not sync or bool(fails) or not draft.has(Feature.REQUIRES_ALL_REDUCE, 2)
    reshard = last or bool(fails) or not draft.has(Feature.RESHARD, 3)
    _unshard(draft)
    several |= {"unsynced": unsynced, "direct": direct, "all_reduce": all_reduce, "reshard": reshard}
    draft.ops.append(ops.MicroBatch(passes, sync, fails, overflows, **several))  # type: ignore[arg-type]
    draft.has_run = draft.has_run or direct is None
    if sync or fails:
        draft.pending.clear()
    elif direct is None:
        draft.used(passes)
    else:
        branches = passes[direct[0]].use(0)[direct[1]]
        draft.pending |= {(*direct, b): set(range(draft.world)) for b in branches if (*direct, b) not in draft.frozen}
    if unsynced:
        draft.used(passes, unsynced)


def _backwards(draft: Draft) -> dict[str, object]:
    """Several forwards and backwards of a micro-batch, or none of that."""
    if draft.is_uneven(draft.pending):
        return {}
    if draft.has(Feature.SEVERAL_FORWARDS, 2):
        orders = ("sum", "in turn", "in reverse") if draft.adapter == "fsdp2" else ("sum",)
        how = draft.draw(st.sampled_from(orders))
        return {"forwards": draft.draw(st.integers(2, 3)), "backwards": how}
    if draft.has(Feature.PIPELINED, 2):
        return {"forwards": draft.draw(st.integers(2, 3)), "backwards": "pipelined"}
    if draft.has(Feature.RETAIN_GRAPH, 2):
        return {"backwards": "twice"}
    return {}


def _unsynced(draft: Draft) -> tuple[tuple[int, int], ...]:
    """Some of the units, which have nothing pending that a partial synchronization would leave."""
    listed = [i for i, model in enumerate(draft.models) if model.listed]
    units = [(i, unit) for i, unit in draft.units() if i not in listed or unit == len(draft.models[i].units)]
    return tuple(draft.draw(st.lists(st.sampled_from(units), unique=True, min_size=1))) if units else ()
