"""Bytes that torch's FULL_SHARD would send for the same model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fsdp_zpp.collectives.kinds import Level
from fsdp_zpp.config.topology import Topology


@dataclass(frozen=True)
class FullShardUnit:
    """Parameters that FULL_SHARD would gather and reduce together.

    Args:
        numel: Number of values, on all ranks together.
        weight_nbytes: Bytes of a value that is gathered.
        gradient_nbytes: Bytes of a value that is reduced; 0 if the parameters are frozen.
        reshards: Whether they are gathered again for the backward, as all but the outermost unit's are.
        topology: The ranks.
    """

    numel: int
    weight_nbytes: int
    gradient_nbytes: int
    reshards: bool
    topology: Topology


def full_shard_bytes(units: Iterable[FullShardUnit], micro_batches: int) -> dict[Level, int]:
    """Return the bytes that one rank would have to send in a step, by hop.

    FULL_SHARD gathers in each micro-batch and, under ``no_sync``, reduces once a step. A shard goes once to each other
    node, and is passed on inside: a flat ring sends more.

    Args:
        units: The units.
        micro_batches: Micro-batches of the step.
    """
    sent: dict[Level, int] = {"inter": 0, "intra": 0}
    for unit in units:
        nodes, gpus = unit.topology.nodes, unit.topology.gpus_per_node
        shard = -(-unit.numel // unit.topology.world)
        gathers = micro_batches * (2 if unit.reshards else 1)
        nbytes = shard * (gathers * unit.weight_nbytes + unit.gradient_nbytes)
        sent["inter"] += nbytes * (nodes - 1)
        sent["intra"] += nbytes * nodes * (gpus - 1)
    return sent
