"""Ranks by node: their groups, names and devices."""

from __future__ import annotations

import gc
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import groupby
from typing import Any, Literal
from unittest.mock import patch
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _redistribute

from fsdp_zpp._torch_compat import major_minor
from fsdp_zpp.strategy.error_feedback import Topology

# ---- devices


def accelerator() -> torch.device | None:
    """Return the kind of accelerator that this machine has; None if it computes on the CPU."""
    # On a machine without a GPU, a CUDA build of torch names CUDA unless it checks what is available.
    return torch.accelerator.current_accelerator(check_available=True)


def collective_device(group: dist.ProcessGroup, device: torch.device | None = None) -> torch.device:
    """Return the device on which collectives of ``group`` take small tensors."""
    kind = accelerator()
    if kind is None or "gloo" in dist.get_backend(group):
        return torch.device("cpu")
    if device is not None and device.type == kind.type:
        return device
    return getattr(group, "bound_device_id", None) or torch.device(kind.type, torch.accelerator.current_device_index())


def for_collectives(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return ``tensor`` on a device that collectives of ``group`` accept: the accelerator if possible."""
    if tensor.device.type != "cpu":
        return tensor
    kind, backend = accelerator(), dist.get_backend(group)
    # With CPU offload a group may have several backends, "cpu:gloo,cuda:nccl".
    takes_accelerators = "gloo" not in backend or "ccl" in backend
    return tensor.to(kind) if kind is not None and takes_accelerators else tensor


def compute_device(group: dist.ProcessGroup | None, device: torch.device | str | int | None) -> torch.device | None:
    """Return the device for a frozen base's codes: ``device`` if given. A result of None means the weights' device."""
    kind = accelerator()
    if isinstance(device, int):
        return torch.device("cpu" if kind is None else kind.type, device)
    if device is not None:
        return torch.device(device)
    if kind is None or group is None or dist.get_backend(group) == "gloo":
        return None
    return torch.device(kind.type, torch.accelerator.current_device_index())


# ---- rank names


def named_ranks(ranks: Collection[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-3, 6``."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(sorted(ranks)), lambda p: p[1] - p[0])]
    shown = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


# ---- launcher
#
# torchrun sets the node size in the environment, and so does Slurm's srun if it starts the ranks itself.
#
# srun sets ``SLURM_STEP_TASKS_PER_NODE`` for every task. ``SLURM_NTASKS_PER_NODE`` is not used: it is set only if
# ``--ntasks-per-node`` was given, and may describe the job instead of this step.

_COUNTS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
"""A part of srun's list: ``8(x2)`` are two nodes of 8 tasks."""


def tells_node_size() -> bool:
    """Return whether the launcher says how many ranks share a node. Needs the default process group."""
    return "LOCAL_WORLD_SIZE" in os.environ or bool(_tasks_on_each_node())


def launched_on_each_node() -> int:
    """Return the number of ranks that the launcher has started on each node. Needs the default process group.

    Raises:
        ValueError: If the launcher gives no valid number, if nodes are of different sizes, or if srun has not put
            consecutive ranks on a node. Some ranks may raise while others do not.
    """
    if "LOCAL_WORLD_SIZE" in os.environ:
        return _by_torchrun()
    tasks = _tasks_on_each_node()
    if not tasks:
        raise ValueError(
            "gpus_per_node was not given and LOCAL_WORLD_SIZE is not set (torchrun sets it); "
            "pass gpus_per_node, the number of ranks that share a node"
        )
    if len(set(tasks)) > 1:
        raise _unequal(len(tasks), tasks[int(os.environ["SLURM_NODEID"])])
    if _place_by_srun(tasks[0]) != dist.get_rank():
        raise ValueError(
            f"srun has not put consecutive ranks on a node: {_place_on_nodes()} has rank {dist.get_rank()}; start it "
            "with srun --distribution=block and RANK=$SLURM_PROCID"
        )
    return tasks[0]


def launcher_variables() -> str:
    """Return the launcher's variables as text; ranks compare it if the variables do not give a group's layout."""
    tasks = _tasks_on_each_node()
    if "LOCAL_WORLD_SIZE" in os.environ or not tasks:
        return f"LOCAL_WORLD_SIZE={os.environ.get('LOCAL_WORLD_SIZE')}"
    out_of_order = len(set(tasks)) == 1 and _place_by_srun(tasks[0]) != dist.get_rank()
    return f"{_place_on_nodes()} (srun has put other ranks between)" if out_of_order else f"srun's {tasks}"


def _by_torchrun() -> int:
    local_world, nodes = _positive("LOCAL_WORLD_SIZE"), _positive("GROUP_WORLD_SIZE")
    if nodes and nodes * local_world != dist.get_world_size():
        # A rank knows only its own node's size. If sizes differ, all raise but ranks on nodes of average size.
        raise _unequal(nodes, local_world)
    return local_world


def _unequal(nodes: int, on_this_one: int) -> ValueError:
    return ValueError(
        f"the nodes are of different sizes: {dist.get_world_size()} ranks on {nodes} nodes, {on_this_one} of them on "
        "this one; start the same number on each node, or pass gpus_per_node"
    )


def _positive(name: str) -> int:
    """Return the positive number in a variable that torchrun sets; 0 if it is not set."""
    value = os.environ.get(name)
    if value is not None and (not value.isdecimal() or int(value) == 0):
        raise ValueError(
            f"{name}={value!r} in the environment is not a positive number, as torchrun sets it; set it as torchrun "
            "does, or pass gpus_per_node, the number of ranks that share a node"
        )
    return int(value or 0)


def _tasks_on_each_node() -> list[int]:
    """Return the number of srun's tasks on each node; empty if tasks are not ranks, as under mpirun in a Slurm job."""
    parts = [_COUNTS.fullmatch(part) for part in os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(",")]
    if None in parts or not {"SLURM_NODEID", "SLURM_LOCALID"} <= os.environ.keys():
        return []
    tasks = [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]
    return tasks if sum(tasks) == dist.get_world_size() else []


def _place_by_srun(tasks_a_node: int) -> int:
    return int(os.environ["SLURM_NODEID"]) * tasks_a_node + int(os.environ["SLURM_LOCALID"])


def _place_on_nodes() -> str:
    return f"SLURM_NODEID={os.environ['SLURM_NODEID']}, SLURM_LOCALID={os.environ['SLURM_LOCALID']}"


# ---- group names
#
# Private functions of torch: one names process groups, the others clear caches that refer to groups by name.
#
# [Note: Names of groups]
# If the members of a group make it without other ranks, they meet in the job's store under the group's name. torch
# derives this name from a count that each rank keeps. In torch 2.11 to 2.13 a rank counts the groups that it has been
# in. If some members have been in one more group, such as that of a pipeline's first and last stage, the names differ,
# and members wait for each other forever. From 2.14 on a rank counts the groups that it has made: if only some ranks
# have made a group, all ranks hang when they make the next one together. So this library names a group by its ranks and
# by the number of earlier groups of exactly these ranks. All members have made those groups, so they agree on the
# number without communication. Each new group gets a new number, so it reads no keys that an older one has left.
#
# A DeviceMesh refers to its groups only by name, but meshes of equal ranks compare equal. torch caches results of
# operations on DTensors, including their meshes, and looks them up by equality. So a model may compute with an earlier
# model's mesh, whose groups are gone. This happens above all if a process destroys the default group and makes another.
# The numbers then begin again at 0. If groups are made in the same order as before, they get the same names, and
# meshes in old state dicts find them. In another order they get other names, and a cached mesh finds no group. So the
# caches are cleared when the first unit over a group is made, and when groups are destroyed.

# For each default group, the number of groups that were made so far of each list of ranks.
_made: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()


@contextmanager
def named_by_ranks() -> Iterator[None]:
    """Name the groups that are made in this context by their ranks. See [Note: Names of groups]."""
    world = dist.group.WORLD
    assert world is not None
    made = _made.setdefault(world, Counter())

    def name(ranks: Sequence[int], use_hashed_name: bool) -> Any:  # a str, which torch calls GroupName
        number = made[tuple(ranks)]
        made[tuple(ranks)] += 1
        return f"fsdp_zpp {number} of {'_'.join(map(str, ranks))}"

    with patch.multiple(distributed_c10d, _process_group_name=name):
        yield


def forget_equal_meshes() -> None:
    """Clear torch's caches of meshes: a cached mesh may equal a new one, but lack its groups or this process's rank."""
    # Each thread has its own caches; other threads' caches stay.
    propagate: Any = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    clears = (
        propagate.cache_clear,
        getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None),
        getattr(getattr(_redistribute, "_gen_transform_infos", None), "cache_clear", None),
        getattr(_redistribute, "clear_redistribute_planner_cache", None),
    )
    for clear in filter(None, clears):  # not every torch has each of these caches
        clear()
    if major_minor(torch.__version__) < (2, 13):
        _free_ended_groups()


def _free_ended_groups() -> None:
    """Remove destroyed groups from all meshes, since a group keeps its threads while a mesh refers to it."""
    # Up to torch 2.12, the cache in C++ keeps its meshes alive even after it was cleared.
    for mesh in gc.get_objects():
        if type(mesh) is DeviceMesh:
            groups: dict[str, dist.ProcessGroup] = getattr(mesh, "_pg_registry", {})
            for name, group in list(groups.items()):
                if group not in distributed_c10d._world.pg_map:
                    del groups[name]


# ---- mesh


@dataclass(frozen=True)
class ProcessMesh:
    """A process group laid out by a :class:`Topology`, with a subgroup for each hop; None for a hop of one rank.

    ``by_links`` says whether the machine's links determine the node size, instead of an argument or the launcher.
    """

    topology: Topology
    rank: int
    intra: dist.ProcessGroup | None
    inter: dist.ProcessGroup | None
    group: dist.ProcessGroup | None = None
    # Equality ignores it, since hops are the same whatever determines the node size.
    by_links: bool = field(default=False, compare=False)

    def own_node(self) -> ProcessMesh:
        gpus = self.topology.gpus_per_node
        return ProcessMesh(Topology(gpus, gpus), self.rank % gpus, self.intra, None, self.intra)

    def is_within(self, ranks: Collection[int]) -> bool:
        """Return whether all ranks of this mesh are among ``ranks``, which are global."""
        if self.group is None:
            return dist.get_rank() in ranks
        try:
            return set(dist.get_process_group_ranks(self.group)) <= set(ranks)
        except KeyError:  # torch raises it for a group that was destroyed
            return False

    def across_nodes(self) -> ProcessMesh:
        """Return a mesh of the ranks that have this rank's index on their nodes; each counts as a node."""
        nodes, gpus = self.topology.nodes, self.topology.gpus_per_node
        return ProcessMesh(Topology(nodes, 1), self.rank // gpus, None, self.inter, self.inter)


_Subgroup = dist.ProcessGroup | Literal["whole"] | None
"""A hop's group; ``whole`` stands for the parent group, since a reference to the parent would keep it alive."""
# A group's subgroups are made once, however many layers ask for them.
_own_ranks: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
_twins: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
_subgroups: WeakKeyDictionary[dist.ProcessGroup, dict[int, tuple[_Subgroup, _Subgroup]]] = WeakKeyDictionary()
# For each default group, parent groups and their subgroups: torch keeps a group until it is destroyed explicitly.
_made_of: WeakKeyDictionary[dist.ProcessGroup, list[tuple[ref[dist.ProcessGroup], dist.ProcessGroup]]]
_made_of = WeakKeyDictionary()
# Each group's layouts by the launcher's node size: they depend on all ranks, too many to look at for every unit.
_layouts: WeakKeyDictionary[dist.ProcessGroup, dict[int, Topology]] = WeakKeyDictionary()


def process_mesh(group: dist.ProcessGroup, gpus_per_node: int | None = None) -> ProcessMesh:
    """Return the mesh of ``group``; the first call for each layout makes its subgroups. Collective over ``group``.

    Args:
        group: A process group; each rank must be a member.
        gpus_per_node: Consecutive ranks of ``group`` that share a node; None takes it from the launcher.

    Raises:
        ValueError: If the layout is not possible, before any communication. Some ranks may raise while others do not.
    """
    return mesh_on(group, topology_of(group, gpus_per_node))


def mesh_on(group: dist.ProcessGroup, topology: Topology, *, by_links: bool = False) -> ProcessMesh:
    """Return the mesh of ``group`` with this layout, as :func:`process_mesh` does; see :class:`ProcessMesh`."""
    if group not in _subgroups:
        forget_equal_meshes()  # see [Note: Names of groups]
    hops = _subgroups.setdefault(group, {})
    if topology.gpus_per_node not in hops:
        _destroy_orphans()
        intra = _subgroup(group, topology.intra_partition())
        inter = _subgroup(group, topology.inter_partition())
        hops[topology.gpus_per_node] = intra, inter
        _remember(group, intra, inter)
    intra, inter = (group if hop == "whole" else hop for hop in hops[topology.gpus_per_node])
    return ProcessMesh(topology, dist.get_rank(group), intra, inter, group, by_links)


def as_launched(mesh: ProcessMesh) -> ProcessMesh:
    """Return ``mesh``, with the launcher's nodes if links determine its own. See [Note: Links] in strategy.py."""
    return process_mesh(mesh.group) if mesh.by_links and mesh.group is not None else mesh


def own_rank() -> dist.ProcessGroup:
    """Return a group of this rank alone, made at the first call."""
    world = dist.group.WORLD
    assert world is not None
    if world not in _own_ranks:
        # Each rank makes its own group alone: otherwise all ranks would take part in making a group for each rank.
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
    """Return the number of ranks per node, given each rank's node; None if it differs or nodes are out of order."""
    sizes = set(Counter(nodes).values())
    return sizes.pop() if len(sizes) == 1 and list(nodes) == sorted(nodes) else None


def twin_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return another group of the same ranks, for code of torch that compares groups. Collective at the first call."""
    if group not in _twins:
        _destroy_orphans()
        with named_by_ranks():
            _twins[group] = _made_by_members(group, [list(range(dist.get_world_size(group)))])
        _remember(group, _twins[group])
    return _twins[group]


def with_own_hop(mesh: ProcessMesh) -> ProcessMesh:
    """Return ``mesh``, with a twin as the inter-node hop if that is ``mesh.group``. Collective at the first call."""
    # An exchange over the twin leaves ``mesh.group`` free, so ranks can compare arguments over it meanwhile.
    return replace(mesh, inter=twin_of(mesh.group)) if mesh.group and mesh.group is mesh.inter else mesh


def _subgroup(group: dist.ProcessGroup, partition: list[list[int]]) -> _Subgroup:
    if len(partition[0]) == 1:
        return None
    if len(partition) == 1:
        return "whole"
    # By default, torch needs all ranks of the job to make a group, members or not. If ``group`` is a part of the job
    # (data parallel with tensor parallel), other ranks do not take part, so its own ranks make the subgroups alone.
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
    """Note ``subgroups``, to destroy them after their parent; torch itself destroys those of the default group."""
    world = dist.group.WORLD
    if world is not None and parent is not world:
        remembered = _made_of.setdefault(world, [])
        remembered += [(ref(parent), subgroup) for subgroup in subgroups if isinstance(subgroup, dist.ProcessGroup)]


def _destroy_orphans() -> None:
    # A finalizer of the parent group can't do this: finalizers run at different times on each rank, but all ranks of an
    # NCCL communicator must destroy it together.
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
    """Return the timeout of ``group``'s collectives, for its subgroups; None if its backend has none."""
    device = torch.device("cuda") if "nccl" in dist.get_backend(group) else torch.device("cpu")
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None
