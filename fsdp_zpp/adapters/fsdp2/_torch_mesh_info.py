"""Private names of torch's fully_shard: meshes of single parameters, of which torch makes a parameter group each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_init
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

from fsdp_zpp.collectives.mesh import twin_of

_RESULT: Any = getattr(_fsdp_common, "ShardPlacementResult", None)  # from torch 2.12 on
_mesh_info: Any = _fsdp_init._get_mesh_info
_init_default_mesh: Any = _fsdp_init._init_default_mesh


def takes_mesh_per_parameter() -> bool:
    """Return whether this torch can shard parameters of one module over different meshes."""
    return _RESULT is not None


def placement_and_mesh(result: object) -> tuple[object, FSDPMeshInfo | None]:
    """Return what a ``shard_placement_fn`` has returned, as a placement and a mesh of its own; None if it has none."""
    if _RESULT is not None and isinstance(result, _RESULT):
        return result.placement, result.mesh_info
    return result, None


def arguments_of(info: FSDPMeshInfo) -> dict[str, Any]:
    """Return the arguments of ``fully_shard`` that a parameter's mesh stands for: ``mesh`` and ``dp_mesh_dims``."""
    if info.is_spmd_mesh:
        return {"mesh": info.spmd_mesh, "dp_mesh_dims": info.dp_mesh_dims}
    return {"mesh": info.mesh, "dp_mesh_dims": None}


def info_on_spmd_mesh(ranks: DeviceMesh, mesh: DeviceMesh, replicate: Sequence[str], dims: Any) -> FSDPMeshInfo:
    """Return the mesh info of parameters that are sharded over a part of the data-parallel ranks of an SPMD mesh.

    Their sharded DTensors stay on the whole mesh, and torch leaves gradients along all data-parallel dimensions to what
    reduces them. Yet it gathers over ``ranks`` alone, and knows of no replicas that it would have to reduce over.

    Args:
        ranks: The 1-D mesh of the ranks to shard over.
        mesh: The SPMD mesh.
        replicate: The data-parallel dimensions that have replicas of these ranks.
        dims: torch's DataParallelMeshDims, of which ``shard`` names all data-parallel dimensions.
    """
    shard = tuple(name for name in dims.shard_names if name not in replicate)
    own = replace(dims, shard=shard or None, replicate=tuple(replicate) or None)
    make: Any = FSDPMeshInfo  # whose constructor takes these from torch 2.12 on
    info: FSDPMeshInfo = make(ranks, shard_mesh_dim=0, dp_mesh_dims=own, spmd_mesh=mesh)
    return info


def mesh_infos(calls: Iterable[tuple[Mapping[str, Any], FSDPMeshInfo | None]]) -> list[FSDPMeshInfo]:
    """Return the mesh info for each set of arguments of ``fully_shard``: torch's, or the one given with it.

    Collective over these meshes. torch tells the parameter groups of a module apart by the process groups of their
    meshes, so no two have the same.
    """
    infos: list[FSDPMeshInfo] = []
    used: set[dist.ProcessGroup] = set()
    for arguments, given in calls:
        mesh, dims = arguments["mesh"], arguments.get("dp_mesh_dims")
        info = given or _mesh_info(_init_default_mesh() if mesh is None else mesh, *(() if dims is None else (dims,)))
        # The mesh stays the same, or torch would not clip all gradients together.
        while info.shard_process_group in used:
            info.shard_process_group = twin_of(info.shard_process_group)
        used.add(info.shard_process_group)
        infos.append(info)
    return infos


def placing(
    infos: Sequence[FSDPMeshInfo], placements: Sequence[Mapping[nn.Parameter, object]]
) -> Callable[[nn.Parameter], object]:
    """Return the ``shard_placement_fn`` that shards some parameters over each of several meshes."""
    results: dict[nn.Parameter, object] = {}
    for info, placed in zip(infos, placements, strict=True):
        results |= {parameter: _RESULT(placement, info) for parameter, placement in placed.items()}
    return results.__getitem__
