"""Ranks as a mesh of nodes x GPUs, and the process groups of its two hops."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch.distributed as dist


@dataclass(frozen=True)
class Topology:
    """``world`` ranks on nodes of ``gpus_per_node``: rank = node * gpus_per_node + local.

    Raises:
        ValueError: If ``world`` is not divisible by ``gpus_per_node``.
    """

    world: int
    gpus_per_node: int

    def __post_init__(self) -> None:
        if self.gpus_per_node < 1 or self.world % self.gpus_per_node:
            divisors = [d for d in range(1, self.world + 1) if self.world % d == 0]
            raise ValueError(
                f"the world size must be divisible by gpus_per_node, got a world of {self.world} and "
                f"gpus_per_node={self.gpus_per_node}; allowed are {divisors}"
            )

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.world // self.gpus_per_node

    def intra_partition(self) -> list[list[int]]:
        """The ranks of each node, by local index."""
        starts = range(0, self.world, self.gpus_per_node)
        return [list(range(start, start + self.gpus_per_node)) for start in starts]

    def inter_partition(self) -> list[list[int]]:
        """The ranks of each local index, one on every node, by node."""
        return [list(range(local, self.world, self.gpus_per_node)) for local in range(self.gpus_per_node)]

    def __str__(self) -> str:
        return f"{self.nodes} node{'s' * (self.nodes > 1)} x {self.gpus_per_node}"


@dataclass(frozen=True, eq=False)
class ProcessMesh:
    """A process group laid out by a :class:`Topology`, with a subgroup for each hop.

    Attributes:
        group: The group of all ranks.
        topology: Its layout.
        rank: This rank in ``group``.
        intra: The ranks of this node, or None if they are one.
        inter: The ranks with this local index on all nodes, or None if there is one node.
    """

    group: dist.ProcessGroup
    topology: Topology
    rank: int
    intra: dist.ProcessGroup | None
    inter: dist.ProcessGroup | None


# The subgroups of a group live and die with it, and are made once however many layers ask for them.
_meshes: WeakKeyDictionary[dist.ProcessGroup, dict[int, ProcessMesh]] = WeakKeyDictionary()


def process_mesh(group: dist.ProcessGroup, gpus_per_node: int | None = None) -> ProcessMesh:
    """The mesh of ``group``, made at the first call for each layout. Collective over ``group``.

    Args:
        group: A process group; each rank must be a member.
        gpus_per_node: Consecutive ranks of ``group`` that share a node; None takes it from torchrun.

    Raises:
        ValueError: If the layout is not possible, on every rank before any communication.
    """
    topology = topology_of(group, gpus_per_node)
    meshes = _meshes.setdefault(group, {})
    if topology.gpus_per_node not in meshes:
        rank = dist.get_rank(group)
        meshes[topology.gpus_per_node] = ProcessMesh(
            group=group,
            topology=topology,
            rank=rank,
            intra=_subgroup(group, topology.intra_partition()),
            inter=_subgroup(group, topology.inter_partition()),
        )
    return meshes[topology.gpus_per_node]


def topology_of(group: dist.ProcessGroup, gpus_per_node: int | None = None) -> Topology:
    """The layout of ``group``; does not communicate. Arguments and errors as :func:`process_mesh`."""
    world = dist.get_world_size(group)
    if gpus_per_node is not None:
        return Topology(world, gpus_per_node)
    if world == 1:
        return Topology(1, 1)
    if "LOCAL_WORLD_SIZE" not in os.environ:
        raise ValueError(
            "gpus_per_node was not given and LOCAL_WORLD_SIZE is not set (torchrun sets it); "
            "pass gpus_per_node, the number of ranks that share a node"
        )
    local_world = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = [rank // local_world for rank in dist.get_process_group_ranks(group)]
    sizes = set(Counter(nodes).values())
    if nodes != sorted(nodes) or len(sizes) != 1:
        raise ValueError(
            f"the ranks {dist.get_process_group_ranks(group)} do not lie on nodes of {local_world} "
            "(LOCAL_WORLD_SIZE) in equal, consecutive shares; pass gpus_per_node to say how they lie"
        )
    return Topology(world, sizes.pop())


def _subgroup(group: dist.ProcessGroup, partition: list[list[int]]) -> dist.ProcessGroup | None:
    """This rank's part of a partition of ``group``'s ranks into parts of one size; None for parts of one rank."""
    if len(partition[0]) == 1:
        return None
    if len(partition) == 1:
        return group
    # Making a group is a matter of all ranks of the job, members or not. A mesh that is only a part of the job
    # (data parallel beside tensor parallel) can't call the others. With NCCL bound to devices it can be split;
    # else its members settle it among themselves, and torch derives the group's name from how many groups each
    # has been in, which must be equally many.
    everyone = dist.get_world_size(group) == dist.get_world_size()
    if not everyone and getattr(group, "bound_device_id", None) is not None:
        return dist.split_group(parent_pg=group, split_ranks=partition)
    rank = dist.get_rank(group)
    own = None
    for part in partition:
        if everyone or rank in part:
            global_ranks = [dist.get_global_rank(group, member) for member in part]
            made = dist.new_group(global_ranks, use_local_synchronization=not everyone)
            own = made if rank in part else own
    return own
