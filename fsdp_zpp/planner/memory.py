"""Memory of one GPU, by model state.

PaRO (arXiv 2310.06003, section 3) counts 2P / D(p) + 2Pt / D(g) + 12Pt / D(os) bytes for P parameters, Pt of them
trained, and D(x) shards of state x. Here, parameters have no 16-bit copy beside the fp32 shard if their scope is the
optimizer state's; gradients of several micro-batches accumulate in fp32; codecs encode secondary shards and bases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import NamedTuple, Self

from fsdp_zpp.codecs import Codec, Delta
from fsdp_zpp.comm.mesh import ProcessMesh
from fsdp_zpp.frozen.weight import Placement
from fsdp_zpp.strategy.error_feedback import Topology, error_nbytes
from fsdp_zpp.strategy.strategy import ResolvedStrategy

from .cluster import Precision
from .model_size import Unit, Units

# ---- frozen base
#
# Memory and gathers of a frozen base that is quantized once.
#
# FSDP does not manage a quantized base, so the optimizer scope and resharding do not matter. The base's placement
# decides where it is kept: each node keeps a copy, even under parameter scope G. Units are gathered into two buffers in
# turn; a unit that is still in one of them is not gathered again.
#
# The plan knows only the size of a unit, so it treats each as one weight. It assumes that half of the root's parameters
# come before the layers (an embedding) and half after them (a head).

_PLAYED = 6
"""Number of equal units whose gathers are simulated. Each further one adds a gather in forward and one in backward."""


class Gathers(NamedTuple):
    """Bytes that a rank sends inside its node for one forward and backward, and bytes of its two buffers together."""

    sent: int
    buffers: int


def gathers_of(size: Units, codec: Codec, strategy: ResolvedStrategy) -> Gathers:
    gpus, placement = strategy.topology.gpus_per_node, _placement(strategy)

    def gathered(numel: int) -> int:
        # Under N, and on nodes of one GPU, each rank keeps the whole base.
        if gpus == 1 or placement.scope == "N" or not numel:
            return 0
        return placement.chunks * codec.nbytes(placement.chunk_numel(numel, codec))

    sizes = [(gathered(numel), again) for numel, again in _sizes_in_order(size)]
    forward = [place for place, (nbytes, _) in enumerate(sizes) if nbytes]
    backward = [place for place in reversed(forward) if sizes[place][1]]
    cycle = [place for place, _ in groupby(forward + backward)]
    if len(cycle) > 1 and cycle[0] == cycle[-1]:  # the next step begins where this one ends
        cycle.pop()
    # A unit takes the buffer of the unit two places before it; if that is the same unit, nothing is gathered.
    total = sum(sizes[unit][0] for place, unit in enumerate(cycle) if unit != cycle[(place - 2) % len(cycle)])
    # Units go into the two buffers in turn. After an odd number of units, the next step begins with the other buffer.
    turns = [sizes[unit][0] for unit in cycle * min(2, len(cycle))]
    layers = [unit for unit in size.units if unit.reshard_after_forward]
    total += sum(2 * max(unit.count - _PLAYED, 0) * gathered(unit.frozen) for unit in layers)
    if not layers:  # the order of units is unknown: assume that each is gathered in forward and backward
        total = 2 * sum(nbytes for nbytes, _ in sizes)
    # A rank sends its part, 1 / gpus of the total, to each of the other ranks.
    return Gathers(total // gpus * (gpus - 1), max(turns[::2], default=0) + max(turns[1::2], default=0))


def _sizes_in_order(size: Units) -> Iterator[tuple[int, bool]]:
    roots = [unit.frozen for unit in size.units if not unit.reshard_after_forward]
    for frozen in roots:
        yield frozen // 2, False  # an embedding's backward needs no weight
    for unit in size.units:
        if unit.reshard_after_forward:
            yield from [(unit.frozen, True)] * min(unit.count, _PLAYED)
    for frozen in roots:
        yield frozen - frozen // 2, True


def _placement(strategy: ResolvedStrategy) -> Placement:
    # The parameter scope as requested places a base; the effective scope may differ. Sizes are equal on all ranks, so
    # rank 0 stands for all. Sizes need no process groups.
    return Placement.of_strategy(strategy.levels[0], ProcessMesh(strategy.topology, 0, None, None))


# ---- volume
#
# Bytes that one rank sends in an optimizer step, by hop.
#
# A rank sends b * (r - 1) bytes in an all-gather of b bytes over r ranks, and as many in an all-to-all of r parts of b
# bytes: every byte goes to each of its destinations once. The figures include the padding of flat groups to equal
# shards, and the scales and alignment that codecs add. Small parameters count as encoded, but are sent as they are: a
# step sends about a hundredth more. The first step, which also gathers frozen weights to keep, is left out.
# For a quantized base, see the section above.


@dataclass(frozen=True)
class Figures:
    """Numbers that add up over units."""

    def __add__(self, other: Self) -> Self:
        others = vars(other)
        return replace(self, **{name: value + others[name] for name, value in vars(self).items()})

    def __mul__(self, times: int) -> Self:
        return replace(self, **{name: value * times for name, value in vars(self).items()})


@dataclass(frozen=True)
class Volume(Figures):
    """Bytes that one rank sends.

    Args:
        inter: Bytes to other nodes.
        intra: Bytes to other GPUs of its node.
    """

    inter: int = 0
    intra: int = 0


def step_volume(size: Units, resolved: ResolvedStrategy, micro_batches: int, precision: Precision) -> Volume:
    """Return the bytes that one rank sends for all units in a step."""
    total = Volume()
    for unit in size.units:
        repeats = micro_batches * (2 if unit.reshard_after_forward else 1)  # backward needs resharded weights again
        one = _gathers(unit.trainable, True, resolved, precision, repeats)
        if resolved.frozen is None:  # FSDP does not gather a base with a codec of its own
            one += _gathers(unit.frozen, False, resolved, precision, repeats)
        one += _reductions(unit.trainable, resolved, micro_batches, precision.reduce.itemsize)
        total += one * unit.count
    if resolved.frozen is not None:
        total += Volume(0, micro_batches * gathers_of(size, resolved.frozen, resolved).sent)
    return total


def shard_numel(numel: int, scope: str, topology: Topology) -> int:
    """Return the elements of each padded shard of a flat group: one (N), one per GPU of a node (I) or rank (G)."""
    return -(-numel // topology.shard_count(scope))


def nbytes(codec: Codec | None, numel: int, itemsize: int) -> int:
    """Return the bytes of a chunk of ``numel`` values, encoded, or at ``itemsize`` bytes each without a codec."""
    return numel * itemsize if codec is None else codec.nbytes(numel)


def shard_payload(numel: int, strategy: ResolvedStrategy, precision: Precision) -> int:
    """Return the bytes of one rank's shard of the weights that FSDP gathers, encoded as they are sent."""
    # Weights are gathered from the optimizer's shards, whatever the parameter scope.
    shard = shard_numel(numel, strategy.scopes.optimizer, strategy.topology)
    return nbytes(strategy.weights, shard, precision.compute.itemsize)


def _gathers(numel: int, trainable: bool, strategy: ResolvedStrategy, precision: Precision, repeats: int) -> Volume:
    """Count all gathers of a flat group in a step (PaRO, appendix; ZeRO++'s hpZ, arXiv 2306.10209, for I over G).

    ``repeats`` is how often a step gathers weights that are not kept. Weights that are kept, on the rank (N) or, for
    the hop between nodes, as the node's secondary shard (I over G), are gathered once a step; frozen ones, never again.
    """
    parameters, _, optimizer = strategy.scopes
    nodes, gpus = strategy.topology.nodes, strategy.topology.gpus_per_node
    if optimizer == "N":
        return Volume()
    payload = shard_payload(numel, strategy, precision)
    renewals = 1 if trainable else 0
    between = repeats if parameters == optimizer else renewals
    inside = renewals if parameters == "N" else repeats
    if optimizer == "I":  # each node has all shards
        return Volume(0, inside * payload * (gpus - 1))
    changes = payload
    if isinstance(strategy.weights, Delta) and trainable:
        changes = strategy.weights.changes.nbytes(shard_numel(numel, "G", strategy.topology))
    # After the inter-node hop, a rank holds a shard from every node, and sends all of them in the intra-node hop.
    return Volume(between * changes * (nodes - 1), inside * nodes * payload * (gpus - 1))


def _reductions(numel: int, strategy: ResolvedStrategy, micro_batches: int, itemsize: int) -> Volume:
    """Count all reductions of a trainable flat group in a step (PaRO, appendix; ZeRO++'s qgZ for the hops down).

    The hops down reduce whole gradients to shards: an all-to-all in the node, then one between nodes. The hops up
    gather the shards for optimizer scopes I and N: an all-gather between nodes, then, under N, one in the node.
    """
    _, gradients, optimizer = strategy.scopes
    nodes, gpus = strategy.topology.nodes, strategy.topology.gpus_per_node
    intra_codec, inter_codec = strategy.gradient_codecs
    chunk = shard_numel(numel, "G", strategy.topology)
    if optimizer == "G":
        # Chunks go to different ranks, so each is encoded by itself. Under I and N, a node's shard is encoded as one.
        down_inside = nodes * nbytes(intra_codec, chunk, itemsize) * (gpus - 1)
    else:
        down_inside = nbytes(intra_codec, shard_numel(numel, "I", strategy.topology), itemsize) * (gpus - 1)
    down_between = nbytes(inter_codec, chunk, itemsize) * (nodes - 1)
    # The sums are encoded once, by the codec of the last hop down, and the hops up gather the codes.
    up = nbytes(inter_codec if nodes > 1 else intra_codec, chunk, itemsize)
    up_between = up * (nodes - 1) if optimizer != "G" else 0
    up_inside = nodes * up * (gpus - 1) if optimizer == "N" else 0
    # A hop runs once a step if gradients accumulate before it, and once per micro-batch otherwise.
    inside_times = 1 if gradients == "N" else micro_batches
    between_times = micro_batches if gradients == "G" else 1
    return Volume(between_times * down_between + up_between, inside_times * down_inside + up_inside)


# ---- memory

_FP32 = 4


@dataclass(frozen=True)
class Memory(Figures):
    """Bytes on one GPU.

    Attributes:
        parameters: Weights kept beside the shard: all of them (N), or the node's secondary shard (I over G). Also a
            quantized base, of which each node keeps a copy, even under G.
        shard: The shard that the optimizer updates, and the shard of frozen weights that are not quantized.
        optimizer: The optimizer state.
        gradients: The accumulated gradients of micro-batches, or the shard's gradient if that is larger.
        errors: The error state of error feedback.
        working: The buffers of the units in flight.
        activations: As in :class:`MemoryBudget`.
        reserve: As in :class:`MemoryBudget`.
    """

    parameters: int = 0
    shard: int = 0
    optimizer: int = 0
    gradients: int = 0
    errors: int = 0
    working: int = 0
    activations: int = 0
    reserve: int = 0

    @property
    def total(self) -> int:
        """Return the sum of all parts."""
        return sum(vars(self).values())


def memory_of_units(size: Units, resolved: ResolvedStrategy, micro_batches: int, precision: Precision) -> Memory:
    """Return the memory that units take on each GPU."""
    total = Memory(working=_working_memory(size, resolved, precision))
    for unit in size.units:
        trainable = _trainable_states(unit.trainable, resolved, micro_batches, precision)
        total += (trainable + _frozen_states(unit.frozen, resolved, precision)) * unit.count
    return total


def _trainable_states(numel: int, strategy: ResolvedStrategy, micro_batches: int, precision: Precision) -> Memory:
    scope, topology = strategy.scopes.optimizer, strategy.topology
    shard = shard_numel(numel, scope, topology)
    gradients = precision.accumulation.itemsize * _accumulator_numel(numel, strategy) if micro_batches > 1 else 0
    return Memory(
        parameters=_kept(numel, strategy, precision),
        shard=shard * precision.storage.itemsize,
        optimizer=shard * precision.optimizer_bytes,
        # An accumulator is freed when the shard's gradient is made, so the larger of the two counts.
        gradients=max(gradients, _FP32 * shard),
        errors=error_nbytes(strategy.error_feedback, strategy.gradient_codecs, scope, topology, shard),
    )


def _frozen_states(numel: int, strategy: ResolvedStrategy, precision: Precision) -> Memory:
    if strategy.frozen is None:
        shard = shard_numel(numel, strategy.scopes.optimizer, strategy.topology) * precision.compute.itemsize
        return Memory(parameters=_kept(numel, strategy, precision), shard=shard)
    # Frozen weights are encoded once, and only their codes are kept.
    chunk = _placement(strategy).chunk_numel(numel, strategy.frozen)
    return Memory(parameters=strategy.frozen.nbytes(chunk) if numel else 0)


def _kept(numel: int, strategy: ResolvedStrategy, precision: Precision) -> int:
    parameters, _, optimizer = strategy.scopes
    if _kept_whole(strategy):
        return numel * precision.compute.itemsize
    if parameters == "I" and optimizer == "G":
        # The secondary shard is one shard from every node, still encoded as the inter-node hop left it.
        return strategy.topology.nodes * shard_payload(numel, strategy, precision)
    return 0


def _kept_whole(strategy: ResolvedStrategy) -> bool:
    """Return whether every rank keeps all weights beside its shard, which is only a part of them."""
    parameters, _, optimizer = strategy.scopes
    return parameters == "N" and strategy.topology.shard_count(optimizer) > 1


def _accumulator_numel(numel: int, strategy: ResolvedStrategy) -> int:
    _, gradients, optimizer = strategy.scopes
    if gradients == "I" and optimizer == "G":  # one padded chunk for every node
        return strategy.topology.nodes * shard_numel(numel, "G", strategy.topology)
    return shard_numel(numel, gradients, strategy.topology)


def _working_memory(size: Units, strategy: ResolvedStrategy, precision: Precision) -> int:
    """Return the bytes of the units in flight.

    Weights count in the compute dtype: those of the units that FSDP keeps from forward to backward, and of the two
    largest other units, since one computes while the next is gathered. If all weights are kept anyway (N over I or G),
    none count here. The gradient of the largest unit counts in the reduce dtype and in fp32. A quantized base adds its
    two buffers and the decoded weights of its largest unit.
    """
    kept = _kept_whole(strategy)
    trainable, frozen = not kept, not kept and strategy.frozen is None

    def in_flight(unit: Unit) -> int:
        return trainable * unit.trainable + frozen * unit.frozen

    held = sum(unit.count * in_flight(unit) for unit in size.units if not unit.reshard_after_forward)
    # The two largest are in flight. Two of each size suffice to find them.
    sizes = ([in_flight(unit)] * min(unit.count, 2) for unit in size.units if unit.reshard_after_forward)
    weights = held + sum(sorted(chain.from_iterable(sizes))[-2:])
    base = 0
    if strategy.frozen is not None:
        base = gathers_of(size, strategy.frozen, strategy).buffers
        weights += max((unit.frozen for unit in size.units), default=0)
    gradient = max((unit.trainable for unit in size.units), default=0)
    return base + weights * precision.compute.itemsize + gradient * (precision.reduce.itemsize + _FP32)
