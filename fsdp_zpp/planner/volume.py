"""Bytes on the wire: what one rank sends in an optimizer step, hop by hop.

[Note: Counting]
World n = k nodes x m GPUs. An all-gather of b bytes over r ranks sends b * (r - 1), an all-to-all of r parts of b bytes
b * (r - 1): what each rank must send when every byte goes to its destination once. Flat groups are padded to equal
shards, and codecs add scales and alignment; all of that is counted.

Counted is a step in the long run. At the first one, frozen weights that stay in a node or on a rank come there once.
With a codec of their own they are gathered by another rule: see frozen_base.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..at_work import at_work
from ..codecs import Codec
from ..strategy import Strategy
from ..strategy_unit import levels_on
from ..topology import Topology
from ..weight_difference import Int4Delta
from .conditions import Precision
from .frozen_base import gathers_of
from .model_size import ModelSize


@dataclass(frozen=True)
class Volume:
    """Bytes that one rank sends.

    Attributes:
        inter: To other nodes.
        intra: To other GPUs of its node.
    """

    inter: int = 0
    intra: int = 0

    def __add__(self, other: Volume) -> Volume:
        return Volume(self.inter + other.inter, self.intra + other.intra)


def step_volume(
    size: ModelSize, strategy: Strategy, topology: Topology, micro_batches: int, precision: Precision
) -> Volume:
    """Bytes that one rank sends in an optimizer step of ``micro_batches``, for the whole model."""
    strategy = at_work(strategy, topology)
    total = Volume()
    for unit in size.units:
        one = Volume()
        for numel, trainable in ((unit.trainable, True), (unit.frozen if strategy.frozen is None else 0, False)):
            payload = shard_payload(numel, strategy, topology, precision)
            repeats = micro_batches * (2 if unit.reshard_after_forward else 1)
            change = _change_payload(numel, strategy, topology)
            one += _gathers(payload, change, trainable, strategy, topology, repeats)
        one += _reductions(unit.trainable, strategy, topology, micro_batches, precision.reduce.itemsize)
        total += Volume(unit.count * one.inter, unit.count * one.intra)
    if strategy.frozen is not None:
        total += Volume(0, micro_batches * gathers_of(size, strategy.frozen, strategy, topology).sent)
    return total


def shard_numel(numel: int, letter: str, topology: Topology) -> int:
    """Elements of one shard of a flat group, padded: all of it for N, of the node's for I, of the world's for G."""
    return -(-numel // parts_of(letter, topology))


def parts_of(letter: str, topology: Topology) -> int:
    """D(letter): into how many shards a letter cuts a flat group."""
    return {"N": 1, "I": topology.gpus_per_node, "G": topology.world}[letter]


def nbytes(codec: Codec | None, numel: int, itemsize: int) -> int:
    """Bytes of a chunk of ``numel`` values: encoded, or without a codec as they are."""
    return numel * itemsize if codec is None else codec.nbytes(numel)


def shard_payload(numel: int, strategy: Strategy, topology: Topology, precision: Precision) -> int:
    """Bytes of one rank's shard of weights that FSDP gathers, as they travel."""
    shard = shard_numel(numel, levels_on(strategy, topology).optimizer, topology)
    return nbytes(strategy.weights, shard, precision.compute.itemsize)


def _change_payload(numel: int, strategy: Strategy, topology: Topology) -> int | None:
    """Bytes of what a step changes in one rank's shard, if that travels by itself."""
    if not isinstance(strategy.weights, Int4Delta):
        return None
    return strategy.weights.changes.nbytes(shard_numel(numel, "G", topology))


def _gathers(
    payload: int, change: int | None, trainable: bool, strategy: Strategy, topology: Topology, repeats: int
) -> Volume:
    """All gathers of a flat group in a step (PaRO, appendix; ZeRO++'s hpZ, arXiv 2306.10209, for I over G).

    ``repeats`` is how often its unit needs weights that it does not keep. What it keeps - on the rank (N), or in the
    node as the secondary shard (I over G) - is renewed once a step, and never if it is frozen.
    """
    parameters, _, optimizer = levels_on(strategy, topology)
    nodes, gpus = topology.nodes, topology.gpus_per_node
    if optimizer == "N":
        return Volume()
    renewals = 1 if trainable else 0
    between = repeats if parameters == optimizer else renewals
    inside = renewals if parameters == "N" else repeats
    if optimizer == "I":
        return Volume(0, inside * payload * (gpus - 1))
    changes = payload if change is None or not trainable else change
    return Volume(between * changes * (nodes - 1), inside * nodes * payload * (gpus - 1))


def _reductions(numel: int, strategy: Strategy, topology: Topology, micro_batches: int, itemsize: int) -> Volume:
    """All reductions of a trainable flat group in a step (PaRO, appendix; ZeRO++'s qgZ for the hops down).

    Down is from full gradients to shards: all-to-alls in the node, then between nodes. Up is from shards to what the
    optimizer holds, if it is coarser: all-gathers between nodes, then in the node.
    """
    _, gradients, optimizer = levels_on(strategy, topology)
    nodes, gpus = topology.nodes, topology.gpus_per_node
    intra_codec, inter_codec = strategy.gradient_codecs
    chunk = shard_numel(numel, "G", topology)
    if optimizer == "G":
        down_inside = nodes * nbytes(intra_codec, chunk, itemsize) * (gpus - 1)
    else:
        down_inside = nbytes(intra_codec, shard_numel(numel, "I", topology), itemsize) * (gpus - 1)
    down_between = nbytes(inter_codec, chunk, itemsize) * (nodes - 1)
    up = nbytes(inter_codec if nodes > 1 else intra_codec, chunk, itemsize)
    up_between = up * (nodes - 1) if optimizer != "G" else 0
    up_inside = nodes * up * (gpus - 1) if optimizer == "N" else 0
    inside_times = 1 if gradients == "N" else micro_batches
    between_times = micro_batches if gradients == "G" else 1
    return Volume(between_times * down_between + up_between, inside_times * down_inside + up_inside)
