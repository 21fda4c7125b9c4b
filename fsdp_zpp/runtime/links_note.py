"""Part of a model's log line: what the links of the machine have decided, and at what price. See [Note: Links]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fsdp_zpp.collectives.links import Links, known_links
from fsdp_zpp.collectives.mesh import ProcessMesh
from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.config.topology import Topology

from .unit import StrategyUnit


class LinksNote(NamedTuple):
    """A part of a log line, and whether it tells of something that users should see by default."""

    text: str
    is_warning: bool


def links_of(strategy: Strategy, mesh: ProcessMesh) -> Links | None:
    """Return the links that may decide on the nodes of ``strategy``; None if they are unknown or it names its nodes."""
    return known_links(mesh.group) if strategy.gpus_per_node is None else None


def note_on_links(strategy: Strategy, mesh: ProcessMesh, members: Sequence[StrategyUnit]) -> LinksNote | None:
    """Return what to say of slow links; None if there are none, or the strategy names its nodes.

    Args:
        strategy: The strategy.
        mesh: The ranks.
        members: The units that it has there.
    """
    links = links_of(strategy, mesh)
    if links is None or not links.are_slow:
        return None
    if mesh.by_links:
        return note_on_nodes(mesh, _price(members))
    if links.launched.nodes > 1:
        return LinksNote(f"{links}: the hop inside nodes is slow, too", False)
    if links.node_size is None:
        return LinksNote(
            f"{links}: the host counts as one node; order GPUs by CUDA_VISIBLE_DEVICES so that equal sets of "
            "neighbours are joined, or pass gpus_per_node",
            True,
        )
    if strategy.follows_links:
        why, advice = "packed values stay sharded", ""
    elif strategy.optimizer != "G":
        why, advice = "smaller nodes would hold more of the optimizer state", ""
    elif strategy.error_feedback is not None:
        why, advice = "smaller nodes would hold more of the error state", ""
    else:
        why, advice = "not all that crosses them is encoded", " or choose Strategy.zeropp()"
    stays = f"the host still counts as one node, for {why}"
    return LinksNote(f"{links}: {stays}; pass gpus_per_node={links.node_size} to override{advice}", False)


def note_on_nodes(mesh: ProcessMesh, price: str = "") -> LinksNote | None:
    """Return what to say of nodes that links have decided on, and of their ``price``; None if links have not."""
    links = known_links(mesh.group)
    if links is None or not mesh.by_links:
        return None
    size = mesh.topology.gpus_per_node
    each = "each counts" if size == 1 else f"each {size} count"
    return LinksNote(f"{links}: {each} as a node{price}; gpus_per_node={mesh.topology.world} to override", True)


def _price(members: Sequence[StrategyUnit]) -> str:
    """Return what the members take on a GPU beyond what they would with the host as a node, as a part of a sentence."""
    copies, sums = sum(map(_copy_nbytes, members)), sum(map(_sum_nbytes, members))
    parts = []
    if copies:
        parts.append(f"{size_text(copies)} a GPU for encoded weights")
    if sums:
        parts.append(f"up to {size_text(sums)} a GPU for gradients while they accumulate")
    return f", which takes {' and '.join(parts)}" if parts else ""


def _copy_nbytes(unit: StrategyUnit) -> int:
    """Return the bytes of the encoded weights that a unit keeps."""
    codec = unit.resolved.weights
    if codec is None or unit.gather is None or not unit.gather.secondary.keep:
        return 0
    return codec.nbytes(sum(shard.numel() for shard in unit.sharded.shards())) * unit.ranks.topology.nodes


def _sum_nbytes(unit: StrategyUnit) -> int:
    """Return the bytes of the fp32 sums of gradients of a unit that on one node would be sharded over all ranks."""
    topology, scope = unit.ranks.topology, unit.scopes.gradients
    on_one_node = unit.strategy.resolve(Topology(topology.world, topology.world)).scopes.gradients
    if scope == "G" or on_one_node != "G" or not unit.sharded.is_trained():
        return 0
    return 4 * unit.sharded.numel() // topology.shard_count(scope)


def size_text(nbytes: int) -> str:
    """Format a number of bytes."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes} bytes"
