"""Private names of torch's flat parameters: how modules show views of them in place of their parameters."""

from __future__ import annotations

import os
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from fsdp_zpp.torch_internals import Needed, check_needed

from ._torch import FlatParamHandle

_HANDLE = "torch.distributed.fsdp._flat_param.FlatParamHandle"
_NEEDED = (
    Needed("torch.distributed.fsdp._flat_param", "FlatParamHandle", "showing views in place of parameters"),
    Needed(_HANDLE, "_setattr_tensor _setattr_param flat_param", "the same"),
    Needed("torch.distributed.fsdp._flat_param.FlatParameter", "_param_infos _shared_param_infos", "the same"),
    Needed("torch.nn.Module", "_parameters", "the same"),
    Needed("torch.nn.modules.module", "_global_parameter_registration_hooks", "the same"),
)
check_needed("adapter for FullyShardedDataParallel", _NEEDED)


def show_views_directly(handle: FlatParamHandle) -> None:
    """Have a handle put parameters and views where its modules look for them, if ``setattr`` would do nothing else.

    ``delattr`` and ``setattr``, which torch goes through for each parameter four times a step, take a tenth of all the
    time that Python takes for FSDP.
    """
    flat_param: Any = handle.flat_param
    modules = {info.module for info in chain(flat_param._param_infos, flat_param._shared_param_infos)}
    chosen_by_user = "FSDP_USE_UNSAFE_SETATTR" in os.environ  # torch's variable, for a way of its own
    if all(map(_is_plain, modules)) and not chosen_by_user:
        handle._setattr_tensor, handle._setattr_param = _show_tensor, _show_parameter


def _is_plain(module: nn.Module) -> bool:
    kind = type(module)
    methods = ("__setattr__", "__delattr__", "register_parameter")
    return all(getattr(kind, name) is getattr(nn.Module, name) for name in methods)


def _show_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    module._parameters.pop(name, None)
    module.__dict__[name] = tensor


def _show_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module.__dict__.pop(name, None)
    module._parameters.pop(name, None)  # so that it goes last, as with setattr
    if torch_module._global_parameter_registration_hooks:
        module.register_parameter(name, parameter)
    else:
        module._parameters[name] = parameter
