"""Reads the mesh that ``fully_shard`` is given: the data-parallel ranks, over which a strategy shards."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_zpp.adapters._torch_mesh import flattened, name_ranks
from fsdp_zpp.adapters.hsdp_mesh import read_2d_mesh, read_hsdp_mesh
from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.runtime.rank_layout import RankLayout


@dataclass(frozen=True)
class DataParallelMesh:
    """Ranks over which a strategy shards, and the strategy on them.

    Attributes:
        strategy: The strategy, with the node size of a mesh of several dimensions. If the caller passed something else,
            that object.
        mesh: The 1-D mesh of the ranks; None for all ranks; or, if everything is left to torch, the mesh as given.
        group: The ranks.
        compared: Whether these ranks can compare their arguments. With a mesh of several dimensions that is left to
            torch they can't: torch communicates, and the unit's own ranks are not used.
    """

    strategy: Strategy
    mesh: DeviceMesh | None
    group: dist.ProcessGroup
    compared: bool


def read_mesh(strategy: Strategy, arguments: dict[str, Any]) -> DataParallelMesh:
    """Read ``mesh`` and ``dp_mesh_dims`` of a call of ``fully_shard``.

    Replaces the mesh in ``arguments`` by a 1-D one, or the dimensions of an SPMD mesh by those to shard along. Makes
    the default process group if there is none.
    """
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
    if isinstance(mesh, DeviceMesh) and has_one_dimension:
        name_ranks(group, mesh)
    return DataParallelMesh(strategy, mesh, group, has_one_dimension)


def _read_spmd_mesh(
    strategy: Strategy, mesh: DeviceMesh, dims: Any, arguments: dict[str, Any]
) -> tuple[Strategy, DeviceMesh]:
    names = data_parallel_names(mesh, dims)
    if dims.replicate_names and dims.shard_names:
        read = read_hsdp_mesh(strategy, mesh, dims.replicate_names, dims.shard_names)
    else:
        read = strategy, flattened(mesh, names)
    if read is None or RankLayout.of(read[0], read[1].get_group()).stock:
        return strategy, mesh
    arguments["dp_mesh_dims"] = replace(dims, shard=names, replicate=None)
    return read


def names_of_node(mesh: DeviceMesh, names: tuple[str, ...], gpus_per_node: int) -> tuple[str, ...] | None:
    """Return the last of the dimensions ``names`` of an SPMD mesh, along which the ranks of a node lie.

    It is None if nodes end within a dimension.
    """
    dims = mesh.mesh_dim_names or ()
    for first in range(len(names), -1, -1):
        if math.prod(mesh.size(dims.index(name)) for name in names[first:]) == gpus_per_node:
            return names[first:]
    return None


def data_parallel_names(mesh: DeviceMesh, dims: Any) -> tuple[str, ...]:
    """Return the data-parallel dimensions of an SPMD mesh, in its order; ``dims`` is torch's DataParallelMeshDims."""
    given = {*dims.replicate_names, *dims.shard_names}
    return tuple(name for name in mesh.mesh_dim_names or () if name in given)
