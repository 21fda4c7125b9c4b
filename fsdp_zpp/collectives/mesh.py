"""Ranks as a mesh of nodes x GPUs, and the process groups of its two hops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from fsdp_zpp.config.topology import Topology

from ._torch_group_names import forget_equal_meshes, named_by_ranks
from .launcher import launched_on_each_node
from .rank_names import name_alike


@dataclass(frozen=True)
class ProcessMesh:
    """A process group laid out by a :class:`Topology`, with a subgroup for each hop.

    Attributes:
        topology: The layout.
        rank: This rank in the group.
        intra: The ranks of this node; None if it has one rank.
        inter: The ranks with this local index on all nodes, or None if there is one node.
        group: All of its ranks, or None if this one is alone.
        by_links: Whether the machine's links have decided what a node is, not an argument or the launcher.
    """

    topology: Topology
    rank: int
    intra: dist.ProcessGroup | None
    inter: dist.ProcessGroup | None
    group: dist.ProcessGroup | None = None
    # Not compared: the hops are the same whoever decided.
    by_links: bool = field(default=False, compare=False)

    def own_node(self) -> ProcessMesh:
        """Return this rank's node as a mesh of its own."""
        gpus = self.topology.gpus_per_node
        return ProcessMesh(Topology(gpus, gpus), self.rank % gpus, self.intra, None, self.intra)

    def is_within(self, ranks: Collection[int]) -> bool:
        """Return whether all ranks of this mesh are among these ranks of the job."""
        if self.group is None:
            return dist.get_rank() in ranks
        try:
            return set(dist.get_process_group_ranks(self.group)) <= set(ranks)
        except KeyError:  # of a group that was destroyed
            return False

    def across_nodes(self) -> ProcessMesh:
        """Return the ranks with this local index as a mesh of nodes of one."""
        nodes, gpus = self.topology.nodes, self.topology.gpus_per_node
        return ProcessMesh(Topology(nodes, 1), self.rank // gpus, None, self.inter, self.inter)


@dataclass(frozen=True)
class _Whole:
    """Stand-in for the group itself where a hop is over all of it: to hold the group would keep it alive."""


_Subgroup = dist.ProcessGroup | _Whole | None
# A group's subgroups are made once, however many layers ask for them.
_own_ranks: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
_twins: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
_subgroups: WeakKeyDictionary[dist.ProcessGroup, dict[int, tuple[_Subgroup, _Subgroup]]] = WeakKeyDictionary()
# By default group, the subgroups that were made of other groups: torch keeps a group until it is destroyed explicitly.
_made_of: WeakKeyDictionary[dist.ProcessGroup, list[tuple[ref[dist.ProcessGroup], dist.ProcessGroup]]]
_made_of = WeakKeyDictionary()
# By the launcher's node size: looking at all ranks of a group takes too long to repeat for every unit of a model.
_layouts: WeakKeyDictionary[dist.ProcessGroup, dict[int, Topology]] = WeakKeyDictionary()


def process_mesh(group: dist.ProcessGroup, gpus_per_node: int | None = None) -> ProcessMesh:
    """Return the mesh of ``group``; the first call for each layout makes its subgroups. Collective over ``group``.

    Args:
        group: A process group; each rank must be a member.
        gpus_per_node: Consecutive ranks of ``group`` that share a node; None takes it from the launcher.

    Raises:
        ValueError: If the layout is not possible, on every rank before any communication.
    """
    return mesh_on(group, topology_of(group, gpus_per_node))


def mesh_on(group: dist.ProcessGroup, topology: Topology, *, by_links: bool = False) -> ProcessMesh:
    """Return the mesh of ranks whose layout is known, as :func:`process_mesh` does; see :class:`ProcessMesh`."""
    if group not in _subgroups:
        forget_equal_meshes()  # see [Note: Names of groups] in _torch_group_names.py
    hops = _subgroups.setdefault(group, {})
    if topology.gpus_per_node not in hops:
        _destroy_orphans()
        intra = _subgroup(group, topology.intra_partition())
        inter = _subgroup(group, topology.inter_partition())
        hops[topology.gpus_per_node] = intra, inter
        _remember(group, intra, inter)
    intra, inter = (group if isinstance(hop, _Whole) else hop for hop in hops[topology.gpus_per_node])
    return ProcessMesh(topology, dist.get_rank(group), intra, inter, group, by_links)


def as_launched(mesh: ProcessMesh) -> ProcessMesh:
    """Return the mesh with the launcher's nodes, if links have decided on others. See [Note: Links] in resolve.py."""
    return process_mesh(mesh.group) if mesh.by_links and mesh.group is not None else mesh


def own_rank() -> dist.ProcessGroup:
    """Return this rank as a group of its own, made at the first call."""
    world = dist.group.WORLD
    assert world is not None
    if world not in _own_ranks:
        # By its one member alone: a job has as many of these groups as ranks, and need not make each of them together.
        with named_by_ranks():
            _own_ranks[world] = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return _own_ranks[world]


def topology_of(group: dist.ProcessGroup, gpus_per_node: int | None = None) -> Topology:
    """Return the layout of ``group``, without communication. Arguments and errors are those of :func:`process_mesh`."""
    world = dist.get_world_size(group)
    if gpus_per_node is not None:
        return Topology(world, gpus_per_node)
    if world == 1:
        return Topology(1, 1)
    local_world = launched_on_each_node()
    topologies = _layouts.setdefault(group, {})
    if local_world not in topologies:
        size = ranks_on_each_node([rank // local_world for rank in dist.get_process_group_ranks(group)])
        if size is None:
            raise ValueError(
                f"the ranks {dist.get_process_group_ranks(group)} are not spread over nodes of "
                f"{local_world} (as launched) in equal, consecutive shares; pass gpus_per_node"
            )
        topologies[local_world] = Topology(world, size)
    return topologies[local_world]


def ranks_on_each_node(nodes: Sequence[int]) -> int | None:
    """Return how many of the ranks that lie on ``nodes``, in their order, share one; None if not equally many do."""
    sizes = set(Counter(nodes).values())
    return sizes.pop() if len(sizes) == 1 and list(nodes) == sorted(nodes) else None


def twin_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return another group of the same ranks, for what torch tells apart by groups. Collective at the first call."""
    if group not in _twins:
        _destroy_orphans()
        with named_by_ranks():
            _twins[group] = _made_by_members(group, [list(range(dist.get_world_size(group)))])
        name_alike(_twins[group], group)
        _remember(group, _twins[group])
    return _twins[group]


def with_own_hop(mesh: ProcessMesh) -> ProcessMesh:
    """Return a mesh whose group waits for no hop between nodes: if it serves as that hop, a twin takes its place there.

    So ranks can compare over the group that users know while an exchange is on its way. Collective at the first call
    for a group.
    """
    return replace(mesh, inter=twin_of(mesh.group)) if mesh.group and mesh.group is mesh.inter else mesh


def _subgroup(group: dist.ProcessGroup, partition: list[list[int]]) -> _Subgroup:
    """Make this rank's part of a partition of ``group`` into parts of one size; None for parts of one rank."""
    if len(partition[0]) == 1:
        return None
    if len(partition) == 1:
        return _Whole()
    # torch has all ranks of the job make a group together, members or not. A mesh that is only a part of the job
    # (data parallel beside tensor parallel) can't have the others call that, so its ranks make it among themselves.
    make = _made_by_all if dist.get_world_size(group) == dist.get_world_size() else _made_by_members
    with named_by_ranks():
        return make(group, partition)


def _made_by_all(group: dist.ProcessGroup, partition: list[list[int]]) -> dist.ProcessGroup:
    timeout, backend = _timeout_of(group), _backend_of(group)
    own: dist.ProcessGroup | None = None
    for part in partition:
        subgroup = dist.new_group(_global_ranks(group, part), timeout=timeout, backend=backend)
        own = subgroup if dist.get_rank(group) in part else own
    assert own is not None
    return own


def _made_by_members(group: dist.ProcessGroup, partition: list[list[int]]) -> dist.ProcessGroup:
    timeout = _timeout_of(group)
    if getattr(group, "bound_device_id", None) is not None:  # NCCL that is bound to devices can split
        part = dist.split_group(parent_pg=group, split_ranks=partition, timeout=timeout)
    else:
        ranks = next(_global_ranks(group, part) for part in partition if dist.get_rank(group) in part)
        part = dist.new_group(ranks, timeout=timeout, backend=_backend_of(group), use_local_synchronization=True)
    assert isinstance(part, dist.ProcessGroup)  # None for ranks outside of all parts
    return part


def _global_ranks(group: dist.ProcessGroup, ranks: list[int]) -> list[int]:
    return [dist.get_global_rank(group, rank) for rank in ranks]


def _backend_of(group: dist.ProcessGroup) -> str | None:
    return None if group is dist.group.WORLD else dist.get_backend(group)


def _remember(parent: dist.ProcessGroup, *subgroups: _Subgroup) -> None:
    """Note ``subgroups``, to destroy them after ``parent`` is destroyed; torch itself destroys the default group's."""
    world = dist.group.WORLD
    if world is not None and parent is not world:
        remembered = _made_of.setdefault(world, [])
        remembered += [(ref(parent), subgroup) for subgroup in subgroups if isinstance(subgroup, dist.ProcessGroup)]


def _destroy_orphans() -> None:
    """Destroy the subgroups of groups that users have destroyed.

    Not in a finalizer of the parent group: finalizers run at different times on each rank, and NCCL destroys a
    communicator on all of its ranks together.
    """
    world = dist.group.WORLD
    assert world is not None
    remembered = _made_of.get(world, [])
    orphans = [subgroup for parent, subgroup in remembered if not _is_registered(parent())]
    remembered[:] = [(parent, subgroup) for parent, subgroup in remembered if _is_registered(parent())]
    if orphans:
        forget_equal_meshes()
    for subgroup in filter(_is_registered, orphans):
        dist.destroy_process_group(subgroup)


def _is_registered(group: dist.ProcessGroup | None) -> bool:
    try:
        return group is not None and dist.get_group_rank(group, dist.get_rank()) >= 0
    except ValueError:  # which torch raises for a group that was destroyed
        return False


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout of ``group``'s collectives, which its hops take over; None if its backend has none."""
    device = torch.device("cuda") if "nccl" in dist.get_backend(group) else torch.device("cpu")
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None
