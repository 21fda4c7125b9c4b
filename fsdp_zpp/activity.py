"""What of a strategy is at work on a given mesh, and what is not, and why: the one log line of a model."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from .codecs import Codec
from .strategy import Strategy
from .topology import ProcessMesh, Topology

logger = logging.getLogger("fsdp_zpp")

_ONE_NODE = "one node: no inter-node hop"
_ONE_GPU_A_NODE = "one GPU a node: no intra-node hop"


@dataclass(frozen=True)
class Activity:
    """What works (``active``) and what was asked for but has nothing to do here (``inactive``), in words."""

    active: tuple[str, ...]
    inactive: tuple[str, ...]

    def __str__(self) -> str:
        words = "; ".join(self.active) or "nothing to communicate"
        return words + (f"; NOT active: {'; '.join(self.inactive)}" if self.inactive else "")


def activity(strategy: Strategy, topology: Topology) -> Activity:
    """What of ``strategy`` works on ``topology``."""
    active: list[str] = []
    inactive: list[str] = []
    has_inter, has_intra = topology.nodes > 1, topology.gpus_per_node > 1

    def state(text: str, works: bool, why_not: str) -> None:
        if works:
            active.append(text)
        else:
            inactive.append(f"{text} ({why_not})")

    alone = "one rank: nothing is sent"
    if strategy.weights is None and topology.world > 1:
        active.append("weights gathered in full precision")
    elif strategy.weights is not None:
        state(f"weights gathered as {strategy.weights}", topology.world > 1, alone)
    if strategy.parameters == "I":
        state("secondary shard of the weights kept in each node", has_inter, _ONE_NODE)
    intra, inter = strategy.gradient_codecs
    if intra is None and inter is None and topology.world > 1:
        active.append("gradients reduced in full precision")
    for codec, level, works, why_not in (
        (intra, "inside nodes", has_intra, _ONE_GPU_A_NODE),
        (inter, "between nodes", has_inter, _ONE_NODE),
    ):
        if isinstance(codec, Codec):
            state(f"gradients reduced as {codec} {level}", works, why_not if topology.world > 1 else alone)
    return Activity(tuple(active), tuple(inactive))


def log_activity(strategy: Strategy, mesh: ProcessMesh, model: str, units: int) -> None:
    """Say once, on the mesh's first rank, what is active; a warning if something that was asked for is not."""
    if mesh.rank != 0:
        return
    report = activity(strategy, mesh.topology)
    level = logging.WARNING if report.inactive else logging.INFO
    logger.log(level, "%s: %s on %s, %d units: %s", model, strategy.levels, mesh.topology, units, report)
