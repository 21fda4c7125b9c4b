"""A frozen base that is quantized once: what a rank keeps and gathers of it.

[Note: A quantized base in a plan]
A quantized base is no FSDP's: it lies where its placement says and is gathered when its residency says, whatever the
optimizer's scope is and whatever FSDP reshards. So the plan asks these themselves: under parameter scope G a node
keeps a copy from the first gather on, and a unit that is still in one of the two buffers is not gathered again.

Of a unit only its size is known, so it is taken as one weight. What a root holds is half before the layers (an
embedding) and half after them (a head).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..codecs import Codec
from ..frozen.placement import Placement
from ..frozen.residency import Residency
from ..strategy import Strategy
from ..topology import ProcessMesh, Topology
from .model_size import ModelSize

_SIMULATED = 6
"""Of as many equal units as this, those in the middle are all alike: gathered in each forward and each backward."""


def kept_nbytes(numel: int, codec: Codec, strategy: Strategy, topology: Topology) -> int:
    """Bytes that a rank keeps of a unit of ``numel`` frozen elements."""
    placement = _placement(strategy, topology)
    rows = topology.nodes if placement.letter == "G" else 1
    return rows * codec.nbytes(placement.chunk_numel(numel, codec)) if numel else 0


@dataclass(frozen=True)
class Gathers:
    """What the gathers of a base come to.

    Attributes:
        sent: Bytes that a rank sends inside its node for a forward and a backward, in the long run. Nothing goes
            between nodes.
        buffers: Bytes of the buffers that units are gathered into.
    """

    sent: int
    buffers: int


def gathers_of(size: ModelSize, codec: Codec, strategy: Strategy, topology: Topology) -> Gathers:
    """What the gathers of the base of a model come to. See [Note: A quantized base in a plan]."""
    gpus = topology.gpus_per_node

    def gathered(numel: int) -> int:
        return _gathered_nbytes(numel, codec, strategy, topology)

    units = [(_Unit(nbytes), again) for numel, again in _sizes_in_order(size) if (nbytes := gathered(numel))]
    residency = Residency()
    for _ in range(3):  # the third goes by what the first two have taught
        for unit, _ in units:
            unit.gathers = 0
        for unit, _ in units:
            residency.demand(unit)
        for unit, again in reversed(units):
            if again:
                residency.demand(unit)
    layers = [unit for unit in size.units if unit.reshard_after_forward]
    total = sum(unit.gathers * unit.nbytes for unit, _ in units)
    total += sum(2 * max(unit.count - _SIMULATED, 0) * gathered(unit.frozen) for unit in layers)
    if not layers:  # then each module is a unit, of which nothing is known: taken as gathered in both directions
        total = 2 * sum(unit.nbytes for unit, _ in units)
    return Gathers(total // gpus * (gpus - 1), residency.nbytes)


class _Unit:
    """A unit that counts how often it is gathered, without memory."""

    device = torch.device("meta")

    def __init__(self, nbytes: int) -> None:
        self.label, self.nbytes, self.gathers = "planned", nbytes, 0

    @property
    def gathered_shape(self) -> tuple[int, int]:
        """Of so many bytes."""
        return 1, self.nbytes

    def gather(self, out: Tensor) -> None:
        """Count."""
        self.gathers += 1


def _sizes_in_order(size: ModelSize) -> Iterator[tuple[int, bool]]:
    """Frozen elements of units in the order of the forward, and whether the backward needs them, too."""
    roots = [unit.frozen for unit in size.units if not unit.reshard_after_forward]
    for frozen in roots:
        yield frozen // 2, False  # an embedding's backward needs no weight
    for unit in size.units:
        if unit.reshard_after_forward:
            yield from [(unit.frozen, True)] * min(unit.count, _SIMULATED)
    for frozen in roots:
        yield frozen - frozen // 2, True


def _gathered_nbytes(numel: int, codec: Codec, strategy: Strategy, topology: Topology) -> int:
    """Bytes of a gathered unit; 0 if each rank has all of it anyway."""
    placement = _placement(strategy, topology)
    if topology.gpus_per_node == 1 or placement.letter == "N" or not numel:
        return 0
    return placement.chunks * codec.nbytes(placement.chunk_numel(numel, codec))


def _placement(strategy: Strategy, topology: Topology) -> Placement:
    return Placement(strategy.parameters, ProcessMesh(topology, 0, None, None))
