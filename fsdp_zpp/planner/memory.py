"""Memory of one GPU, by model state.

PaRO counts 2P / D(p) + 2Pt / D(g) + 12Pt / D(os) bytes (section 3). Here the weights that compute are made from the
fp32 shard where both are sharded alike, gradients of several micro-batches are summed in fp32, and weights are kept
as they travel, so that codecs save memory, too.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import chain

from ..at_work import at_work
from ..error_feedback import error_nbytes
from ..strategy import Strategy
from ..strategy_unit import levels_on
from ..topology import Topology
from .conditions import GIB, Budget, Precision
from .frozen_base import gathers_of, kept_nbytes
from .model_size import ModelSize, Unit
from .volume import parts_of, shard_numel, shard_payload

_FP32 = 4


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU.

    Attributes:
        parameters: Weights kept beside the shard: on every rank (N), or in the node as the secondary shard (I over G);
            and a quantized base, which under G is in the node, too, from its first gather on.
        shard: The shard that the optimizer updates, and that of frozen weights that are not quantized.
        optimizer: Its state.
        gradients: What micro-batches are summed in, or the shard's gradient if that is more.
        errors: What error feedback keeps.
        working: What the units in flight take; see :func:`working_memory`.
        activations: As given.
        reserve: As given.
    """

    parameters: int = 0
    shard: int = 0
    optimizer: int = 0
    gradients: int = 0
    errors: int = 0
    working: int = 0
    activations: int = 0
    reserve: int = 0

    def __add__(self, other: Memory) -> Memory:
        return Memory(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, times: int) -> Memory:
        return Memory(*(getattr(self, f.name) * times for f in fields(self)))

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, f.name) for f in fields(self))


def memory_per_gpu(
    size: ModelSize,
    strategy: Strategy,
    topology: Topology,
    micro_batches: int,
    precision: Precision,
    budget: Budget,
) -> Memory:
    """What a training takes on each GPU."""
    strategy = at_work(strategy, topology)
    total = Memory(
        working=working_memory(size, strategy, topology, precision),
        activations=round(budget.activations * GIB),
        reserve=round(budget.reserve * GIB),
    )
    for unit in size.units:
        trainable = _trainable_states(unit.trainable, strategy, topology, micro_batches, precision)
        total += (trainable + _frozen_states(unit.frozen, strategy, topology, precision)) * unit.count
    return total


def _trainable_states(
    numel: int, strategy: Strategy, topology: Topology, micro_batches: int, precision: Precision
) -> Memory:
    keep = levels_on(strategy, topology).optimizer
    shard = shard_numel(numel, keep, topology)
    errors = error_nbytes(strategy.error_feedback, strategy.gradient_codecs, keep, topology, shard)
    accumulated = _accumulator_numel(numel, strategy, topology) if micro_batches > 1 else 0
    return Memory(
        parameters=_kept(numel, strategy, topology, precision),
        shard=shard * precision.storage.itemsize,
        optimizer=shard * precision.optimizer_bytes,
        # An accumulator is freed as its shard's gradient is made, so the larger of the two counts.
        gradients=_FP32 * max(accumulated, shard),
        errors=errors if numel else 0,
    )


def _frozen_states(numel: int, strategy: Strategy, topology: Topology, precision: Precision) -> Memory:
    if strategy.frozen is None:
        storage = precision.frozen_storage or precision.storage
        shard = shard_numel(numel, levels_on(strategy, topology).optimizer, topology) * storage.itemsize
        return Memory(parameters=_kept(numel, strategy, topology, precision), shard=shard)
    # Encoded once for good: the codes are all there is of them.
    return Memory(parameters=kept_nbytes(numel, strategy.frozen, strategy, topology))


def _kept(numel: int, strategy: Strategy, topology: Topology, precision: Precision) -> int:
    """Bytes of weights kept beside the shard."""
    parameters, _, optimizer = levels_on(strategy, topology)
    if _kept_whole(strategy, topology):
        return numel * precision.compute.itemsize
    if parameters == "I" and optimizer == "G":
        return topology.nodes * shard_payload(numel, strategy, topology, precision)
    return 0


def _kept_whole(strategy: Strategy, topology: Topology) -> bool:
    """Whether every rank keeps all weights, beside a shard that is only a part of them."""
    parameters, _, optimizer = levels_on(strategy, topology)
    return parameters == "N" and parts_of(optimizer, topology) > 1


def _accumulator_numel(numel: int, strategy: Strategy, topology: Topology) -> int:
    """Elements in which micro-batches are summed: the gradient as it is after the hops that each of them makes."""
    _, gradients, optimizer = levels_on(strategy, topology)
    if gradients == "I" and optimizer == "G":
        return topology.nodes * shard_numel(numel, "G", topology)
    return shard_numel(numel, gradients, topology)


def working_memory(size: ModelSize, strategy: Strategy, topology: Topology, precision: Precision) -> int:
    """Bytes of the units in flight.

    The weights, in the compute dtype, of the units that FSDP keeps from forward to backward and of the two largest
    others (one computes, one is being gathered), unless all weights are kept anyway (N over I or G); and the
    gradient of the largest unit, once in the reduce dtype and once in fp32. Of a quantized base, the buffers that its
    codes are gathered into, and what is decoded of it, one weight at a time: at most a unit.
    """
    kept = _kept_whole(strategy, topology)
    trainable, frozen = not kept, not kept and strategy.frozen is None

    def in_flight(unit: Unit) -> int:
        return trainable * unit.trainable + frozen * unit.frozen

    held = sum(unit.count * in_flight(unit) for unit in size.units if not unit.reshard_after_forward)
    others = [[in_flight(unit)] * min(unit.count, 2) for unit in size.units if unit.reshard_after_forward]
    weights = held + sum(sorted(chain.from_iterable(others))[-2:])
    base = 0
    if strategy.frozen is not None:
        base = gathers_of(size, strategy.frozen, strategy, topology).buffers
        weights += max(unit.frozen for unit in size.units)
    gradient = max(unit.trainable for unit in size.units)
    return base + weights * precision.compute.itemsize + gradient * (precision.reduce.itemsize + _FP32)
