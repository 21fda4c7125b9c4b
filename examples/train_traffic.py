"""Bytes on the network: what a strategy sent, against what FULL_SHARD would have sent."""

from __future__ import annotations

import math
from typing import Literal

Kind = Literal["gather", "reduce"]
Hop = Literal["inter", "intra"]
Traffic = dict[Kind, dict[Hop, int]]
"""Bytes sent by one rank, by kind and hop."""


def minus(after: Traffic, before: Traffic) -> Traffic:
    """What was sent between two readings."""
    return {
        kind: {hop: sent - before.get(kind, {}).get(hop, 0) for hop, sent in hops.items()}
        for kind, hops in after.items()
    }


def hop_bytes(traffic: Traffic, hop: Hop) -> int:
    """Bytes over ``hop``, both kinds together."""
    return sum(hops[hop] for hops in traffic.values())


def full_shard_traffic(
    unit_sizes: list[int],
    trained_unit_sizes: list[int],
    *,
    nodes: int,
    gpus_per_node: int,
    micro_batches: int,
    bytes_per_value: int,
) -> Traffic:
    """Bytes that one rank has to send in an optimizer step of FULL_SHARD.

    Each micro-batch gathers every unit in forward and again in backward, except the root unit, which FSDP
    keeps between the two. Gradients are reduce-scattered once per optimizer step: ``no_sync`` accumulates
    them until then.

    A rank's bytes are counted at the least that any algorithm needs, with two hops: a shard goes once to each
    other node, and inside the node each rank passes on what it has. A flat ring, as NCCL may choose it,
    sends more between nodes.

    Args:
        unit_sizes: Values in each FSDP unit, the root unit first.
        trained_unit_sizes: Those of them that have gradients.
        nodes: Number of nodes.
        gpus_per_node: Ranks on each.
        micro_batches: Micro-batches per optimizer step.
        bytes_per_value: Of the dtype in which weights and gradients travel.
    """
    shards, trained = (
        [math.ceil(size / (nodes * gpus_per_node)) * bytes_per_value for size in sizes]
        for sizes in (unit_sizes, trained_unit_sizes)
    )
    gathered = micro_batches * (shards[0] + 2 * sum(shards[1:]))
    reduced = sum(trained)
    inter, intra = nodes - 1, nodes * (gpus_per_node - 1)
    return {
        "gather": {"inter": gathered * inter, "intra": gathered * intra},
        "reduce": {"inter": reduced * inter, "intra": reduced * intra},
    }
