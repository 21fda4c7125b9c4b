"""What a rank keeps and gathers of a frozen base that is quantized once.

[Note: A quantized base in a plan]
FSDP does not manage a quantized base: its placement says where it is kept and its residency when it is gathered,
whatever the optimizer scope and whatever FSDP reshards. So the plan runs these classes themselves: under parameter
scope G each node keeps a copy from the first gather on, and a unit that is still in one of the two buffers is not
gathered again.

Only the size of a unit is known, so the plan treats it as one weight. It assumes that the root's parameters are half
before the layers (an embedding) and half after them (a head).
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
"""How many equal units are simulated; each further one is gathered once in the forward and once in the backward."""


def kept_nbytes(numel: int, codec: Codec, strategy: Strategy, topology: Topology) -> int:
    """Bytes that a rank keeps of a unit of ``numel`` frozen elements."""
    placement = _placement(strategy, topology)
    rows = topology.nodes if placement.letter == "G" else 1
    return rows * codec.nbytes(placement.chunk_numel(numel, codec)) if numel else 0


@dataclass(frozen=True)
class Gathers:
    """The cost of gathering a base.

    Attributes:
        sent: Bytes that a rank sends inside its node for a forward and a backward, in steady state. Nothing goes
            between nodes.
        buffers: Bytes of the buffers that units are gathered into.
    """

    sent: int
    buffers: int


def gathers_of(size: ModelSize, codec: Codec, strategy: Strategy, topology: Topology) -> Gathers:
    """The cost of gathering the base of a model. See [Note: A quantized base in a plan]."""
    gpus = topology.gpus_per_node

    def gathered(numel: int) -> int:
        return _gathered_nbytes(numel, codec, strategy, topology)

    units = [(_Unit(nbytes), again) for numel, again in _sizes_in_order(size) if (nbytes := gathered(numel))]
    residency = Residency()
    for _ in range(3):  # by the third, the residency has learned the order, and gathers as in every later step
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
    if not layers:  # the order of units is unknown: assume that each is gathered in forward and backward
        total = 2 * sum(unit.nbytes for unit, _ in units)
    return Gathers(total // gpus * (gpus - 1), residency.nbytes)


class _Unit:
    """A unit that counts how often it is gathered, without memory."""

    device = torch.device("meta")

    def __init__(self, nbytes: int) -> None:
        self.label, self.nbytes, self.gathers = "planned", nbytes, 0

    @property
    def gathered_shape(self) -> tuple[int, int]:
        """One row of all bytes."""
        return 1, self.nbytes

    def gather(self, out: Tensor) -> None:
        """Count a gather."""
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
