"""Private names of torch's flat parameters: original parameters that were given other memory, by ``p.data = ...``.

FSDP copies them to the shard before it gathers. Whatever else reads the shard, or has parameters show it again, must
have them copied first.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp._flat_param import FlatParameter

from ._torch import FlatParamHandle
from ._torch_handle import StrategyHandle


def copy_replaced(handle: FlatParamHandle) -> None:
    """Copy the values of parameters that were replaced to the shard, from FSDP's lazy initialization on."""
    flat_param = handle.flat_param
    if not hasattr(flat_param, "_local_shard") or not _shows_parameters(flat_param):
        return
    if handle.uses_sharded_strategy:
        if isinstance(handle, StrategyHandle):  # of its own ones, torch takes care in the next forward
            handle.prepare_read()
    elif flat_param._params:
        _copy_unsharded(handle)


def _shows_parameters(flat_param: FlatParameter) -> bool:
    """Return whether modules have parameters, which torch takes away while it moves a model."""
    return all(hasattr(module, name) for name, module, _ in flat_param._param_infos)


@torch.no_grad()
def _copy_unsharded(handle: FlatParamHandle) -> None:
    """Copy as FSDP does where nothing is sharded, but no gradients: FSDP would take accumulated ones for a user's."""
    flat_param = handle.flat_param
    own = {tensor.untyped_storage().data_ptr() for tensor in (flat_param, flat_param._local_shard)}
    views = handle._get_unflat_views(flat_param._local_shard)
    for (name, module, _), view in zip(flat_param._param_infos, views, strict=True):
        shown = getattr(module, name, None)
        if isinstance(shown, nn.Parameter) and shown.untyped_storage().data_ptr() not in own:
            view.copy_(shown)
            shown.data = view
