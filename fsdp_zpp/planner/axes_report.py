"""What a report says of other parallelisms: where ranks lie, and the bytes of each axis."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from fsdp_zpp.config.topology import Topology

from .axes import Axes
from .config import Cluster
from .estimate import Estimate
from .table import aligned, count, number
from .volume import Volume


def title_of_axes(axes: Axes, estimate: Estimate) -> str:
    """Return a line with the degrees of the axes, and the ranks that strategies shard over."""
    degrees = ", ".join(f"{name} {degree}" for name, degree in asdict(axes).items())
    if estimate.experts is None:
        return f"{degrees}; sharded over {_ranks(estimate.topology)}"
    own = f", by {estimate.experts.strategy.levels}" * (estimate.experts.strategy.levels != estimate.levels)
    return (
        f"{degrees}; dense parameters sharded over {_ranks(estimate.topology)}, experts over "
        f"{_ranks(estimate.experts.topology)}{own}"
    )


def _ranks(topology: Topology) -> str:
    return f"{count(topology.world, 'rank')}, {topology.gpus_per_node:,} a node"


def table_of_axes(estimate: Estimate, activations: Iterable[tuple[str, Volume]], cluster: Cluster) -> list[str]:
    """Return a table of the bytes that a step sends along each axis under one strategy."""
    experts = estimate.experts
    volumes = {"dp" if experts is None else "dp, dense parameters": estimate.dense_volume}
    if experts is not None:
        volumes[f"dp, experts ({experts.strategy.levels})"] = experts.volume
    estimated = {f"{axis}, activations *": volume for axis, volume in activations}
    rows = [(f"GB a step under {estimate.name}:", "out of node", "in node, a GPU")]
    for name, volume in (volumes | estimated).items():
        out = cluster.gpus_per_node * volume.inter
        rows.append((f"   {name}", number(out / 1e9), number(volume.intra / 1e9)))
    legend = ["* estimated from the shape of a layer; no time above includes them."] if estimated else []
    return [*aligned(rows, names=1), *legend, ""]


def ranks_of(estimate: Estimate) -> dict[str, Any]:
    """Return, for JSON, the ranks that a strategy shards over, and the figures of experts that are apart."""
    figures: dict[str, Any] = {"ranks": asdict(estimate.topology)}
    if (experts := estimate.experts) is not None:
        figures["experts"] = {
            "levels": experts.strategy.levels,
            "ranks": asdict(experts.topology),
            "sent_bytes_per_gpu": asdict(experts.volume),
            "memory_bytes": experts.memory.total,
        }
    return figures
