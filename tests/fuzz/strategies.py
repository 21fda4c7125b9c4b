"""Hypothesis strategies for models that an adapter can shard, and for programs that are legal under stock FSDP."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hypothesis import strategies as st

from fsdp_zpp import Int2Delta, Int3, Int4, Int4Delta, Int8, LocalSteps, LoCo, Strategy
from fsdp_zpp.strategy.strategy import LEGAL_LEVELS

from . import features as registry
from .draft import OF_FEATURES, Draft, between_steps, evaluate, set_up, step
from .features import HAS_UNUSED_FLAG, Feature
from .program import Branch, Model, Program, Unit

ARE_UNITS = {Feature.ROOTLESS, Feature.LIST, Feature.NESTED, Feature.DIRECT_CALL}
FREEZING = {Feature.FREEZE_WITHIN_STEP, Feature.FREEZE_BRANCH, Feature.FREEZE_KEEPING_GRADIENTS}
NEED_UNITS = ARE_UNITS | FREEZING | {Feature.CHECKPOINTING, Feature.ADAPTERS, Feature.TWO_DTYPES}
NEED_UNITS |= {Feature.SEVERAL_STRATEGIES}
FREEZING |= {Feature.FROZEN_IN_OPTIMIZER, Feature.ADAPTERS, Feature.OPTIMIZERS_ANEW}
LOAD_KINDS = {
    "fsdp1": ("FULL_STATE_DICT", "SHARDED_STATE_DICT"),
    "fsdp1 flat": ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"),
    "fsdp2": ("sharded",),
}
NODES = {2: (1, 2), 3: (1, 3), 4: (2, 2, 2, 1), 6: (2, 3, 1), 8: (2, 4)}
"""By the number of ranks, how many of them a node may have."""
PRECISIONS = ("bf16 fp32", "bf16 none", "fp16 none", "fp16 fp32", "none bf16", "none fp16")
LOCAL_LEVELS = ("III", "INI", "NNI")
OPTIMIZERS = {
    # SGD's fused kernel on CPUs is wrong in 16 bits, and fully_shard's DTensors don't have it.
    Feature.FUSED: ("adamw fused",),
    Feature.FOREACH: ("sgd foreach", "adamw foreach"),
    Feature.SCHEDULE_FREE: ("schedule-free",),
    Feature.SAM: ("sam",),
    Feature.LBFGS: ("lbfgs",),
    Feature.REPLACED_DATA: ("replaces-data",),
}


def strategies_without_codecs(world: int, scopes: Sequence[str] = LEGAL_LEVELS) -> st.SearchStrategy[Strategy]:
    """Letters alone."""
    return st.builds(Strategy, st.sampled_from(scopes), gpus_per_node=st.sampled_from(NODES[world]))


@st.composite
def strategies_with_codecs(draw: st.DrawFn, world: int, scopes: Sequence[str] = LEGAL_LEVELS) -> Strategy:
    """Letters with a codec on some hop."""
    levels = draw(st.sampled_from(scopes))
    weights = draw(st.sampled_from((None, Int8(32), *([Int4Delta(32), Int2Delta(32)] if levels[0::2] == "IG" else []))))
    gradients = draw(st.sampled_from((Int8(32), Int4(32), Int3(32), *([None] if weights is not None else []))))
    feedback = (
        None
        if gradients is None or gradients.mixes_values
        else draw(st.sampled_from((None, LoCo(), LoCo(hops="both"))))
    )
    gpus = draw(st.sampled_from(NODES[world]))
    return Strategy(levels, weights=weights, gradients=gradients, error_feedback=feedback, gpus_per_node=gpus)


@st.composite
def strategies_with_local_steps(draw: st.DrawFn, world: int) -> Strategy:
    """Exact ones, whose outer step has no momentum half of the time: then it leaves what nobody has trained alone."""
    momentum = draw(st.sampled_from((0.0, 0.5)))
    every = draw(st.integers(1, 3))
    start = draw(st.sampled_from((0, 0, 1, 2)))
    local_steps = LocalSteps(
        every,
        outer_lr=draw(st.sampled_from((1.0, 0.7))),
        outer_momentum=momentum,
        codec=None,
        spread=momentum > 0 and draw(st.booleans()),
        overlap=draw(st.integers(0, every - 1)),
        mix=draw(st.sampled_from((1.0, 0.5))),
        start=start,
    )
    nodes = st.sampled_from([gpus for gpus in NODES[world] if gpus < world])
    return Strategy(draw(st.sampled_from(LOCAL_LEVELS)), local_steps=local_steps, gpus_per_node=draw(nodes))


@st.composite
def strategies_for_hooks(draw: st.DrawFn, world: int) -> Strategy:
    """Options of a comm hook."""
    gradients = draw(st.sampled_from((Int8(32), Int4(32))))
    feedback = draw(st.sampled_from((None, LoCo())))
    gpus = draw(st.sampled_from(NODES[world]))
    return Strategy("GGG", gradients=gradients, error_feedback=feedback, gpus_per_node=gpus)


FLAVOURS = {
    "plain": strategies_without_codecs,
    "codecs": strategies_with_codecs,
    "local": strategies_with_local_steps,
    "hook": strategies_for_hooks,
}


@st.composite
def programs(draw: st.DrawFn, adapter: str, flavour: str, world: int = 4) -> Program:
    """A program that is legal under stock FSDP."""
    chosen = draw(FLAVOURS[flavour](world))
    plain, local = flavour == "plain", chosen.local_steps
    features = draw(_features(adapter, flavour))
    if Feature.IDLE_WITH_FEEDBACK in features:
        chosen = replace(chosen, gradients=chosen.gradients or Int8(32), error_feedback=chosen.error_feedback or LoCo())
    axes = None
    if Feature.TWO_AXES in features:
        takes_nodes = not chosen.is_plain and chosen.gpus_per_node not in (1, world)
        axes = draw(st.sampled_from([*["nodes"] * takes_nodes, *["copies"] * (world // 2 in NODES), None]))
    if axes == "copies":
        chosen = replace(chosen, gpus_per_node=draw(st.sampled_from(NODES[world // 2])))
    if local is not None and local.outer_momentum:
        features -= FREEZING  # on what momentum does to what nobody trains, no two references agree
    if local is not None and local.start:
        features -= {Feature.DIVIDE_FACTOR}  # it divides a sum, over other ranks in each phase
    roots = 2 if draw(st.integers(0, 5)) == 5 else 1
    own = {"local": {Feature.LOCAL_STEPS}, "hook": {Feature.COMM_HOOK}}.get(flavour, set())
    drawn = [draw(models(adapter, plain, features | own, world)) for _ in range(roots)]
    # Stock asks sharded parameters whether unused ones get zeros, which adapters may have left frozen.
    zeroing = adapter == "fsdp2" and HAS_UNUSED_FLAG and local is None and Feature.ADAPTERS not in features
    zero_unused = zeroing and draw(st.booleans())
    # A local state dict within a node is refused, and torch's own HYBRID_SHARD can't have one.
    kinds = tuple(kind for kind in LOAD_KINDS[adapter] if kind != "LOCAL_STATE_DICT" or chosen.optimizer != "I")
    if Feature.ROOTLESS in features:
        kinds = kinds[:1]
    of_models = tuple(model for model, _ in drawn)
    draft = Draft(draw, adapter, of_models, zero_unused, kinds, world, features, local is not None)
    draft.freezes = local is None or not local.outer_momentum
    draft.marked = [f for _, has in drawn for f in has]
    draft.optimizers = _optimizers(draft)
    optimizer, precision, inner = _optimizer(draft), None, None
    if draft.has(Feature.HALF_PRECISION):
        precision = draw(st.sampled_from(PRECISIONS))
        draft.uses_all = adapter == "fsdp2" and precision not in ("bf16 none", "fp16 none")
    if draft.has(Feature.SEVERAL_STRATEGIES):
        same = [levels for levels in LEGAL_LEVELS if levels[2] == chosen.optimizer]
        other = (strategies_without_codecs if plain else strategies_with_codecs)(world, same)
        inner = replace(draw(other), gpus_per_node=chosen.gpus_per_node)
    draft.clips = all(s.error_feedback is None for s in (chosen, inner or chosen))
    closure = features & {Feature.SAM, Feature.LBFGS}
    scaler = local is None and not closure and draft.clips and draft.one_in(6)  # errors take no scaler
    set_up(draft)
    least = 2 if features & FREEZING or Feature.IDLE_WITH_FEEDBACK in features else 1
    most = 4 if local is not None or Feature.IDLE_WITH_FEEDBACK in features else 3
    for _ in range(draw(st.integers(least, most))):
        for _ in range(draw(st.integers(1 if features & set(OF_FEATURES) else 0, 2))):
            between_steps(draft)
        step(draft, scaler)
    if features or draft.one_in(2):
        evaluate(draft)  # since what is stale only shows in a forward
    program = Program(
        adapter,
        chosen,
        draft.models,
        tuple(draft.ops),
        draft.optimizers,
        optimizer=optimizer,
        scaler=scaler,
        zero_unused=zero_unused,
        precision=precision,
        observe=local is None and draw(st.booleans()),
        world=world,
        interleaved=len(draft.optimizers) > 1 and draft.has(Feature.TWO_IN_A_UNIT),
        with_frozen=draft.has(Feature.FROZEN_IN_OPTIMIZER),
        inner=inner,
        hook=flavour == "hook",
        prefetch=adapter != "fsdp2" and draft.has(Feature.PREFETCH),
        columns=draft.has(Feature.SHARD_1),
        offload=draft.has(Feature.OFFLOAD),
        axes=axes,
        second_job=draft.has(Feature.SECOND_JOB),
    )
    marked = {*own, *draft.marked, *({Feature.TWO_AXES} if axes else ())}
    return replace(program, features=tuple(sorted({f.title for f in marked})))


@st.composite
def _features(draw: st.DrawFn, adapter: str, flavour: str) -> frozenset[Feature]:
    """None for one program in four, else one to three, or two that matter together."""
    choices = registry.choices(adapter, flavour)
    if not choices or (draw(st.integers(0, 3)) == 0 and not registry.only):
        return frozenset()
    chosen = draw(st.lists(st.sampled_from(choices), unique=True, min_size=1, max_size=3))
    if together := [group for group in registry.TOGETHER if set(group) <= set(choices)]:
        chosen = list(draw(st.sampled_from(together))) if draw(st.integers(0, 3)) == 3 else chosen
    of_optimizers = [feature for feature in chosen if feature in OPTIMIZERS]
    return frozenset(set(chosen) - set(of_optimizers[1:]))


def _optimizer(draft: Draft) -> str:
    for feature, names in OPTIMIZERS.items():
        if draft.has(feature):
            return draft.draw(st.sampled_from(names))
    return draft.draw(st.sampled_from(("sgd", "sgd", "adamw")))


def _optimizers(draft: Draft) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Units dealt out among one to three optimizers; unwrapped ones go with the root."""
    slots = draft.units()
    least = min(2, len(slots)) if Feature.TWO_IN_A_UNIT in draft.features else 1
    n = draft.draw(st.integers(least, min(3, len(slots))))
    owners: list[list[tuple[int, int]]] = [[] for _ in range(n)]
    for at, slot in enumerate(slots):
        owner = at if at < n else draft.draw(st.integers(0, n - 1))
        owners[owner].append(slot)
        i, unit = slot
        if unit == len(draft.models[i].units):  # with what is in no unit of its own
            owners[owner] += [(i, u) for u, each in enumerate(draft.models[i].units) if not each.wrapped]
    return tuple(map(tuple, owners))


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
    if Feature.LBFGS in features:  # which takes evenly sharded parameters only
        root = list(_without_mlps(root))
        inner = [replace(unit, branches=_without_mlps(unit.branches)) for unit in inner]
    if features & NEED_UNITS:
        inner = [_with_features(draw, unit, i, features) for i, unit in enumerate(inner)]
    has = [f for f in (Feature.ROOTLESS, Feature.LIST, Feature.SHARD_1) if f in features]
    model = Model(width, tuple(inner), tuple(root), tied, Feature.ROOTLESS in features, Feature.LIST in features)
    checks = {
        Feature.NESTED: lambda unit: unit.nested,
        Feature.CHECKPOINTING: lambda unit: unit.checkpointing is not None,
        Feature.ADAPTERS: lambda unit: any(branch.adapter for branch in unit.branches),
        Feature.TWO_DTYPES: lambda unit: len({branch.half for branch in unit.branches}) > 1,
    }
    return model, has + [f for f, check in checks.items() if f in features and any(map(check, inner))]


def _without_mlps(branches: Iterable[Branch]) -> tuple[Branch, ...]:
    return tuple(replace(branch, kind="linear") if branch.kind == "mlp" else branch for branch in branches)


def _with_features(draw: st.DrawFn, unit: Unit, at: int, features: frozenset[Feature]) -> Unit:
    """Change a unit as features ask."""
    branches = list(unit.branches)
    if features & ARE_UNITS:
        unit = replace(unit, wrapped=True)
    if Feature.ROOTLESS in features:  # or nothing may be left that trains
        branches[0] = replace(branches[0], frozen=False)
    in_list = Feature.LIST in features and at < 2
    unit = replace(unit, half=unit.half and not in_list)
    if Feature.CHECKPOINTING in features and draw(st.booleans()):
        unit = replace(unit, checkpointing=draw(st.sampled_from(RECOMPUTED)))
    if features & {Feature.ADAPTERS, Feature.TWO_DTYPES, Feature.FREEZE_BRANCH} and draw(st.booleans()):
        unit = replace(unit, tied=False)
        branches = [*branches, Branch()][: max(2, len(branches))]
        if Feature.ADAPTERS in features:
            # The root stays unsharded after a forward, where adapters are switched on in vain; the simulation has no
            # such trap.
            own_unit = bool(features & (ARE_UNITS | {Feature.LOCAL_STEPS}))
            unit = replace(unit, wrapped=own_unit or draw(st.booleans()), half=False)
            branches[-1] = Branch(branches[-1].kind, adapter=True)
            if draw(st.booleans()):
                branches[:-1] = [replace(branch, frozen=True) for branch in branches[:-1]]
        if Feature.TWO_DTYPES in features:
            unit = replace(unit, half=False)
            branches[0] = replace(branches[0], frozen=True, half=True)
            branches[-1] = replace(branches[-1], frozen=False)
    if Feature.NESTED in features and draw(st.booleans()) and not unit.half and not in_list:
        branches = [*branches, Branch()][: max(2, len(branches))]
        unit = replace(unit, nested=True, tied=False)
    return replace(unit, branches=tuple(branches))
