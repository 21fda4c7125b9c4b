"""Training programs as plain values: what hypothesis draws, workers run, and a failure prints."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_zpp import Int4, Strategy


@dataclass(frozen=True)
class Branch:
    """A few parameters that a micro-batch may use or not.

    Args:
        kind: ``linear``, ``affine`` (with a bias), ``norm``, ``scale`` (a vector) or ``mlp``.
        frozen: Whether it is frozen for good, before anything is sharded.
        adapter: Whether it is an adapter, which a reference forward goes without.
        half: Whether its parameters are bf16.
    """

    kind: str = "linear"
    frozen: bool = False
    adapter: bool = False
    half: bool = False


@dataclass(frozen=True)
class Unit:
    """A residual block: the sum of the branches that are in use.

    Args:
        branches: Its branches.
        wrapped: Whether it is a unit of its own to FSDP, or part of the root's.
        tied: Whether the first two branches, both linear, share their weight.
        half: Whether its parameters are bf16.
        nested: Whether its first branch is a unit of its own within it.
        checkpointing: Whether its forward is recomputed: ``inside`` of the unit or ``outside``, and ``reentrant`` or
            not.
    """

    branches: tuple[Branch, ...] = (Branch(),)
    wrapped: bool = True
    tied: bool = False
    half: bool = False
    nested: bool = False
    checkpointing: str | None = None


@dataclass(frozen=True)
class Model:
    """One root: an embedding, units, and the branches of the root itself.

    Args:
        width: Size of everything.
        units: The units.
        root: The root's branches.
        tied: Whether the root's first branch, a linear one, has the embedding's weight.
        rootless: Whether the root is no unit, but frozen and whole on every rank.
        listed: Whether the first two units are one to FSDP.
    """

    width: int = 5
    units: tuple[Unit, ...] = ()
    root: tuple[Branch, ...] = (Branch(),)
    tied: bool = False
    rootless: bool = False
    listed: bool = False


Use = tuple[tuple[int, ...], ...]
"""For each unit, and for the root at the end, the branches that are used, in this order."""


@dataclass(frozen=True)
class Pass:
    """How a forward goes through one model.

    Args:
        order: The units that run, in this order, some of them perhaps twice.
        uses: What each rank uses; one for all if there is only one.
    """

    order: tuple[int, ...]
    uses: tuple[Use, ...]

    def use(self, rank: int) -> Use:
        """What ``rank`` uses."""
        return self.uses[rank % len(self.uses)]


@dataclass(frozen=True)
class MicroBatch:
    """A forward and a backward.

    Args:
        passes: How it goes through each model.
        sync: Whether gradients are synchronized.
        fails: An exception in the middle of the ``forward`` or ``backward``, or between them, in the ``loss``, after
            which all gradients are cleared.
        overflows: The rank whose loss is infinite, if any.
        unsynced: Units, as (model, unit), that do not synchronize theirs all the same.
        forwards: How many forwards there are, each with a batch of its own.
        backwards: Whether they have one backward of their ``sum``, or one each after all forwards, ``in turn`` or ``in
            reverse``, or ``pipelined`` (1F1B), or ``twice`` through a graph that is retained.
        direct: The unit that is called by itself, if any, instead of the models.
        all_reduce: fully_shard's ``set_requires_all_reduce``.
        reshard: Its ``set_reshard_after_backward``.
    """

    passes: tuple[Pass, ...]
    sync: bool = True
    fails: str | None = None
    overflows: int | None = None
    unsynced: tuple[tuple[int, int], ...] = ()
    forwards: int = 1
    backwards: str = "sum"
    direct: tuple[int, int] | None = None
    all_reduce: bool = True
    reshard: bool = True


@dataclass(frozen=True)
class Evaluation:
    """A forward in evaluation.

    Args:
        passes: How it goes through each model.
        reference: Whether adapters are switched off for it, as PEFT's ``disable_adapter`` does.
        inference: Whether it runs in inference mode.
        direct: The unit that is called by itself, if any, instead of the models.
    """

    passes: tuple[Pass, ...]
    reference: bool = False
    inference: bool = False
    direct: tuple[int, int] | None = None


@dataclass(frozen=True)
class Step:
    """Steps of some optimizers, perhaps after clipping."""

    optimizers: tuple[int, ...] = (0,)
    clip: float | None = None


@dataclass(frozen=True)
class ZeroGrad:
    """Clears gradients: of an optimizer by its number, of ``models``, or of the ``modules`` within FSDP's wrappers."""

    of: int | str = 0
    set_to_none: bool = True


@dataclass(frozen=True)
class Freeze:
    """Freezes a unit of a model or one of its branches, or unfreezes it."""

    model: int
    unit: int
    frozen: bool = True
    branch: int | None = None


@dataclass(frozen=True)
class SharpStep:
    """A whole step of an optimizer that runs forwards and backwards itself: SAM or LBFGS."""

    passes: tuple[Pass, ...]
    optimizer: int = 0


@dataclass(frozen=True)
class Show:
    """Looks at what modules show: parameters by name, and whether they are trainable and sharded."""


@dataclass(frozen=True)
class OptimizersAnew:
    """Makes new optimizers of what modules show."""


@dataclass(frozen=True)
class Tune:
    """Calls one of FSDPModule's methods on a unit.

    Args:
        what: Which, see :mod:`fuzz.tuning`.
        model: The model.
        unit: The unit.
        value: Its argument.
    """

    what: str
    model: int
    unit: int
    value: int = 0


@dataclass(frozen=True)
class Load:
    """Loads the model's own state dict with values halved.

    Args:
        kind: One of the adapter's kinds of state dicts.
        assign: As torch's; optimizers are made anew then.
    """

    kind: str
    assign: bool = False


@dataclass(frozen=True)
class LoadInPlace:
    """Reads a checkpoint of the models, with values halved, into the tensors that their state dicts show."""


@dataclass(frozen=True)
class Write:
    """Writes to all weights: ``in place`` or through ``data``, with an announcement, or by ``summon``."""

    how: str = "in place"


@dataclass(frozen=True)
class Summon:
    """Looks at the full weights without writing them back."""


@dataclass(frozen=True)
class Move:
    """Gives every parameter other memory, as moving a model to another device and back does."""


@dataclass(frozen=True)
class Resume:
    """Saves models and optimizers, and goes on with others that have loaded that."""


Op = (
    MicroBatch
    | Evaluation
    | Step
    | SharpStep
    | ZeroGrad
    | Freeze
    | Show
    | OptimizersAnew
    | Tune
    | Load
    | LoadInPlace
    | Write
    | Summon
    | Move
    | Resume
)


@dataclass(frozen=True)
class Program:
    """A training.

    Args:
        adapter: ``fsdp1``, ``fsdp1 flat`` or ``fsdp2``.
        strategy: What ours is to run it with.
        models: One after the other, each a root of its own.
        optimizers: For each optimizer the (model, unit) that it has; the root is the unit after the last.
        ops: What happens.
        optimizer: ``sgd`` or ``adamw``, each perhaps ``fused`` or ``foreach``, or another of :mod:`fuzz.optimizers`.
        scaler: Whether there is a gradient scaler.
        zero_unused: fully_shard's ``set_reduce_scatter_unused_params(True)``.
        precision: Of computation and reduction, ``None`` or as in ``bf16 fp32``.
        observe: Whether weights are looked at after each step, or at the end only.
        world: Number of ranks.
        interleaved: Whether optimizers share units, of which each has every n-th parameter.
        with_frozen: Whether optimizers have frozen parameters, too.
        inner: The strategy of the units with odd numbers, if another one.
        hook: Whether ours is stock with a quantizing comm hook.
        prefetch: FSDP1's ``forward_prefetch`` and ``BACKWARD_POST``.
        columns: fully_shard's ``Shard(1)`` wherever it divides.
        offload: Whether parameters are offloaded.
        axes: Of a mesh, if any: ``nodes`` x ranks of a node, which ours shards over, or ``copies`` x ranks that both
            shard over, with the same batches for all copies.
        second_job: Whether an earlier job of the same process has begun to run it.
        features: Titles of the features that it was drawn with.
    """

    adapter: str
    strategy: Strategy
    models: tuple[Model, ...]
    ops: tuple[Op, ...]
    optimizers: tuple[tuple[tuple[int, int], ...], ...]
    optimizer: str = "sgd"
    scaler: bool = False
    zero_unused: bool = False
    precision: str | None = None
    observe: bool = True
    world: int = 4
    interleaved: bool = False
    with_frozen: bool = False
    inner: Strategy | None = None
    hook: bool = False
    prefetch: bool = False
    columns: bool = False
    offload: bool = False
    axes: str | None = None
    second_job: bool = False
    features: tuple[str, ...] = ()

    @property
    def data_ranks(self) -> int:
        """The number of ranks that have batches of their own."""
        return self.world // 2 if self.axes == "copies" else self.world

    @property
    def has_codecs(self) -> bool:
        """Whether ours rounds more than stock."""
        return self.hook or any(codec is not None for s in self.strategies for codec in (s.weights, *s.gradient_codecs))

    @property
    def rounding(self) -> float:
        """The largest relative error of rounding to the coarsest dtype in use."""
        if not self.has_half:
            return 2.0**-24
        return 2.0**-11 if "fp16" in (self.precision or "") else 2.0**-8

    @property
    def strategies(self) -> list[Strategy]:
        """All of them."""
        return [self.strategy, *([self.inner] if self.inner else [])]

    @property
    def rounds_coarsely(self) -> bool:
        """Whether gradients are rounded to a few values."""
        return any(isinstance(codec, Int4) for s in self.strategies for codec in s.gradient_codecs)

    @property
    def has_half(self) -> bool:
        """Whether something is in 16 bits."""
        units = [unit for model in self.models for unit in model.units]
        return self.precision is not None or any(u.half or any(b.half for b in u.branches) for u in units)
