"""Layout of a strategy's ranks on nodes: decided once for each module that is sharded, and handed on."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from fsdp_zpp.collectives.launcher import described, tells_node_size
from fsdp_zpp.collectives.links import known_links, may_be_known
from fsdp_zpp.collectives.mesh import ProcessMesh, mesh_on, topology_of
from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.config.topology import Topology


@dataclass(frozen=True)
class RankLayout:
    """Ranks that a call shards over, and how they lie on nodes.

    Attributes:
        group: The ranks.
        topology: Their nodes.
        stock: Whether torch's own FULL_SHARD is all that the strategy asks for, so that fully_shard leaves it to torch.
        by_links: Whether the machine's links have decided on the nodes; see [Note: Links] in resolve.py.
    """

    group: dist.ProcessGroup
    topology: Topology
    stock: bool
    by_links: bool = False

    @classmethod
    def of(cls, strategy: Strategy, group: dist.ProcessGroup) -> RankLayout:
        """Return the layout of ``group``, without communication; raise what :func:`topology_of` raises.

        Links count if they were found before: see :func:`find_links`.
        """
        topology = topology_of(group, node_size(strategy, group))
        if strategy.gpus_per_node is None and strategy.follows_links:
            joined = joined_by_links(group)
            if joined is not None:
                return cls(group, joined, stock=False, by_links=True)
        return cls(group, topology, stock=topology.nodes == 1 and strategy.is_plain)

    def mesh(self) -> ProcessMesh:
        """Return the mesh of the ranks. Collective over them at the first call for each layout."""
        return mesh_on(self.group, self.topology, by_links=self.by_links)


def joined_by_links(group: dist.ProcessGroup) -> Topology | None:
    """Return the nodes of ``group`` whose ranks share fast links; None if that is what was launched, or not known."""
    links = known_links(group)
    if links is None or links.node_size is None or links.launched.nodes > 1 or not links.are_slow:
        return None
    return Topology(links.launched.world, links.node_size)


def node_size(strategy: Strategy, group: dist.ProcessGroup) -> int | None:
    """Return ``gpus_per_node`` for ``group``; None leaves it to the launcher."""
    # A plain strategy does the same on any layout, so it must not fail if nothing tells the layout. All ranks then
    # count as one node, and torch's own collectives do the work.
    if strategy.gpus_per_node is None and strategy.is_plain and not tells_node_size():
        return dist.get_world_size(group)
    return strategy.gpus_per_node


def node_size_fact(given: int | None, group: dist.ProcessGroup) -> object:
    """Return what ranks must agree on of a ``gpus_per_node``, before links are asked: only ranks without one ask."""
    if given is not None:
        return given
    # As resolved rather than as given: ranks that leave it to the launcher may have been launched differently.
    launched = launched_node_size(group)
    return f"{launched} (as launched)" if isinstance(launched, int) and may_be_known(group) else launched


def launched_node_size(group: dist.ProcessGroup) -> object:
    """Return ``gpus_per_node`` as launched, or what the launcher says if that gives no layout."""
    try:
        return topology_of(group).gpus_per_node
    except ValueError:  # which must raise on all ranks, not on some: the caller compares the text between them
        return described()
