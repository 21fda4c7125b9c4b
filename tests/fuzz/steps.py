"""Steps of a program: micro-batches and what optimizers do after them."""

from __future__ import annotations

from hypothesis import strategies as st

from .draft import Draft
from .events import direct_call, show, unshard, within_a_step
from .features import HAS_RESET, Feature
from .program import MicroBatch, SharpStep, Step, ZeroGrad

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
"""What only happens before the last micro-batch of a step."""


def step(draft: Draft, scaler: bool) -> None:
    """Draw micro-batches and the steps of some optimizers."""
    draw = draft.draw
    if draft.has(Feature.SAM) or draft.has(Feature.LBFGS):
        draft.ops.append(ZeroGrad("models"))
        for at in range(len(draft.optimizers)):
            draft.ops.append(SharpStep(draft.passes(True, same=True), at))
        draft.has_run = True
        draft.ops.append(ZeroGrad("models"))
        return
    last = draw(st.integers(2 if draft.features & WITHIN_STEPS else 1, 3)) - 1
    for number in range(last + 1):
        _micro_batch(draft, number == last, scaler)
        if number < last and draft.one_in(2 if Feature.FREEZE_WITHIN_STEP in draft.features else 8):
            within_a_step(draft)
    all_ = tuple(range(len(draft.optimizers)))
    # With local steps, all of them: what others keep is not what the simulation keeps.
    stepping = all_ if scaler or draft.local_steps or not draft.one_in(4) else (draw(st.sampled_from(all_)),)
    draft.ops.append(Step(stepping, clip=0.3 if draft.clips and draft.one_in(4) else None))
    if draft.has(Feature.SHOWN, 3):
        show(draft)
    zeros = draft.has(Feature.ZEROS, 1 if Feature.FREEZE_KEEPING_GRADIENTS in draft.features else 2)
    if draft.one_in(6):
        draft.ops.append(ZeroGrad(draw(st.sampled_from(("models", "modules"))), not zeros))
    else:
        draft.ops.extend(ZeroGrad(optimizer, not zeros) for optimizer in stepping)


def _micro_batch(draft: Draft, last: bool, scaler: bool) -> None:
    draw = draft.draw
    sync = last or draft.one_in(3)
    fails = None
    if not draft.local_steps and draft.one_in(20):
        fails = draw(st.sampled_from(FAILS[draft.adapter]))
    several = {} if fails else _backwards(draft)
    same = bool(several)  # since each backward may reduce what has a gradient then
    if direct := None if fails or last or draft.pending else direct_call(draft):
        several, same, sync = {}, True, False
    passes = draft.passes(sync, same)
    overflows = draw(st.integers(0, draft.world - 1)) if scaler and draft.one_in(4) else None
    unsynced: tuple[tuple[int, int], ...] = ()
    if sync and not last and not fails and not several and draft.has(Feature.PARTIAL_SYNC, 2):
        unsynced = _unsynced(draft)
    # What has accumulated in some units may not be even where all reduce, so the last micro-batch evens it out.
    all_reduce = last or not sync or bool(fails) or not draft.has(Feature.REQUIRES_ALL_REDUCE, 2)
    reshard = last or bool(fails) or not draft.has(Feature.RESHARD, 3)
    unshard(draft)
    draft.ops.append(
        MicroBatch(
            passes,
            sync,
            fails,
            overflows,
            unsynced=unsynced,
            direct=direct,
            all_reduce=all_reduce,
            reshard=reshard,
            **several,  # type: ignore[arg-type]
        )
    )
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
    if draft.pending and draft.adapter == "fsdp2" and not draft.zero_unused and draft.is_uneven(set(draft.pending)):
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
    units = [
        (i, unit)
        for i, model in enumerate(draft.models)
        for unit in range(len(model.units) + 1)
        if (unit == len(model.units) and not model.rootless)
        or (unit < len(model.units) and model.units[unit].wrapped and not model.listed)
    ]
    return tuple(draft.draw(st.lists(st.sampled_from(units), unique=True, min_size=1))) if units else ()
