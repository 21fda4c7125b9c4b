"""Private names of torch's fully_shard: in which order parameters of a group follow one another in flat tensors.

Small ones are last: among the others they would shift these, so that blocks straddled two of them. The others begin
with those that another parallelism shards least. See the notes in exact_places.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from fsdp_zpp.collectives.exact_places import sent_exactly
from fsdp_zpp.collectives.flat_layout import FlatLayout, Piece


def order_parameters(group: FSDPParamGroup) -> None:
    """Sort the parameters of a group that has not been used yet."""
    small = _small_parameters(group)

    def place(param: FSDPParam) -> tuple[bool, int, tuple[str, ...]]:
        axes = _sharded_along(param)
        return param in small, len(axes), axes

    group.fsdp_params = sorted(group.fsdp_params, key=place)


def layout_of(group: FSDPParamGroup, params: Sequence[FSDPParam], places: Sequence[int]) -> FlatLayout:
    """Return the layout of a rank's part of a flat tensor that consists of ``params``, which have these places in all.

    Args:
        group: Their group, initialized lazily.
        params: Parameters in the order of the flat tensor.
        places: The place of each among all of the group's.
    """
    names = [param._param_fqn or "" for param in params]
    small = {param._param_fqn or "" for param in _small_parameters(group)}
    axes = {name: _sharded_along(param) for name, param in zip(names, params, strict=True)}
    numels = [param._sharded_param_data.numel() for param in params]
    return FlatLayout.dense(map(Piece, places, names, numels), small, axes)


def _small_parameters(group: FSDPParamGroup) -> set[FSDPParam]:
    """Return the parameters that codecs leave as they are."""
    params = group.fsdp_params
    exact = sent_exactly([param._orig_size for param in params])
    return {param for param, is_exact in zip(params, exact, strict=True) if is_exact}


def _sharded_along(param: FSDPParam) -> tuple[str, ...]:
    """Return the dimensions of its mesh along which a parameter is sharded, by FSDP or another parallelism."""
    sharded: Any = param.sharded_param
    names = sharded.device_mesh.mesh_dim_names or ("",)
    pairs = zip(names, sharded.placements, strict=True)
    return tuple(name for name, placement in pairs if not placement.is_replicate())
