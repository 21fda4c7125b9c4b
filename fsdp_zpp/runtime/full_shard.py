"""Bytes that torch's FULL_SHARD would send for the same model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fsdp_zpp.collectives.kinds import Level
from fsdp_zpp.config.topology import Topology


@dataclass(frozen=True)
class Forwards:
    """How often a model ran forward in a step.

    Args:
        trained: Micro-batches.
        evaluated: Forwards without gradients.
    """

    trained: int
    evaluated: int


@dataclass(frozen=True)
class FullShardUnit:
    """Parameters that FULL_SHARD would gather and reduce together.

    Args:
        numel: Number of values, on all ranks together.
        trained_numel: Number of those whose gradients are reduced.
        weight_nbytes: Bytes of a value that is gathered.
        gradient_nbytes: Bytes of a value that is reduced.
        reshards: Whether they are gathered again for the backward, as all but the outermost unit's are.
        topology: The ranks.
        own_nbytes: Bytes that are gathered, of all ranks together, if they aren't ``weight_nbytes`` for each value.
    """

    numel: int
    trained_numel: int
    weight_nbytes: int
    gradient_nbytes: int
    reshards: bool
    topology: Topology
    own_nbytes: int | None = None


def full_shard_bytes(units: Iterable[FullShardUnit], forwards: Forwards) -> dict[Level, int]:
    """Return the bytes that one rank would have to send in a step, by hop.

    FULL_SHARD gathers in each forward and, where it reshards, again in its backward; under ``no_sync``, it reduces once
    a step. A shard goes once to each other node, and is passed on inside: a flat ring sends more.

    Args:
        units: The units.
        forwards: Forwards of the step.
    """
    sent: dict[Level, int] = {"inter": 0, "intra": 0}
    for unit in units:
        nodes, gpus = unit.topology.nodes, unit.topology.gpus_per_node
        shard, trained = (-(-numel // unit.topology.world) for numel in (unit.numel, unit.trained_numel))
        gathers = forwards.trained * (2 if unit.reshards else 1) + forwards.evaluated
        reductions = min(forwards.trained, 1)
        own = unit.own_nbytes
        gathered = shard * unit.weight_nbytes if own is None else -(-own // unit.topology.world)
        nbytes = gathers * gathered + reductions * trained * unit.gradient_nbytes
        sent["inter"] += nbytes * (nodes - 1)
        sent["intra"] += nbytes * nodes * (gpus - 1)
    return sent
