"""Training programs as plain values: what hypothesis draws, workers run, and a failure prints."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_zpp import Int4, Strategy


@dataclass(frozen=True)
class Branch:
    """A few parameters that a micro-batch may use or not."""

    kind: str = "linear"  # linear, affine (with a bias), norm, scale (a vector) or mlp
    frozen: bool = False  # for good, before anything is sharded
    adapter: bool = False  # a reference forward goes without it
    half: bool = False  # in bf16


@dataclass(frozen=True)
class Unit:
    """A residual block: the sum of the branches that are in use."""

    branches: tuple[Branch, ...] = (Branch(),)
    wrapped: bool = True  # a unit of its own to FSDP, or part of the root's
    tied: bool = False  # the first two branches, both linear, share their weight
    half: bool = False  # in bf16
    nested: bool = False  # its first branch is a unit of its own within it
    checkpointing: str | None = None  # "inside" of the unit or "outside", and " reentrant" or " no_reentrant"


@dataclass(frozen=True)
class Model:
    """One root: an embedding, units, and the branches of the root itself."""

    width: int = 5  # of everything
    units: tuple[Unit, ...] = ()
    root: tuple[Branch, ...] = (Branch(),)
    tied: bool = False  # the root's first branch, a linear one, has the embedding's weight
    rootless: bool = False  # the root is no unit, but frozen and whole on every rank
    listed: bool = False  # the first two units are one to FSDP

    @property
    def branches(self) -> list[tuple[Branch, ...]]:
        """The branches of each unit, and of the root at the end."""
        return [*(unit.branches for unit in self.units), self.root]


Use = tuple[tuple[int, ...], ...]
"""For each unit, and for the root at the end, the branches that are used, in this order."""


@dataclass(frozen=True)
class Pass:
    """How a forward goes through one model."""

    order: tuple[int, ...]  # the units that run, some of them perhaps twice
    uses: tuple[Use, ...]  # what each rank uses; one for all if there is only one

    def use(self, rank: int) -> Use:
        """Return the branches that ``rank`` uses."""
        return self.uses[rank % len(self.uses)]


@dataclass(frozen=True)
class MicroBatch:
    """A forward and a backward, or several.

    Each forward has a batch of its own. They have one backward of their ``sum``, or one each after all forwards,
    ``in turn`` or ``in reverse``, or are ``pipelined`` (1F1B). A backward may go ``twice`` through a retained graph.
    """

    passes: tuple[Pass, ...]  # through each model
    sync: bool = True  # gradients are synchronized
    fails: str | None = None  # in the forward or backward, or between them, in the loss; all gradients are then cleared
    overflows: int | None = None  # the rank whose loss is infinite
    unsynced: tuple[tuple[int, int], ...] = ()  # (model, unit) that do not synchronize theirs all the same
    forwards: int = 1
    backwards: str = "sum"
    direct: tuple[int, int] | None = None  # the unit that is called by itself, instead of the models
    all_reduce: bool = True  # fully_shard's set_requires_all_reduce
    reshard: bool = True  # its set_reshard_after_backward


@dataclass(frozen=True)
class Evaluation:
    """A forward in evaluation."""

    passes: tuple[Pass, ...]
    reference: bool = False  # adapters are switched off for it, as PEFT's disable_adapter does
    inference: bool = False  # in inference mode
    direct: tuple[int, int] | None = None  # as of a micro-batch


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
class Tune:
    """Calls one of FSDPModule's methods on a unit: a key of ``METHODS`` of :mod:`fuzz.trained`."""

    what: str
    model: int
    unit: int
    value: int = 0


@dataclass(frozen=True)
class Load:
    """Loads the model's own state dict with values halved; optimizers are made anew if it is assigned."""

    kind: str
    assign: bool = False


@dataclass(frozen=True)
class Write:
    """Writes to all weights: ``in place`` or through ``data``, with an announcement, or by ``summon``."""

    how: str = "in place"


@dataclass(frozen=True)
class Event:
    """Anything else between steps.

    - ``show``: look at what modules show: parameters by name, and whether they are trainable and sharded
    - ``remake_optimizers``: make new ones of what modules show
    - ``load_in_place``: read a checkpoint with values halved into the tensors that state dicts show
    - ``summon``: look at the full weights without writing them back
    - ``move``: give every parameter other memory, as moving a model to another device and back does
    - ``resume``: save models and optimizers, and go on with others that have loaded that
    """

    what: str


Op = MicroBatch | Evaluation | Step | SharpStep | ZeroGrad | Freeze | Tune | Load | Write | Event


@dataclass(frozen=True)
class Program:
    """A training."""

    adapter: str  # fsdp1, fsdp1 flat or fsdp2
    strategy: Strategy  # of ours
    models: tuple[Model, ...]  # one after the other, each a root of its own
    ops: tuple[Op, ...]
    optimizers: tuple[tuple[tuple[int, int], ...], ...]  # the (model, unit) of each; the root comes after the last
    optimizer: str = "sgd"  # or adamw, each perhaps fused or foreach, or another of fuzz.modules
    scaler: bool = False  # there is a gradient scaler
    zero_unused: bool = False  # fully_shard's set_reduce_scatter_unused_params(True)
    precision: str | None = None  # of computation and reduction, as in "bf16 fp32"
    observe: bool = True  # weights are looked at after each step, or at the end only
    world: int = 4
    interleaved: bool = False  # optimizers share units, of which each has every n-th parameter
    with_frozen: bool = False  # optimizers have frozen parameters, too
    inner: Strategy | None = None  # of the units with odd numbers, if another one
    hook: bool = False  # ours is stock with a quantizing comm hook
    prefetch: bool = False  # FSDP1's forward_prefetch and BACKWARD_POST
    columns: bool = False  # fully_shard's Shard(1) wherever it divides
    offload: bool = False  # of parameters
    axes: str | None = None  # "nodes" x ranks, over which ours shards, or "copies" of a batch x ranks, as both do
    second_job: bool = False  # an earlier job of the same process has begun to run it
    features: tuple[str, ...] = ()  # titles of those that it was drawn with

    @property
    def data_ranks(self) -> int:
        """The number of ranks that have batches of their own."""
        return self.world // 2 if self.axes == "copies" else self.world

    @property
    def has_codecs(self) -> bool:
        """Ours rounds more than stock."""
        return self.hook or any(codec is not None for s in self.strategies for codec in (s.weights, *s.gradient_codecs))

    @property
    def rounding(self) -> float:
        """The largest relative error of rounding to the coarsest dtype in use."""
        if not self.has_half:
            return 2.0**-24
        return 2.0**-11 if "fp16" in (self.precision or "") else 2.0**-8

    @property
    def strategies(self) -> list[Strategy]:
        """The strategies of all units."""
        return [self.strategy, *([self.inner] if self.inner else [])]

    @property
    def rounds_coarsely(self) -> bool:
        """Gradients are rounded to a few values."""
        return any(isinstance(codec, Int4) for s in self.strategies for codec in s.gradient_codecs)

    @property
    def has_half(self) -> bool:
        """Something is in 16 bits."""
        units = [unit for model in self.models for unit in model.units]
        return self.precision is not None or any(u.half or any(b.half for b in u.branches) for u in units)


SCRIPT = """\
# cd tests && torchrun --standalone --nproc-per-node {world} this.py
from fsdp_zpp import *
from fuzz.program import *
from fuzz.compare import main

main(
    {program}
)
"""


def as_script(program: Program) -> str:
    """A script that runs ``program`` and says where ours and stock differ."""
    return SCRIPT.format(program=repr(program), world=program.world)
