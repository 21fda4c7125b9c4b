"""Reads an HSDP mesh as a strategy does: as nodes x ranks of a node.

torch replicates along the first dimension of a 2-D mesh and shards along the second. A strategy shards over all of its
ranks, as far as its scopes say, and takes the second dimension for a node.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch.distributed.device_mesh import DeviceMesh

from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.runtime.rank_layout import launched_node_size

from ._torch_mesh import flattened


def read_hsdp_mesh(
    strategy: Strategy, mesh: DeviceMesh, replicate: tuple[str, ...], shard: tuple[str, ...]
) -> tuple[Strategy, DeviceMesh]:
    """Read the data-parallel dimensions of ``mesh`` as nodes x ranks of a node. Collective at the first call for them.

    Args:
        strategy: The strategy.
        mesh: A mesh with names.
        replicate: The dimensions along which nodes lie.
        shard: Those along which a node's ranks lie.

    Returns:
        The strategy with the size of these nodes, and the 1-D mesh of all data-parallel ranks.

    Raises:
        ValueError: If the strategy shards over all ranks and encodes nothing, or if its ``gpus_per_node``, or else
            torchrun's, is not the size of these nodes.
    """
    check_shards_part(strategy, mesh)
    names = mesh.mesh_dim_names or ()
    ranks = flattened(mesh, tuple(name for name in names if name in (*replicate, *shard)))
    size = math.prod(mesh.size(names.index(name)) for name in shard)
    shape = dict(zip(names, mesh.shape, strict=True))
    if strategy.gpus_per_node is not None and strategy.gpus_per_node != size:
        raise ValueError(
            f"mesh {shape} has nodes of {size} ranks, along {' and '.join(shard)}, but the strategy has "
            f"gpus_per_node={strategy.gpus_per_node}; leave one out: pass the 1-D mesh of all data-parallel ranks, or "
            "no gpus_per_node"
        )
    launched = launched_node_size(ranks.get_group())
    if strategy.gpus_per_node is None and isinstance(launched, int) and launched != size:
        raise ValueError(
            f"mesh {shape} has nodes of {size} ranks, along {' and '.join(shard)}, but {launched} of its ranks run on "
            f"each node; pass gpus_per_node={size} to the strategy as well if that is meant, or the 1-D mesh of all "
            "data-parallel ranks"
        )
    return replace(strategy, gpus_per_node=size), ranks


def check_shards_part(strategy: Strategy, mesh: DeviceMesh) -> None:
    """Raise if ``strategy`` is FULL_SHARD itself, which contradicts an HSDP mesh.

    Raises:
        ValueError: If it is.
    """
    if strategy.is_plain:
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}, as HSDP takes it, but {strategy.levels!r} shards "
            "over all ranks; use Strategy('III') for HSDP, or pass the 1-D mesh of all ranks to shard over"
        )
