"""Private names of torch's fully_shard: in which order parameters of a group follow one another in flat tensors.

Small ones are last: among the others they would shift these, so that blocks straddled two of them. The others begin
with those that another parallelism shards least. See the notes in exact_places.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from fsdp_zpp.adapters._torch_mesh import sharded_along
from fsdp_zpp.collectives.exact_places import sent_exactly
from fsdp_zpp.collectives.flat_layout import FlatLayout, Piece


def order_parameters(group: FSDPParamGroup) -> None:
    """Sort the parameters of a group that has not been used yet."""
    params = group.fsdp_params
    axes = [axes_of(param) for param in params]
    exact = sent_exactly([param._orig_size for param in params])
    keys = [(is_exact, len(along), along) for is_exact, along in zip(exact, axes, strict=True)]
    group.fsdp_params = [params[place] for place in sorted(range(len(params)), key=keys.__getitem__)]


def layout_of(group: FSDPParamGroup, params: Sequence[FSDPParam], places: Sequence[int]) -> FlatLayout:
    """Return the layout of a rank's part of a flat tensor that consists of ``params``.

    Args:
        group: Their group, initialized lazily.
        params: Parameters in the order of the flat tensor.
        places: The place of each among all parameters of the group.
    """
    pieces = [
        Piece(place, param._param_fqn or "", param._sharded_param_data.numel())
        for place, param in zip(places, params, strict=True)
    ]
    # By parameter, not by name: FQNs are not known before the first forward.
    exact = dict(zip(group.fsdp_params, sent_exactly([p._orig_size for p in group.fsdp_params]), strict=True))
    return FlatLayout.dense(pieces, [exact[param] for param in params], [axes_of(param) for param in params])


def axes_of(param: FSDPParam) -> tuple[str, ...]:
    """Return the mesh dimensions along which FSDP or another parallelism shards a parameter."""
    sharded = param.sharded_param
    assert isinstance(sharded, DTensor)
    return sharded_along(sharded.device_mesh, sharded.placements)
