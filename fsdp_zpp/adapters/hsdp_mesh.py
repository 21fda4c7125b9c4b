"""Reads an HSDP mesh as a strategy does: as nodes x ranks of a node.

torch replicates along the first dimension of a 2-D mesh and shards along the second. A strategy shards over all of its
ranks, as far as its scopes say, and takes the second dimension for a node.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_zpp.collectives.agreement import agree
from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.runtime.rank_layout import RankLayout, launched_node_size

from ._torch_mesh import flattened, is_part, name_ranks


def read_2d_mesh(strategy: Strategy, mesh: DeviceMesh) -> tuple[Strategy, DeviceMesh] | None:
    """Read a mesh of two named dimensions by :func:`read_hsdp_mesh`, as nodes x ranks; None if ``mesh`` is another."""
    if mesh.ndim != 2 or mesh.mesh_dim_names is None:
        return None
    nodes, ranks = mesh.mesh_dim_names
    return read_hsdp_mesh(strategy, mesh, (nodes,), (ranks,))


def read_hsdp_mesh(
    strategy: Strategy, mesh: DeviceMesh, replicate: tuple[str, ...], shard: tuple[str, ...]
) -> tuple[Strategy, DeviceMesh] | None:
    """Read the data-parallel dimensions of ``mesh`` as nodes x ranks of a node. Collective over ``mesh``.

    Args:
        strategy: The strategy.
        mesh: A mesh with names.
        replicate: The dimensions along which nodes lie.
        shard: The dimensions along which a node's ranks lie.

    Returns:
        The strategy with the size of these nodes, and the 1-D mesh of all data-parallel ranks; None if the strategy is
        FULL_SHARD on one node, so that all may be left to torch.

    Raises:
        ValueError: If the strategy is FULL_SHARD on several nodes; if it, or torchrun where it does not say, has nodes
            of another size; or if ranks differ in that.
    """
    names = mesh.mesh_dim_names or ()
    ranks = flattened(mesh, tuple(name for name in names if name in (*replicate, *shard)))
    group = ranks.get_group()
    name_ranks(group, mesh)
    if not is_part(mesh) and len(names) == len(replicate) + len(shard):
        ranks = DeviceMesh.from_group(group, mesh.device_type)  # with no other parallelism beside it
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
