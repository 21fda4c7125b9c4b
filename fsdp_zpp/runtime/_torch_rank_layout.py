"""Ranks that share a node, and torch's meshes of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_init

from fsdp_zpp.comm.agreement import agree
from fsdp_zpp.comm.mesh import ProcessMesh, launcher_variables, mesh_on, tells_node_size, topology_of, twin_of
from fsdp_zpp.strategy.error_feedback import Topology
from fsdp_zpp.strategy.strategy import Strategy

from .links import known_links, supports_link_query

# ---- layout of a strategy's ranks on nodes


@dataclass(frozen=True)
class RankLayout:
    """The ranks that a call shards over, and their nodes; for ``by_links`` see [Note: Links] in strategy.py.

    ``stock`` says that fully_shard leaves everything to torch, since the strategy asks for torch's own FULL_SHARD.
    """

    group: dist.ProcessGroup
    topology: Topology
    stock: bool
    by_links: bool = False

    @classmethod
    def of(cls, strategy: Strategy, group: dist.ProcessGroup) -> RankLayout:
        """Return the layout of ``group``, without communication, or raise the errors of :func:`topology_of`."""
        # joined_by_links() knows links only after a call of find_links().
        topology = topology_of(group, node_size(strategy, group))
        if strategy.gpus_per_node is None and strategy.follows_links:
            joined = joined_by_links(group)
            if joined is not None:
                return cls(group, joined, stock=False, by_links=True)
        return cls(group, topology, stock=topology.nodes == 1 and strategy.is_plain)

    def mesh(self) -> ProcessMesh:
        return mesh_on(self.group, self.topology, by_links=self.by_links)


def joined_by_links(group: dist.ProcessGroup) -> Topology | None:
    """Return the layout of ``group`` on nodes with fast links; None if links are unknown or leave it as launched."""
    links = known_links(group)
    if links is None or links.node_size is None or links.launched.nodes > 1 or not links.are_slow:
        return None
    return Topology(links.launched.world, links.node_size)


def node_size(strategy: Strategy, group: dist.ProcessGroup) -> int | None:
    """Return the node size of ``strategy`` on ``group``; None leaves it to the launcher."""
    # A plain strategy does the same on any layout, so it must not fail if nothing tells the layout. All ranks then
    # count as one node, and torch's own collectives do the work.
    if strategy.gpus_per_node is None and strategy.is_plain and not tells_node_size():
        return dist.get_world_size(group)
    return strategy.gpus_per_node


def node_size_fact(given: int | None, group: dist.ProcessGroup) -> object:
    """Return the node size for ranks to compare: ``given`` or, if None, as launched; marked if links can be queried."""
    if given is not None:
        return given
    # Launched sizes may differ. The mark sets them apart from equal sizes that are given, since only ranks that pass
    # none query links, which is collective.
    launched = launched_node_size(group)
    return f"{launched} (as launched)" if isinstance(launched, int) and supports_link_query(group) else launched


def launched_node_size(group: dist.ProcessGroup) -> object:
    """Return ``gpus_per_node`` as launched, or the launcher's variables as text if they give no layout."""
    try:
        return topology_of(group).gpus_per_node
    except ValueError:  # if only some ranks raised, the others would hang: callers compare the text
        return launcher_variables()


# ---- the parts of a device mesh that a strategy shards over


def flattened(mesh: DeviceMesh, dims: tuple[str, ...]) -> DeviceMesh:
    """Return the 1-D mesh over ``dims`` of ``mesh``. The first call for these is collective over the root mesh."""
    part = mesh if dims == mesh.mesh_dim_names else mesh[dims]
    return part if part.ndim == 1 else part._flatten()


def is_part(mesh: DeviceMesh) -> bool:
    """Return whether ``mesh`` is a part of a larger one, which other parallelisms may shard over."""
    return mesh._get_root_mesh() is not mesh


def mesh_over(group: dist.ProcessGroup, mesh: DeviceMesh) -> DeviceMesh:
    """Make a 1-D mesh over ``group``, consecutive ranks of the 1-D ``mesh``; in its root mesh if ``mesh`` is a part."""
    # torch joins a parameter's data-parallel mesh with another parallelism's only if both are parts of one mesh.
    return _part_of(mesh, group) if is_part(mesh) else DeviceMesh.from_group(group, mesh.device_type)


def _part_of(mesh: DeviceMesh, group: dist.ProcessGroup) -> DeviceMesh:
    size = dist.get_world_size(group)
    # _unflatten of a mesh with process groups makes new groups, which is collective over the root mesh. Other stages of
    # a pipeline don't make this call, so unflatten a copy without groups.
    bare: Any = copy.copy(mesh)
    del bare._dim_group_names
    (name,) = mesh.mesh_dim_names or ()
    parts = bare._unflatten(0, (mesh.size() // size, size), (f"{name}_parts", f"{name}_part"))
    parts._dim_group_names = [mesh.get_group().group_name, group.group_name]
    registry = getattr(mesh._get_root_mesh(), "_pg_registry", None)  # from torch 2.13 on, for compiled functions
    if registry is not None:
        registry[group.group_name] = group
    part: DeviceMesh = parts[f"{name}_part"]
    return part


# ---- meshes that a ``shard_placement_fn`` gives: torch makes a parameter group for each

_RESULT: Any = getattr(_fsdp_common, "ShardPlacementResult", None)  # from torch 2.12 on
MeshInfo = _fsdp_common.FSDPMeshInfo
_mesh_info: Any = _fsdp_init._get_mesh_info
_init_default_mesh: Any = _fsdp_init._init_default_mesh


def takes_mesh_per_parameter() -> bool:
    """Return whether this torch can shard parameters of one module over different meshes."""
    return _RESULT is not None


def placement_and_mesh(result: object) -> tuple[object, MeshInfo | None]:
    """Return the placement in the ``result`` of a ``shard_placement_fn``, and its mesh; None if it gives no mesh."""
    if _RESULT is not None and isinstance(result, _RESULT):
        return result.placement, result.mesh_info
    return result, None


def arguments_of(info: MeshInfo) -> dict[str, Any]:
    """Return the arguments ``mesh`` and ``dp_mesh_dims`` of ``fully_shard`` for a parameter's mesh."""
    if info.is_spmd_mesh:
        return {"mesh": info.spmd_mesh, "dp_mesh_dims": info.dp_mesh_dims}
    return {"mesh": info.mesh, "dp_mesh_dims": None}


def info_on_spmd_mesh(ranks: DeviceMesh, mesh: DeviceMesh, replicate: Sequence[str], dims: Any) -> MeshInfo:
    """Return the mesh info of parameters that are sharded over ``ranks``, with replicas along ``replicate``.

    Parameters stay DTensors on the whole SPMD mesh, and torch leaves gradients partial along data-parallel dimensions.
    """
    shard = tuple(name for name in dims.shard_names if name not in replicate)
    own = replace(dims, shard=shard or None, replicate=tuple(replicate) or None)
    make: Any = MeshInfo  # takes these arguments from torch 2.12 on
    info: MeshInfo = make(ranks, shard_mesh_dim=0, dp_mesh_dims=own, spmd_mesh=mesh)
    return info


def mesh_infos(calls: Iterable[tuple[Mapping[str, Any], MeshInfo | None]]) -> list[MeshInfo]:
    """Return a mesh info for each pair in ``calls``: the given one or, if None, that of the arguments. Collective."""
    # torch tells parameter groups of a module apart by their meshes' process groups, so each needs one of its own.
    infos: list[MeshInfo] = []
    used: set[dist.ProcessGroup] = set()
    for arguments, given in calls:
        mesh, dims = arguments["mesh"], arguments.get("dp_mesh_dims")
        info = given or _mesh_info(_init_default_mesh() if mesh is None else mesh, *(() if dims is None else (dims,)))
        # Replace the process group, not the mesh: torch clips gradients together only on one mesh.
        while info.shard_process_group in used:
            info.shard_process_group = twin_of(info.shard_process_group)
        used.add(info.shard_process_group)
        infos.append(info)
    return infos


def placing(
    infos: Sequence[MeshInfo], placements: Sequence[Mapping[nn.Parameter, object]]
) -> Callable[[nn.Parameter], object]:
    results: dict[nn.Parameter, object] = {}
    for info, placed in zip(infos, placements, strict=True):
        results |= {parameter: _RESULT(placement, info) for parameter, placement in placed.items()}
    return results.__getitem__


# ---- the mesh that ``fully_shard`` is given


@dataclass(frozen=True)
class DataParallelMesh:
    """Ranks over which a strategy shards, and the strategy on them."""

    strategy: Strategy  # with the node size of an HSDP mesh; anything but a Strategy stays as given
    mesh: DeviceMesh | None  # of one dimension, or as given if it is left to torch; None for all ranks
    group: dist.ProcessGroup
    # True if ranks compare their arguments; False if a mesh of several dimensions is left to torch.
    compared: bool


def read_mesh(strategy: Strategy, arguments: dict[str, Any]) -> DataParallelMesh:
    """Read ``mesh`` and ``dp_mesh_dims`` from ``arguments``, and set them to what torch shards over."""
    mesh, dims = arguments["mesh"], arguments.get("dp_mesh_dims")
    if isinstance(mesh, DeviceMesh) and isinstance(strategy, Strategy):
        if dims is not None:
            strategy, mesh = _read_spmd_mesh(strategy, mesh, dims, arguments)
        elif (read := read_2d_mesh(strategy, mesh)) is not None:
            strategy, mesh = read
            arguments["mesh"] = mesh
    if mesh is None and not dist.is_initialized():
        dist.init_process_group()  # as torch would have done
    has_one_dimension = mesh is None or getattr(mesh, "ndim", None) == 1
    group = mesh.get_group() if mesh is not None and has_one_dimension else dist.group.WORLD
    assert group is not None
    return DataParallelMesh(strategy, mesh, group, has_one_dimension)


def _read_spmd_mesh(
    strategy: Strategy, mesh: DeviceMesh, dims: Any, arguments: dict[str, Any]
) -> tuple[Strategy, DeviceMesh]:
    names = data_parallel_names(mesh, dims)
    if dims.replicate_names and dims.shard_names:
        read = read_hsdp_mesh(strategy, mesh, dims.replicate_names, dims.shard_names)
    else:
        read = strategy, flattened(mesh, names)
    # Launched node sizes may differ, so that only some ranks raise or leave the mesh to torch.
    if read is None or agree(
        group := read[1].get_group(), lambda: RankLayout.of(read[0], group).stock, str, "found another layout than"
    ):
        return strategy, mesh
    arguments["dp_mesh_dims"] = replace(dims, shard=names, replicate=None)
    return read


def names_of_node(mesh: DeviceMesh, names: tuple[str, ...], gpus_per_node: int) -> tuple[str, ...] | None:
    """Return the last of the dimensions ``names`` that together span a node; None if a node ends within one."""
    dims = mesh.mesh_dim_names or ()
    for first in range(len(names), -1, -1):
        if math.prod(mesh.size(dims.index(name)) for name in names[first:]) == gpus_per_node:
            return names[first:]
    return None


def data_parallel_names(mesh: DeviceMesh, dims: Any) -> tuple[str, ...]:
    """Return the data-parallel dimensions of an SPMD mesh, in its order; ``dims`` is torch's DataParallelMeshDims."""
    given = {*dims.replicate_names, *dims.shard_names}
    return tuple(name for name in mesh.mesh_dim_names or () if name in given)


# ---- HSDP meshes, read as nodes x ranks of a node
#
# torch replicates along the first dimension of a 2-D mesh and shards along the second. A strategy takes the second
# dimension for a node; its scopes say what it shards over a node and what over all ranks.


def read_2d_mesh(strategy: Strategy, mesh: DeviceMesh) -> tuple[Strategy, DeviceMesh] | None:
    """Read a mesh of two named dimensions by :func:`read_hsdp_mesh`, as nodes x ranks; None for any other mesh."""
    if mesh.ndim != 2 or mesh.mesh_dim_names is None:
        return None
    return read_hsdp_mesh(strategy, mesh, mesh.mesh_dim_names[:1], mesh.mesh_dim_names[1:])


def read_hsdp_mesh(
    strategy: Strategy, mesh: DeviceMesh, replicate: tuple[str, ...], shard: tuple[str, ...]
) -> tuple[Strategy, DeviceMesh] | None:
    """Read the data-parallel dimensions of ``mesh`` as nodes x ranks of a node. Collective over ``mesh``.

    Returns the strategy with the size of these nodes, and the 1-D mesh of all data-parallel ranks; None for FULL_SHARD
    on one node, which is left to torch.

    Raises:
        ValueError: If the strategy is FULL_SHARD on several nodes; if its ``gpus_per_node``, or by default the
            launcher's, is not the mesh's; or if ranks read different sizes.
    """
    names = mesh.mesh_dim_names or ()
    ranks = flattened(mesh, tuple(name for name in names if name in (*replicate, *shard)))
    group = ranks.get_group()
    if not is_part(mesh) and len(names) == len(replicate) + len(shard):
        ranks = DeviceMesh.from_group(group, mesh.device_type)  # there is no other parallelism
    node_size = agree(
        group,
        partial(_node_size, strategy, mesh, shard, group),
        summary=str,
        difference="read another size of nodes from the mesh than",
    )
    return None if node_size is None else (replace(strategy, gpus_per_node=node_size), ranks)


def _node_size(strategy: Strategy, mesh: DeviceMesh, shard: tuple[str, ...], group: dist.ProcessGroup) -> int | None:
    names = mesh.mesh_dim_names or ()
    if strategy.is_plain:
        if RankLayout.of(strategy, group).stock:
            return None
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions {names}, as HSDP takes it, but {strategy.levels!r} shards over all "
            "ranks; use Strategy('III') for HSDP, or pass the 1-D mesh of all ranks to shard over"
        )
    size = math.prod(mesh.size(names.index(name)) for name in shard)
    shape = dict(zip(names, mesh.shape, strict=True))
    if strategy.gpus_per_node is not None and strategy.gpus_per_node != size:
        raise ValueError(
            f"mesh {shape} has nodes of {size} ranks, along {' and '.join(shard)}, but the strategy has "
            f"gpus_per_node={strategy.gpus_per_node}; leave one out: pass the 1-D mesh of all data-parallel ranks, or "
            "no gpus_per_node"
        )
    launched = launched_node_size(group)
    if strategy.gpus_per_node is None and isinstance(launched, int) and launched != size:
        raise ValueError(
            f"mesh {shape} has nodes of {size} ranks, along {' and '.join(shard)}, but {launched} of its ranks run on "
            f"each node; pass gpus_per_node={size} to the strategy as well if that is meant, or the 1-D mesh of all "
            "data-parallel ranks"
        )
    return size
