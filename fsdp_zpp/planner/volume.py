"""Bytes on the wire: those that one rank sends in an optimizer step, hop by hop.

World n = k nodes x m GPUs. A rank sends b * (r - 1) bytes in an all-gather of b bytes over r ranks, and as many in an
all-to-all of r parts of b bytes: every byte goes to each of its destinations once. The figures include the padding of
flat groups to equal shards, and the scales and alignment that codecs add, but not that codecs leave small parameters
as they are, which adds about a hundredth. Optimizers are taken to hold trainable parameters alone.

The step is one in the steady state. In the first step, frozen weights that stay in a node or on a rank are gathered
once. Frozen weights with a codec of their own follow another rule: see frozen_base.py.

In a pipeline, torch.distributed.pipelining keeps what a backward has gathered until the last backward of the step, and
reduces once more at the end of the step. So whatever the schedule, a unit that is resharded after forward is gathered
once for each micro-batch and once more: a forward gathers unless a backward came just before, a backward only after a
forward.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.codecs.delta import Int4Delta
from fsdp_zpp.config.resolve import ResolvedStrategy
from fsdp_zpp.config.topology import Topology

from .config import Precision
from .frozen_base import gathers_of
from .model_size import Unit, Units


@dataclass(frozen=True)
class Volume:
    """Bytes that one rank sends.

    Attributes:
        inter: Bytes to other nodes.
        intra: Bytes to other GPUs of its node.
    """

    inter: int = 0
    intra: int = 0

    def __add__(self, other: Volume) -> Volume:
        return Volume(self.inter + other.inter, self.intra + other.intra)


def step_volume(
    size: Units, resolved: ResolvedStrategy, micro_batches: int, precision: Precision, pipelined: bool = False
) -> Volume:
    """Return the bytes that one rank sends for all units in a step of ``micro_batches`` micro-batches.

    Args:
        size: The units.
        resolved: The strategy.
        micro_batches: Number of micro-batches.
        precision: The dtypes.
        pipelined: Whether the units are a stage of a pipeline.
    """
    total = Volume()
    for unit in size.units:
        one = Volume()
        # FSDP does not gather a base with a codec of its own; its bytes are added at the end.
        for numel, trainable in ((unit.trainable, True), (unit.frozen if resolved.frozen is None else 0, False)):
            payload = shard_payload(numel, resolved, precision)
            repeats = gathers_in_step(unit, micro_batches, pipelined)
            change = _change_payload(numel, resolved)
            one += _gathers(payload, change, trainable, resolved, repeats)
        one += _reductions(unit.trainable, resolved, micro_batches + pipelined, precision.reduce.itemsize)
        total += Volume(unit.count * one.inter, unit.count * one.intra)
    if resolved.frozen is not None:
        total += Volume(0, micro_batches * gathers_of(size, resolved.frozen, resolved).sent)
    return total


def gathers_in_step(unit: Unit, micro_batches: int, pipelined: bool) -> int:
    """Return how often a step needs weights of ``unit`` that are not gathered. Resharded ones, backward needs again."""
    if pipelined:
        return micro_batches + 1 if unit.reshard_after_forward else 1
    return micro_batches * (2 if unit.reshard_after_forward else 1)


def shard_numel(numel: int, scope: str, topology: Topology) -> int:
    """Return the elements of a flat group's padded shard: N has one shard, I one per GPU of a node, G one per rank."""
    return -(-numel // topology.shard_count(scope))


def nbytes(codec: Codec | None, numel: int, itemsize: int) -> int:
    """Return the bytes of a chunk of ``numel`` values, encoded, or at ``itemsize`` bytes each without a codec."""
    return numel * itemsize if codec is None else codec.nbytes(numel)


def shard_payload(numel: int, strategy: ResolvedStrategy, precision: Precision) -> int:
    """Return the bytes of one rank's shard of the weights that FSDP gathers, encoded as they are sent."""
    # Weights are gathered from the optimizer's shards, whatever their own scope.
    shard = shard_numel(numel, strategy.scopes.optimizer, strategy.topology)
    return nbytes(strategy.weights, shard, precision.compute.itemsize)


def _change_payload(numel: int, strategy: ResolvedStrategy) -> int | None:
    """Return the bytes of the delta of one rank's shard; None if weights are sent whole."""
    if not isinstance(strategy.weights, Int4Delta):
        return None
    return strategy.weights.changes.nbytes(shard_numel(numel, "G", strategy.topology))


def _gathers(payload: int, change: int | None, trainable: bool, strategy: ResolvedStrategy, repeats: int) -> Volume:
    """Count all gathers of a flat group in a step (PaRO, appendix; ZeRO++'s hpZ, arXiv 2306.10209, for I over G).

    ``repeats`` is the number of times that its unit needs weights which it does not keep. Weights that it keeps, on the
    rank (N) or in the node as the secondary shard (I over G), become stale once a step, and never if they are frozen.
    """
    parameters, _, optimizer = strategy.scopes
    nodes, gpus = strategy.topology.nodes, strategy.topology.gpus_per_node
    if optimizer == "N":
        return Volume()
    renewals = 1 if trainable else 0
    between = repeats if parameters == optimizer else renewals
    inside = renewals if parameters == "N" else repeats
    if optimizer == "I":  # each node has all shards: nothing crosses nodes
        return Volume(0, inside * payload * (gpus - 1))
    changes = payload if change is None or not trainable else change
    # After the inter-node hop a rank holds a shard of every node, and all of them go through the intra-node hop.
    return Volume(between * changes * (nodes - 1), inside * nodes * payload * (gpus - 1))


def _reductions(numel: int, strategy: ResolvedStrategy, micro_batches: int, itemsize: int) -> Volume:
    """Count all reductions of a trainable flat group in a step (PaRO, appendix; ZeRO++'s qgZ for the hops down).

    Down leads from full gradients to shards: an all-to-all in the node, then one between nodes. Up leads from shards to
    what the optimizer holds, if that is coarser: an all-gather between nodes, then one in the node.
    """
    _, gradients, optimizer = strategy.scopes
    nodes, gpus = strategy.topology.nodes, strategy.topology.gpus_per_node
    intra_codec, inter_codec = strategy.gradient_codecs
    chunk = shard_numel(numel, "G", strategy.topology)
    if optimizer == "G":
        # Encoded by chunk, since each goes to a rank of its own; otherwise a local index's part is encoded as one.
        down_inside = nodes * nbytes(intra_codec, chunk, itemsize) * (gpus - 1)
    else:
        down_inside = nbytes(intra_codec, shard_numel(numel, "I", strategy.topology), itemsize) * (gpus - 1)
    down_between = nbytes(inter_codec, chunk, itemsize) * (nodes - 1)
    # Sums are encoded by the codec of the hop that made them, and gathered as they are over both hops.
    up = nbytes(inter_codec if nodes > 1 else intra_codec, chunk, itemsize)
    up_between = up * (nodes - 1) if optimizer != "G" else 0
    up_inside = nodes * up * (gpus - 1) if optimizer == "N" else 0
    # A hop runs once a step if gradients accumulate before it, and once per micro-batch otherwise.
    inside_times = 1 if gradients == "N" else micro_batches
    between_times = micro_batches if gradients == "G" else 1
    return Volume(between_times * down_between + up_between, inside_times * down_inside + up_inside)
