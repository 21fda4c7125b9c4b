"""Hypothesis strategies for models that an adapter can shard."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from .features import Feature
from .program import Branch, Model, Unit

KINDS = ("linear", "affine", "norm", "scale", "mlp")
RECOMPUTED = ("inside reentrant", "inside no_reentrant", "outside reentrant", "outside no_reentrant")


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
def models(
    draw: st.DrawFn, adapter: str, plain: bool, features: frozenset[Feature], world: int
) -> tuple[Model, list[Feature]]:
    """A model that ``adapter`` can shard, and which of ``features`` it has."""
    root = [Branch(draw(st.sampled_from(KINDS))) for _ in range(draw(st.integers(1, 3)))]
    tied = draw(st.sampled_from((False, False, False, True)))
    if tied:
        root[0] = Branch("linear")
    least = 2 if Feature.LIST in features else 1 if features & NEED_UNITS else 0
    inner = [draw(units(adapter, plain)) for _ in range(draw(st.integers(least, 3)))]
    width = draw(st.integers(3, 9))
    if features & {Feature.SHARD_1, Feature.LBFGS}:
        width = world * draw(st.integers(1, 2))
    rootless = Feature.ROOTLESS in features
    listed = Feature.LIST in features
    if Feature.LBFGS in features:  # which takes evenly sharded parameters only
        root = [replace(branch, kind="linear") if branch.kind == "mlp" else branch for branch in root]
        inner = [_without_mlps(unit) for unit in inner]
    if features & NEED_UNITS:
        inner = [_with_features(draw, unit, i, features) for i, unit in enumerate(inner)]
    has = [f for f in (Feature.ROOTLESS, Feature.LIST, Feature.SHARD_1) if f in features]
    model = Model(width, tuple(inner), tuple(root), tied, rootless, listed)
    checks = {
        Feature.NESTED: lambda unit: unit.nested,
        Feature.CHECKPOINTING: lambda unit: unit.checkpointing is not None,
        Feature.ADAPTERS: lambda unit: any(branch.adapter for branch in unit.branches),
        Feature.TWO_DTYPES: lambda unit: len({branch.half for branch in unit.branches}) > 1,
    }
    return model, has + [f for f, check in checks.items() if f in features and any(map(check, inner))]


NEED_UNITS = {
    Feature.ROOTLESS,
    Feature.LIST,
    Feature.NESTED,
    Feature.CHECKPOINTING,
    Feature.ADAPTERS,
    Feature.TWO_DTYPES,
    Feature.SEVERAL_STRATEGIES,
    Feature.DIRECT_CALL,
    Feature.FREEZE_BRANCH,
    Feature.FREEZE_WITHIN_STEP,
    Feature.FREEZE_KEEPING_GRADIENTS,
}


def _without_mlps(unit: Unit) -> Unit:
    kinds = [replace(branch, kind="linear") if branch.kind == "mlp" else branch for branch in unit.branches]
    return replace(unit, branches=tuple(kinds))


def _with_features(draw: st.DrawFn, unit: Unit, at: int, features: frozenset[Feature]) -> Unit:
    """The unit with what features ask of one."""
    branches = list(unit.branches)
    if features & {Feature.ROOTLESS, Feature.LIST, Feature.NESTED, Feature.DIRECT_CALL}:
        unit = replace(unit, wrapped=True)
    if Feature.ROOTLESS in features:  # or nothing may be left that trains
        branches[0] = replace(branches[0], frozen=False)
    if Feature.LIST in features and at < 2:
        unit = replace(unit, half=False)
    if Feature.CHECKPOINTING in features and draw(st.booleans()):
        unit = replace(unit, checkpointing=draw(st.sampled_from(RECOMPUTED)))
    if features & {Feature.ADAPTERS, Feature.TWO_DTYPES, Feature.FREEZE_BRANCH} and draw(st.booleans()):
        unit = replace(unit, tied=False)
        branches = [*branches, Branch()][: max(2, len(branches))]
        if Feature.ADAPTERS in features:
            own_unit = features & {
                Feature.ROOTLESS,
                Feature.LIST,
                Feature.NESTED,
                Feature.DIRECT_CALL,
                # The root stays unsharded after a forward, where adapters are switched on in vain; the simulation
                # has no such trap.
                Feature.LOCAL_STEPS,
            }
            unit = replace(unit, wrapped=bool(own_unit) or draw(st.booleans()), half=False)
            branches[-1] = Branch(branches[-1].kind, adapter=True)
            if draw(st.booleans()):
                branches[:-1] = [replace(branch, frozen=True) for branch in branches[:-1]]
        if Feature.TWO_DTYPES in features:
            unit = replace(unit, half=False)
            branches[0] = replace(branches[0], frozen=True, half=True)
            branches[-1] = replace(branches[-1], frozen=False)
    listed = Feature.LIST in features and at < 2
    if Feature.NESTED in features and draw(st.booleans()) and not unit.half and not listed:
        branches = [*branches, Branch()][: max(2, len(branches))]
        unit = replace(unit, nested=True, tied=False)
    return replace(unit, branches=tuple(branches))
