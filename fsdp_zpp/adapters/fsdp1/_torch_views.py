"""Private names of torch's flat parameters: the views that modules show in place of parameters.

torch makes the views of a unit anew whenever it unshards or reshards it, four times a step, though nearly always they
are the same. That takes a fifth of the time that Python spends in FSDP. Here the views of the shard are made once, and
those of what was gathered once a forward. They are kept until something moves or replaces what they are views of; until
then, modules only switch between the two.
"""

from __future__ import annotations

import operator
import os
from itertools import repeat

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ._torch import FlatParamHandle


class ParameterViews:
    """Shows views on modules in place of a unit's parameters, in fewer steps than torch.

    Args:
        handle: The flat parameter's handle.

    Attributes:
        are_direct: Whether ``setattr`` would put parameters and views where modules look for them, and do nothing else.
    """

    def __init__(self, handle: FlatParamHandle) -> None:
        self._handle = handle
        self._of_shard: ShardViews | None = None
        self.are_direct = _can_set_directly(handle)

    def drop(self) -> None:
        """Drop the views, because parameters or the shard were moved or replaced; torch makes them anew."""
        self._of_shard = None

    # ---- while the unit is sharded, parameters are views of the shard

    def show_shard(self) -> bool:
        """Let modules show views of the shard, if those of the last time hold; return whether they do."""
        views = self._of_shard
        if views is None or self._handle.flat_param.data_ptr() != views.address or not views.hold():
            return False
        views.show()
        return True

    def keep(self) -> None:
        """Keep the views of the shard that torch has just made, for the next time."""
        handle = self._handle
        may_last = (
            self.are_direct
            and handle.uses_sharded_strategy
            and not handle._skip_writeback_check
            and not handle.flat_param._shared_param_infos
            and not torch.is_inference_mode_enabled()  # whose tensors can't be trained
        )
        self._of_shard = ShardViews(handle) if may_last else None

    def are_written_back(self) -> bool:
        """Return whether parameters still are the views of the shard, so that nothing is to be copied to it."""
        flat_param, views = self._handle.flat_param, self._of_shard
        if views is None or flat_param.data_ptr() != views.address:
            return False
        if not (views.hold() and views.are_shown()):
            self.drop()  # before torch looks at what was changed, for it may refuse that
            return False
        return flat_param.grad is None and views.have_no_gradient()

    # ---- while it is unsharded, modules show views of what was gathered

    def show_forward_views(self) -> bool:
        """Let modules show the views that the forward has saved, if they are views of what is gathered now.

        They are, unless a user gave parameters other values: between forward and backward, torch frees the memory and
        allocates it again under the same tensors.

        Returns:
            Whether modules show them.
        """
        flat_param = self._handle.flat_param
        if not self.are_direct or not self._handle._use_orig_params or flat_param._shared_param_infos:
            return False
        views = flat_param._tensors or []
        memory = {0 if view is None else view.untyped_storage().data_ptr() for view in views}
        if memory != {flat_param.untyped_storage().data_ptr()}:
            return False
        for (name, module, _), view in zip(flat_param._param_infos, views, strict=True):
            assert view is not None
            set_tensor(module, name, view)
        return True

    @property
    def are_shown(self) -> bool:
        """Tell whether modules show views of the flat parameter, in place of the parameters."""
        flat_param = self._handle.flat_param
        if not self._handle._use_orig_params:
            return True
        shown = (getattr(module, name, None) for name, module, _ in flat_param._param_infos)
        return any(now is not p for now, p in zip(shown, flat_param._params or (), strict=True))


class ShardViews:
    """A unit's parameters as views of its shard; empty, if this rank has nothing of them.

    Checks over all parameters use lists, for a generator's frame costs more than most checks.

    Args:
        handle: The flat parameter's handle, for which torch has just made the views.

    Attributes:
        address: The shard's address.
    """

    def __init__(self, handle: FlatParamHandle) -> None:
        flat_param = handle.flat_param
        self.address = flat_param.data_ptr()
        self._sites = [(module, name) for name, module, _ in flat_param._param_infos]
        self._parameters = list(flat_param._params or ())
        self._addresses = [parameter.data_ptr() for parameter in self._parameters]
        self._shapes = [parameter.shape for parameter in self._parameters]

    def hold(self) -> bool:
        """Return whether the parameters still are these views."""
        # Views keep their memory, so what has their addresses is that memory.
        same_memory = [parameter.data_ptr() for parameter in self._parameters] == self._addresses
        return same_memory and [parameter.shape for parameter in self._parameters] == self._shapes

    def are_shown(self) -> bool:
        """Return whether modules have these parameters."""
        shown = [module._parameters.get(name) for module, name in self._sites]
        return all(map(operator.is_, shown, self._parameters))

    def have_no_gradient(self) -> bool:
        """Return whether no parameter has a gradient."""
        return all(map(operator.is_, [parameter.grad for parameter in self._parameters], repeat(None)))

    def show(self) -> None:
        """Let modules show the parameters."""
        for (module, name), parameter in zip(self._sites, self._parameters, strict=True):
            set_parameter(module, name, parameter)


def _can_set_directly(handle: FlatParamHandle) -> bool:
    """Return whether ``setattr`` would do no more on modules than :func:`set_tensor` and :func:`set_parameter`."""
    flat_param = handle.flat_param
    kinds = {type(info.module) for info in flat_param._param_infos}
    kinds |= {type(info.module) for info in flat_param._shared_param_infos}
    torch_does = os.environ.get("FSDP_USE_UNSAFE_SETATTR") == "1"  # much the same
    return (
        handle._fsdp_extension is None
        and not torch_does
        and all(
            getattr(kind, method) is getattr(nn.Module, method)
            for kind in kinds
            for method in ("__setattr__", "__delattr__", "register_parameter")
        )
    )


def set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Set a tensor on a module in place of a parameter."""
    module._parameters.pop(name, None)
    module.__dict__[name] = tensor


def set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Set a parameter on a module in place of a tensor."""
    module.__dict__.pop(name, None)
    module._parameters.pop(name, None)  # so that it goes last, as with setattr
    if torch_module._global_parameter_registration_hooks:
        module.register_parameter(name, parameter)
    else:
        module._parameters[name] = parameter
