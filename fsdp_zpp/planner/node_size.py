"""Which ranks count as a node, and which links its hops take, on a machine whose links are slow.

The rule is that of training, [Note: Links] in config/resolve.py: on one machine without NVLink, each GPU is a node to
strategies whose codecs make it pay, and a quantized base is still sharded over the machine. Otherwise a machine is a
node.

On several machines without NVLink there are three levels: a GPU's own memory, its machine, all machines. The planner
compares both node sizes there. A hop between nodes of one GPU goes over two kinds of links: to ranks of the same
machine, and out of it. As everywhere in the plan, a byte counts once for each rank that it goes to, which NCCL's rings
undercut for gathers.
"""

from __future__ import annotations

from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.config.topology import Topology

from .config import Cluster
from .volume import Volume


def strategy_topology(strategy: Strategy, ranks: Topology, cluster: Cluster) -> Topology:
    """Return the layout that ``strategy`` sees of the ranks that it shards over.

    Args:
        strategy: The strategy.
        ranks: The layout of these ranks on machines.
        cluster: The cluster.
    """
    if strategy.gpus_per_node is not None:
        return Topology(ranks.world, strategy.gpus_per_node)
    return Topology(ranks.world, 1) if splits_machine(strategy, cluster) else ranks


def splits_machine(strategy: Strategy, cluster: Cluster) -> bool:
    """Return whether each GPU of the only machine counts as a node, without the strategy's saying so."""
    alone = cluster.slow_links and cluster.nodes == 1 and cluster.gpus_per_node > 1
    return alone and strategy.gpus_per_node is None and strategy.follows_links


def on_machines(hops: Volume, seen: Topology, ranks: Topology) -> Volume:
    """Return what a rank sends out of its machine and inside it, of what it sends between nodes and inside them.

    Args:
        hops: Bytes of the hops, between nodes and inside them.
        seen: The layout that the strategy sees.
        ranks: The layout of its ranks on machines, whose nodes are as large or larger.
    """
    if seen.nodes == 1 or seen == ranks:
        return hops
    # The peers of a hop between nodes are one rank of each other node, and get equally much.
    beside = ranks.gpus_per_node // seen.gpus_per_node - 1
    inside = hops.inter * beside // (seen.nodes - 1)
    return Volume(hops.inter - inside, hops.intra + inside)
