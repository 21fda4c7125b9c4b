"""Finds the parameters of a model that FSDP has sharded, which can't be quantized any more.

``fully_shard`` makes a parameter a ``DTensor``. ``FullyShardedDataParallel`` flattens parameters: with
``use_orig_params=True`` modules keep them, in another shape; otherwise they show one flat parameter in their place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import _is_fsdp_flattened as is_flattened
from torch.distributed.tensor import DTensor

Shown = dict[str, tuple[nn.Parameter, torch.Size]]
"""Parameters by their names in a module, with the shapes that they had before they were sharded."""


def sharded_parameters(model: nn.Module) -> dict[nn.Module, Shown]:
    """Return the sharded parameters of each module below ``model``, tied ones under each of their names.

    What ``FullyShardedDataParallel`` shows in place of several parameters is returned for each of them.
    """
    flattened = _flattened_parameters(model)
    return {
        module: {
            name: (parameter, parameter.shape)
            for name, parameter in module._parameters.items()
            if isinstance(parameter, DTensor) or (parameter is not None and is_flattened(parameter))
        }
        | flattened.get(module, {})
        for module in model.modules()
    }


def _flattened_parameters(model: nn.Module) -> dict[nn.Module, Shown]:
    """Return the parameters that instances below ``model`` have flattened; modules may not show them at the moment."""
    parameters: dict[nn.Module, Shown] = {}
    instances: list[Any] = FullyShardedDataParallel.fsdp_modules(model)
    for instance in instances:
        if (flat := instance._flat_param) is None:
            continue
        shown = flat._params or [flat] * len(flat._param_infos)
        for info, shape, parameter in zip(flat._param_infos, flat._shapes, shown, strict=True):
            parameters.setdefault(info.module, {})[info.param_name] = parameter, shape
        for info in flat._shared_param_infos:
            first = parameters[info.prim_module][info.prim_param_name]
            parameters.setdefault(info.module, {})[info.param_name] = first
    return parameters
