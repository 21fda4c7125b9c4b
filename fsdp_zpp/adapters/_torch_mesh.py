"""Private names of torch's device meshes: the parts of a mesh that a strategy shards over."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from fsdp_zpp.collectives.rank_names import name_by_axes


def flattened(mesh: DeviceMesh, dims: tuple[str, ...]) -> DeviceMesh:
    """Return the 1-D mesh over ``dims`` of ``mesh``. Collective over the root mesh at the first call for these."""
    part = mesh if dims == mesh.mesh_dim_names else mesh[dims]
    return part if part.ndim == 1 else part._flatten()


def is_part(mesh: DeviceMesh) -> bool:
    """Return whether ``mesh`` is a part of a larger one, along which other parallelisms may have sharded parameters."""
    return mesh._get_root_mesh() is not mesh


def name_ranks(group: dist.ProcessGroup, mesh: DeviceMesh) -> None:
    """Have errors name the ranks of ``group``, which ``mesh`` has, by their coordinates, if there are several axes."""
    root = mesh._get_root_mesh()
    if root.ndim > 1 and root.mesh_dim_names is not None:
        name_by_axes(group, root.mesh_dim_names, root.mesh)


def sharded_along(mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[str, ...]:
    """Return the dimensions of ``mesh``, by name, along which a tensor with these placements is sharded."""
    names = mesh.mesh_dim_names or map(str, range(mesh.ndim))
    pairs = zip(names, placements, strict=True)
    return tuple([name for name, placement in pairs if not placement.is_replicate()])


def mesh_over(group: dist.ProcessGroup, mesh: DeviceMesh) -> DeviceMesh:
    """Make the 1-D mesh over ``group``, as a dimension of the larger mesh of which ``mesh`` is a part, if it is one.

    torch joins a parameter's mesh for data parallelism with that of another parallelism only if both are parts of one.

    Args:
        group: Consecutive ranks of ``mesh``, among them this rank; their number divides that of the mesh.
        mesh: A 1-D mesh.
    """
    return _part_of(mesh, group) if is_part(mesh) else DeviceMesh.from_group(group, mesh.device_type)


def _part_of(mesh: DeviceMesh, group: dist.ProcessGroup) -> DeviceMesh:
    size = dist.get_world_size(group)
    # Without the groups of its dimension, of which torch would make new ones over all ranks of the larger mesh: a stage
    # of a pipeline can't have other stages take part in that.
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
