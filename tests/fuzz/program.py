"""Training programs as plain values: what hypothesis draws, workers run, and a failure prints."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_zpp import Strategy


@dataclass(frozen=True)
class Branch:
    """A few parameters that a micro-batch may use or not.

    Args:
        kind: ``linear``, ``affine`` (with a bias), ``norm``, ``scale`` (a vector) or ``mlp``.
        frozen: Whether it is frozen for good, before anything is sharded.
    """

    kind: str = "linear"
    frozen: bool = False


@dataclass(frozen=True)
class Unit:
    """A residual block: the sum of the branches that are in use.

    Args:
        branches: Its branches.
        wrapped: Whether it is a unit of its own to FSDP, or part of the root's.
        tied: Whether the first two branches, both linear, share their weight.
        half: Whether its parameters are bf16.
    """

    branches: tuple[Branch, ...] = (Branch(),)
    wrapped: bool = True
    tied: bool = False
    half: bool = False


@dataclass(frozen=True)
class Model:
    """One root: an embedding, units, and the branches of the root itself.

    Args:
        width: Size of everything.
        units: The units.
        root: The root's branches.
        tied: Whether the root's first branch, a linear one, has the embedding's weight.
    """

    width: int = 5
    units: tuple[Unit, ...] = ()
    root: tuple[Branch, ...] = (Branch(),)
    tied: bool = False


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
    """

    passes: tuple[Pass, ...]
    sync: bool = True
    fails: str | None = None
    overflows: int | None = None


@dataclass(frozen=True)
class Evaluation:
    """A forward in evaluation."""

    passes: tuple[Pass, ...]


@dataclass(frozen=True)
class Step:
    """Steps of some optimizers, perhaps after clipping."""

    optimizers: tuple[int, ...] = (0,)
    clip: float | None = None


@dataclass(frozen=True)
class ZeroGrad:
    """Clears gradients: of an optimizer by its number, of ``models``, or of the ``modules`` within FSDP's wrappers."""

    of: int | str = 0


@dataclass(frozen=True)
class Freeze:
    """Freezes a unit of a model, or unfreezes it."""

    model: int
    unit: int
    frozen: bool = True


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


Op = MicroBatch | Evaluation | Step | ZeroGrad | Freeze | Load | Write | Summon | Move | Resume


@dataclass(frozen=True)
class Program:
    """A training.

    Args:
        adapter: ``fsdp1``, ``fsdp1 flat`` or ``fsdp2``.
        strategy: What ours is to run it with.
        models: One after the other, each a root of its own.
        optimizers: For each optimizer the (model, unit) that it has; the root is the unit after the last.
        ops: What happens.
        optimizer: ``sgd`` or ``adamw``.
        scaler: Whether there is a gradient scaler.
        zero_unused: fully_shard's ``set_reduce_scatter_unused_params(True)``.
        precision: Of computation and reduction, ``None`` or as in ``bf16 fp32``.
        observe: Whether weights are looked at after each step, or at the end only.
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

    @property
    def has_codecs(self) -> bool:
        """Whether ours rounds more than stock."""
        s = self.strategy
        return any(codec is not None for codec in (s.weights, *s.gradient_codecs))

    @property
    def has_half(self) -> bool:
        """Whether something is in 16 bits."""
        return self.precision is not None or any(unit.half for model in self.models for unit in model.units)


SCRIPT = """\
# cd tests && torchrun --standalone --nproc-per-node 4 this.py
from fsdp_zpp import *
from fuzz.program import *
from fuzz.compare import main

main(
    {program}
)
"""


def as_script(program: Program) -> str:
    """A script that runs ``program`` and says where ours and stock differ."""
    return SCRIPT.format(program=repr(program))
