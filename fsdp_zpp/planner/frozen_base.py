"""A rank's memory and gathers of a frozen base that is quantized once.

FSDP does not manage a quantized base. Its placement decides where it is kept, and its double buffer when it is
gathered, whatever the optimizer scope and whatever FSDP reshards. So the plan runs the library's own classes for both:
under parameter scope G each node keeps a copy from the first gather on, and a unit that is still in one of the two
buffers is not gathered again.

The plan knows only the size of a unit, so it treats each as one weight. It assumes that half of the root's parameters
come before the layers (an embedding) and half after them (a head).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.collectives.mesh import ProcessMesh
from fsdp_zpp.config.resolve import ResolvedStrategy
from fsdp_zpp.frozen.double_buffer import DoubleBuffer
from fsdp_zpp.frozen.placement import Placement

from .model_size import Units

_SIMULATED = 6
"""Number of equal units that are simulated. Each further one is gathered once in forward and once in backward."""


def kept_nbytes(numel: int, codec: Codec, strategy: ResolvedStrategy) -> int:
    """Return the bytes that a rank keeps of a unit of ``numel`` frozen elements."""
    placement = _placement(strategy)
    # Under G, the first gather leaves the chunks of its local index from all nodes, for the node's own copy.
    rows = strategy.topology.nodes if placement.scope == "G" else 1
    return rows * codec.nbytes(placement.chunk_numel(numel, codec)) if numel else 0


@dataclass(frozen=True)
class Gathers:
    """Cost of gathering a base.

    Attributes:
        sent: Bytes that a rank sends inside its node for one forward and backward, in the steady state. Nothing
            crosses nodes.
        buffers: Bytes of the buffers that units are gathered into.
    """

    sent: int
    buffers: int


def gathers_of(size: Units, codec: Codec, strategy: ResolvedStrategy) -> Gathers:
    """Return the cost of gathering the base of a model, by the rules at the top of this file."""
    gpus = strategy.topology.gpus_per_node

    def gathered(numel: int) -> int:
        return _gathered_nbytes(numel, codec, strategy)

    units = [(_Unit(nbytes), again) for numel, again in _sizes_in_order(size) if (nbytes := gathered(numel))]
    buffers = DoubleBuffer()
    for _ in range(3):  # by the third step, the buffers have learned the order and gather as in every later one
        for unit, _ in units:
            unit.gathers = 0
        for unit, _ in units:
            buffers.get(unit)
        for unit, again in reversed(units):
            if again:
                buffers.get(unit)
    layers = [unit for unit in size.units if unit.reshard_after_forward]
    total = sum(unit.gathers * unit.nbytes for unit, _ in units)
    total += sum(2 * max(unit.count - _SIMULATED, 0) * gathered(unit.frozen) for unit in layers)
    if not layers:  # the order of units is unknown: assume that each is gathered in forward and backward
        total = 2 * sum(unit.nbytes for unit, _ in units)
    # A rank sends its own part, one of ``gpus`` equal ones, to each of the others.
    return Gathers(total // gpus * (gpus - 1), buffers.nbytes)


class _Unit:
    """A unit that counts how often it is gathered and takes no memory."""

    # The double buffer allocates its buffers here, of their true size but without memory.
    device = torch.device("meta")

    def __init__(self, nbytes: int) -> None:
        self.label, self.nbytes, self.gathers = "planned", nbytes, 0

    @property
    def gathered_shape(self) -> tuple[int, int]:
        """Return the shape of the buffer: one row of all bytes."""
        return 1, self.nbytes

    def gather(self, out: Tensor) -> None:
        """Count a gather."""
        self.gathers += 1

    def split(self, gathered: Tensor) -> tuple[Tensor, ...]:
        """Return all of it as one part."""
        return (gathered,)


def _sizes_in_order(size: Units) -> Iterator[tuple[int, bool]]:
    """Return the frozen elements of each unit in forward order, and whether backward needs them, too."""
    roots = [unit.frozen for unit in size.units if not unit.reshard_after_forward]
    for frozen in roots:
        yield frozen // 2, False  # an embedding's backward needs no weight
    for unit in size.units:
        if unit.reshard_after_forward:
            yield from [(unit.frozen, True)] * min(unit.count, _SIMULATED)
    for frozen in roots:
        yield frozen - frozen // 2, True


def _gathered_nbytes(numel: int, codec: Codec, strategy: ResolvedStrategy) -> int:
    """Return the bytes of a gathered unit; 0 if each rank holds all of it anyway."""
    placement = _placement(strategy)
    if strategy.topology.gpus_per_node == 1 or placement.scope == "N" or not numel:
        return 0
    return placement.chunks * codec.nbytes(placement.chunk_numel(numel, codec))


def _placement(strategy: ResolvedStrategy) -> Placement:
    # The requested letter, not the effective scope: a base is placed by it. The sizes are the same on every rank, so
    # rank 0 without process groups will do.
    return Placement(strategy.levels[0], ProcessMesh(strategy.topology, 0, None, None))
