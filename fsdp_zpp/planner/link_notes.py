"""Notes on slow links inside nodes: what counts as a node, and which size of one is better on three levels of links."""

from __future__ import annotations

from collections.abc import Sequence

from .choice import TOLERANCE, choose
from .config import Cluster
from .estimate import Estimate
from .table import seconds


def notes_on_links(cluster: Cluster, rows: Sequence[Estimate]) -> list[str]:
    """Return notes if the links inside nodes are slow."""
    if not cluster.slow_links or cluster.gpus_per_node == 1:
        return []
    if cluster.nodes == 1:
        note = (
            "Links of the machine are slow: strategies with codecs and optimizer scope G count each GPU as a node, and "
            "their bytes are shown as sent inside it. A quantized base stays sharded over the machine."
        )
        return [note]
    by_size = [[row for row in rows if row.fits and _splits(row) == splits] for splits in (False, True)]
    machine, gpu = (choose([row for row in of if row.torch is None], slow_links=True) for of in by_size)
    return [] if machine is None or gpu is None else [_recommendation(machine, gpu)]


def _splits(row: Estimate) -> bool:
    return row.candidate is not None and row.candidate.strategy.gpus_per_node == 1


def _recommendation(machine: Estimate, gpu: Estimate) -> str:
    """Say which size of a node is better. Ties go to the machine, which keeps less on each GPU."""
    better = "pass gpus_per_node=1" if gpu.time.total * (1 + TOLERANCE) < machine.time.total else "keep the machine"
    one, other = (f"{row.name} takes {seconds(row.time.total)} and {row.gib:.1f} GiB" for row in (machine, gpu))
    return f"Three levels of links: with a machine as a node, {one}; with each GPU as a node, {other}: {better}."
