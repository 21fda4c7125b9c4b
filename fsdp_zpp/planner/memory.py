"""Memory of one GPU, by model state.

PaRO (arXiv 2310.06003, section 3) counts 2P / D(p) + 2Pt / D(g) + 12Pt / D(os) bytes. This package differs in three
ways: if parameters and optimizer state have the same scope, there is no 16-bit copy beside the fp32 shard; gradients of
several micro-batches accumulate in fp32; and weights are kept as they are sent, so that codecs save memory, too.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import chain

from fsdp_zpp.config.error_feedback import error_nbytes
from fsdp_zpp.config.resolve import ResolvedStrategy

from .config import GIB, MemoryBudget, Precision
from .frozen_base import gathers_of, kept_nbytes
from .model_size import Unit, Units
from .volume import shard_numel, shard_payload

_FP32 = 4


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU.

    Attributes:
        parameters: Weights kept beside the shard: on every rank (N), or in the node as the secondary shard (I over G);
            and a quantized base, of which each node keeps a copy under G, too, from the first gather on.
        shard: The shard that the optimizer updates, and the shard of frozen weights that are not quantized.
        optimizer: The optimizer state.
        outer: With local steps, the agreed weights and the outer optimizer's momentum.
        gradients: The accumulated gradients of micro-batches, or the shard's gradient if that is larger.
        errors: The errors that error feedback keeps.
        working: The buffers of the units in flight. With local steps, those of an exchange, too.
        activations: As in :class:`MemoryBudget`.
        reserve: As in :class:`MemoryBudget`.
        host: With CPU offload, what is in the host's memory for this GPU, which is not in ``total``: the shards, their
            gradients and the optimizer state; those three parts are then 0, but for accumulated gradients.
    """

    parameters: int = 0
    shard: int = 0
    optimizer: int = 0
    outer: int = 0
    gradients: int = 0
    errors: int = 0
    working: int = 0
    activations: int = 0
    reserve: int = 0
    host: int = 0

    def __add__(self, other: Memory) -> Memory:
        return Memory(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, times: int) -> Memory:
        return Memory(*(getattr(self, f.name) * times for f in fields(self)))

    @property
    def total(self) -> int:
        """Return the sum of all parts that are on the GPU."""
        return sum(getattr(self, f.name) for f in fields(self) if f.name != "host")


def memory_per_gpu(
    size: Units, resolved: ResolvedStrategy, micro_batches: int, precision: Precision, budget: MemoryBudget
) -> Memory:
    """Return the memory that a training takes on each GPU."""
    offloads = budget.offload is not None
    return memory_of_units(size, resolved, micro_batches, precision, offloads=offloads) + memory_beside(budget)


def memory_beside(budget: MemoryBudget) -> Memory:
    """Return the memory that does not depend on a strategy."""
    return Memory(activations=round(budget.activations * GIB), reserve=round(budget.reserve * GIB))


def memory_of_units(
    size: Units,
    resolved: ResolvedStrategy,
    micro_batches: int,
    precision: Precision,
    pipelined: bool = False,
    offloads: bool = False,
) -> Memory:
    """Return the memory that units take on each GPU.

    Args:
        size: As in ``step_volume``.
        resolved: As in ``step_volume``.
        micro_batches: As in ``step_volume``.
        precision: As in ``step_volume``.
        pipelined: As in ``step_volume``.
        offloads: Whether shards, their gradients and the optimizer state are in the host's memory.
    """
    total = Memory(working=working_memory(size, resolved, precision, pipelined))
    for unit in size.units:
        trainable = _trainable_states(unit.trainable, resolved, micro_batches + pipelined, precision, offloads)
        total += (trainable + _frozen_states(unit.frozen, resolved, precision)) * unit.count
    if offloads:
        copies = Memory(working=_copied_shards(size, resolved, precision))
        total = replace(total, shard=0, optimizer=0, host=total.host + total.shard + total.optimizer) + copies
    return total


def _copied_shards(size: Units, strategy: ResolvedStrategy, precision: Precision) -> int:
    """Return the bytes of offloaded shards on the GPU: of the two largest units, as one is gathered after the other."""
    scope, topology = strategy.scopes.optimizer, strategy.topology

    def shard(unit: Unit) -> int:
        storage = (precision.frozen_storage or precision.storage).itemsize if strategy.frozen is None else 0
        frozen = shard_numel(unit.frozen, scope, topology) * storage
        return frozen + shard_numel(unit.trainable, scope, topology) * precision.storage.itemsize

    return sum(sorted(chain.from_iterable([shard(unit)] * min(unit.count, 2) for unit in size.units))[-2:])


def _trainable_states(
    numel: int, strategy: ResolvedStrategy, micro_batches: int, precision: Precision, offloads: bool
) -> Memory:
    scope, topology = strategy.scopes.optimizer, strategy.topology
    shard = shard_numel(numel, scope, topology)
    errors = error_nbytes(strategy.error_feedback, strategy.gradient_codecs, scope, topology, shard)
    accumulated = _accumulator_numel(numel, strategy) if micro_batches > 1 else 0
    gradients = precision.accumulation.itemsize * accumulated
    return Memory(
        parameters=_kept(numel, strategy, precision),
        shard=shard * precision.storage.itemsize,
        optimizer=shard * precision.optimizer_bytes,
        # An accumulator is freed when the shard's gradient is made, so the larger of the two counts.
        gradients=gradients if offloads else max(gradients, _FP32 * shard),
        errors=errors if numel else 0,
        host=shard * precision.storage.itemsize if offloads else 0,
    )


def _frozen_states(numel: int, strategy: ResolvedStrategy, precision: Precision) -> Memory:
    if strategy.frozen is None:
        storage = precision.frozen_storage or precision.storage
        shard = shard_numel(numel, strategy.scopes.optimizer, strategy.topology) * storage.itemsize
        return Memory(parameters=_kept(numel, strategy, precision), shard=shard)
    # Frozen weights are encoded once, and nothing but their codes remains.
    return Memory(parameters=kept_nbytes(numel, strategy.frozen, strategy))


def _kept(numel: int, strategy: ResolvedStrategy, precision: Precision) -> int:
    """Return the bytes of weights kept beside the shard."""
    parameters, _, optimizer = strategy.scopes
    if _kept_whole(strategy):
        return numel * precision.compute.itemsize
    if parameters == "I" and optimizer == "G":
        # The inter-node hop leaves one shard of every node: the secondary shard, still encoded.
        return strategy.topology.nodes * shard_payload(numel, strategy, precision)
    return 0


def _kept_whole(strategy: ResolvedStrategy) -> bool:
    """Return whether every rank keeps all weights beside a shard that is only a part of them."""
    parameters, _, optimizer = strategy.scopes
    return parameters == "N" and strategy.topology.shard_count(optimizer) > 1


def _accumulator_numel(numel: int, strategy: ResolvedStrategy) -> int:
    """Return the elements of an accumulated gradient, after the hops that every micro-batch makes."""
    _, gradients, optimizer = strategy.scopes
    if gradients == "I" and optimizer == "G":  # padded to chunks, one for every node
        return strategy.topology.nodes * shard_numel(numel, "G", strategy.topology)
    return shard_numel(numel, gradients, strategy.topology)


def working_memory(size: Units, strategy: ResolvedStrategy, precision: Precision, pipelined: bool = False) -> int:
    """Return the bytes of the units in flight.

    Counts the weights, in the compute dtype, of the units that FSDP keeps from forward to backward and of the two
    largest others (one computes, one is being gathered), unless all weights are kept anyway (N over I or G); the
    gradient of the largest unit, once in the reduce dtype and once in fp32; and for a quantized base, the buffers that
    its codes are gathered into, and the weights decoded from them. Those are decoded one by one: at most a unit. In a
    pipeline, units stay gathered from the first backward of a step to the last.
    """
    kept = _kept_whole(strategy)
    trainable, frozen = not kept, not kept and strategy.frozen is None

    def in_flight(unit: Unit) -> int:
        return trainable * unit.trainable + frozen * unit.frozen

    def stays(unit: Unit) -> bool:
        return pipelined or not unit.reshard_after_forward

    held = sum(unit.count * in_flight(unit) for unit in size.units if stays(unit))
    # Only two can be in flight, so two of each size suffice to find the two largest.
    others = [[in_flight(unit)] * min(unit.count, 2) for unit in size.units if not stays(unit)]
    weights = held + sum(sorted(chain.from_iterable(others))[-2:])
    base = 0
    if strategy.frozen is not None:
        base = gathers_of(size, strategy.frozen, strategy).buffers
        weights += max((unit.frozen for unit in size.units), default=0)
    gradient = max((unit.trainable for unit in size.units), default=0)
    return base + weights * precision.compute.itemsize + gradient * (precision.reduce.itemsize + _FP32)
