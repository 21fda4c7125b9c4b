"""Hypothesis strategies for programs that are legal under stock FSDP."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from fsdp_zpp import Int4, Int4Delta, Int8, LoCo, Strategy
from fsdp_zpp.config.strategy import LEGAL_LEVELS

from .draft import HAS_RESET, HAS_UNUSED_FLAG, WORLD, Draft
from .program import (
    Branch,
    Evaluation,
    Freeze,
    Load,
    MicroBatch,
    Model,
    Move,
    Program,
    Resume,
    Step,
    Summon,
    Unit,
    Write,
    ZeroGrad,
)

KINDS = ("linear", "affine", "norm", "scale", "mlp")
LOAD_KINDS = {
    "fsdp1": ("FULL_STATE_DICT", "SHARDED_STATE_DICT"),
    "fsdp1 flat": ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"),
    "fsdp2": ("sharded",),
}
FAILS = {
    "fsdp1": ("loss",),  # FSDP1 itself does not come back from exceptions within a forward or backward
    "fsdp1 flat": ("loss",),
    "fsdp2": ("loss", "forward", "backward") if HAS_RESET else ("loss",),
}


def strategies_without_codecs(scopes: Sequence[str] = LEGAL_LEVELS) -> st.SearchStrategy[Strategy]:
    """Letters alone."""
    return st.builds(Strategy, st.sampled_from(scopes), gpus_per_node=st.sampled_from((2, 2, 2, 1)))


@st.composite
def strategies_with_codecs(draw: st.DrawFn) -> Strategy:
    """Letters with a codec on some hop."""
    scopes = draw(st.sampled_from(LEGAL_LEVELS))
    weights = draw(st.sampled_from((None, Int8(32), *([Int4Delta(32)] if scopes[0::2] == "IG" else []))))
    gradients = draw(st.sampled_from((Int8(32), Int4(32), *([None] if weights is not None else []))))
    feedback = None if gradients is None else draw(st.sampled_from((None, LoCo(), LoCo(hops="both"))))
    return Strategy(
        scopes,
        weights=weights,
        gradients=gradients,
        error_feedback=feedback,
        gpus_per_node=draw(st.sampled_from((2, 2, 2, 1))),
    )


@st.composite
def units(draw: st.DrawFn, adapter: str, plain: bool) -> Unit:
    """A unit that ``adapter`` can shard."""
    wrapped = draw(st.sampled_from((True, True, True, False)))
    branches = [Branch(draw(st.sampled_from(KINDS))) for _ in range(draw(st.integers(1, 3)))]
    if len(branches) > 1 and adapter != "fsdp1 flat" and draw(st.sampled_from((False, False, False, True))):
        branches[-1] = Branch(branches[-1].kind, frozen=True)
    tied = False
    if len(branches) > 1 and not branches[1].frozen and draw(st.sampled_from((False, False, False, True))):
        branches[:2] = [Branch("linear"), Branch("affine")]
        tied = True
    half = wrapped and plain and draw(st.sampled_from((False,) * 7 + (True,)))
    return Unit(tuple(branches), wrapped, tied, half)


@st.composite
def models(draw: st.DrawFn, adapter: str, plain: bool) -> Model:
    """A model that ``adapter`` can shard."""
    root = [Branch(draw(st.sampled_from(KINDS))) for _ in range(draw(st.integers(1, 3)))]
    tied = draw(st.sampled_from((False, False, False, True)))
    if tied:
        root[0] = Branch("linear")
    inner = [draw(units(adapter, plain)) for _ in range(draw(st.integers(0, 3)))]
    return Model(draw(st.integers(3, 9)), tuple(inner), tuple(root), tied)


EVENTS = ("Evaluation", "Freeze", "Load", "Write", "Summon", "Move", "Resume")


@st.composite
def programs(draw: st.DrawFn, adapter: str, strategy: st.SearchStrategy[Strategy]) -> Program:
    """A program that is legal under stock FSDP."""
    chosen = draw(strategy)
    plain = chosen.weights is None and chosen.gradients is None
    roots = 2 if draw(st.integers(0, 5)) == 5 else 1
    all_models = tuple(draw(models(adapter, plain)) for _ in range(roots))
    zero_unused = adapter == "fsdp2" and HAS_UNUSED_FLAG and draw(st.booleans())
    # A local state dict within a node is refused, and torch's own HYBRID_SHARD can't have one.
    kinds = tuple(kind for kind in LOAD_KINDS[adapter] if kind != "LOCAL_STATE_DICT" or chosen.optimizer != "I")
    draft = Draft(draw, adapter, all_models, zero_unused, kinds)
    draft.optimizers = _optimizers(draft)
    scaler = draft.one_in(6)
    for _ in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(0, 2))):
            _event(draft)
        _step(draft, scaler)
    return Program(
        adapter,
        chosen,
        all_models,
        tuple(draft.ops),
        draft.optimizers,
        optimizer=draw(st.sampled_from(("sgd", "sgd", "adamw"))),
        scaler=scaler,
        zero_unused=zero_unused,
        observe=draw(st.booleans()),
    )


def _optimizers(draft: Draft) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Units dealt out among one to three optimizers; unwrapped ones go with the root."""
    slots = [
        (i, unit)
        for i, model in enumerate(draft.models)
        for unit in range(len(model.units) + 1)
        if unit == len(model.units) or model.units[unit].wrapped
    ]
    n = draft.draw(st.integers(1, min(3, len(slots))))
    owners: list[list[tuple[int, int]]] = [[] for _ in range(n)]
    for at, slot in enumerate(slots):
        owner = at if at < n else draft.draw(st.integers(0, n - 1))
        owners[owner].append(slot)
        i, unit = slot
        if unit == len(draft.models[i].units):  # with what is in no unit of its own
            owners[owner] += [(i, u) for u, each in enumerate(draft.models[i].units) if not each.wrapped]
    return tuple(map(tuple, owners))


def _event(draft: Draft) -> None:
    """Something between steps."""
    kind = draft.draw(st.sampled_from(EVENTS))
    draw = draft.draw
    if kind == "Evaluation":
        draft.ops.append(Evaluation(draft.passes(False, same=True)))
    elif kind == "Freeze":
        candidates = [
            (i, unit)
            for i, model in enumerate(draft.models)
            for unit, each in enumerate(model.units)
            if each.wrapped and not any(branch.frozen for branch in each.branches)
        ]
        if candidates:
            at = draw(st.sampled_from(candidates))
            draft.ops.append(ZeroGrad("models"))
            draft.ops.append(Freeze(*at, frozen=at not in draft.frozen))
            draft.frozen ^= {at}
    elif kind == "Load":
        assign = draft.adapter == "fsdp2" and not draft.frozen and draft.one_in(2)
        draft.ops.append(Load(draw(st.sampled_from(draft.load_kinds)), assign))
    elif kind == "Write":
        draft.ops.append(Write(draw(st.sampled_from(("in place", "data", "summon")))))
    elif kind == "Resume":
        if not draft.frozen and all(len({i for i, _ in owned}) == 1 for owned in draft.optimizers):
            draft.ops.append(ZeroGrad("models"))
            draft.ops.append(Resume())
    else:
        draft.ops.append(Summon() if kind == "Summon" else Move())


def _step(draft: Draft, scaler: bool) -> None:
    """Micro-batches and the steps of some optimizers."""
    draw = draft.draw
    last = draw(st.integers(1, 3)) - 1
    for number in range(last + 1):
        sync = number == last or draft.one_in(3)
        fails = draw(st.sampled_from(FAILS[draft.adapter])) if draft.one_in(20) else None
        passes = draft.passes(sync)
        overflows = draw(st.integers(0, WORLD - 1)) if scaler and draft.one_in(4) else None
        draft.ops.append(MicroBatch(passes, sync, fails, overflows))
        if sync or fails:
            draft.pending.clear()
        else:
            draft.used(passes)
        if number < last and draft.one_in(8):
            _between(draft)
    all_ = tuple(range(len(draft.optimizers)))
    stepping = all_ if scaler or not draft.one_in(4) else (draw(st.sampled_from(all_)),)
    draft.ops.append(Step(stepping, clip=0.3 if draft.one_in(4) else None))
    if draft.one_in(6):
        draft.ops.append(ZeroGrad(draw(st.sampled_from(("models", "modules")))))
    else:
        draft.ops.extend(ZeroGrad(optimizer) for optimizer in stepping)


def _between(draft: Draft) -> None:
    """Something between the micro-batches of a step."""
    if draft.one_in(2):
        draft.ops.append(Evaluation(draft.passes(False, same=True)))
        return
    choice = draft.draw(st.sampled_from((*range(len(draft.optimizers)), "models", "modules")))
    draft.ops.append(ZeroGrad(choice))
    cleared = {
        (i, unit)
        for i, model in enumerate(draft.models)
        for unit in range(len(model.units) + 1)
        if isinstance(choice, str) or (i, unit) in draft.optimizers[choice]
    }
    draft.pending = {key: ranks for key, ranks in draft.pending.items() if key[:2] not in cleared}
