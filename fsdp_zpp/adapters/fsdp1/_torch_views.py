"""Private names of torch's flat parameters: their memory, and the views that modules show in place of parameters.

torch makes the views of a unit anew whenever it unshards or reshards it, four times a step, and nearly always they are
the same: that takes a fifth of the time that Python spends in FSDP. Here the views of the shard are made once, and
those of what was gathered once a forward. They are kept until something moves or replaces what they are views of; until
then, modules only switch between the two.
"""

from __future__ import annotations

import operator
import os
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ._torch import FlatParamHandle, HandleTrainingState, no_dispatch_record_stream


class ViewingHandle(FlatParamHandle):
    """A flat parameter's handle that shows its views as torch's does, in fewer steps."""

    _sharded_views: ShardedViews | None
    _shows_directly: bool

    def prepare_views(self) -> None:
        """Initialize the attributes of this class."""
        self._sharded_views, self._shows_directly = None, _can_show_directly(self)
        if self._shows_directly:
            self._setattr_tensor, self._setattr_param = _show_tensor, _show_parameter

    def drop_views(self) -> None:
        """Have the views made anew, because parameters or the shard were moved or replaced."""
        self._sharded_views = None

    # ---- while the unit is sharded, parameters are views of the shard

    def _use_sharded_views(self) -> None:
        flat_param: Any = self.flat_param
        views = self._sharded_views
        if views is None or not (views.are_of(flat_param) and views.hold()):
            super()._use_sharded_views()
            self._sharded_views = ShardedViews(flat_param) if self._keeps_views() else None
            return
        views.show()
        self._unsharded_flat_param_for_skipped_views = None
        if self._training_state == HandleTrainingState.BACKWARD_POST:
            flat_param._tensors[:] = [None] * len(flat_param._tensors)

    def _keeps_views(self) -> bool:
        """Whether the views of the shard are slices of it that last, and changes of parameters are looked for."""
        return (
            self._shows_directly
            and self.uses_sharded_strategy
            and not self._skip_writeback_check
            and not self.flat_param._shared_param_infos
            and not torch.is_inference_mode_enabled()  # whose tensors can't be trained
        )

    def _writeback_orig_params(self) -> bool:
        flat_param, views = self.flat_param, self._sharded_views
        if views is not None and views.are_of(flat_param):
            if not (views.hold() and views.are_shown()):
                self.drop_views()  # before torch looks at what was changed, for it may refuse that
            elif flat_param.grad is None and views.have_no_gradient():
                return False
        return super()._writeback_orig_params()

    # ---- while it is unsharded, modules show views of what was gathered

    def _use_unsharded_views(self, as_params: bool) -> None:
        flat_param: Any = self.flat_param
        if as_params:
            self.drop_views()  # parameters become views of what was gathered
        elif self._training_state == HandleTrainingState.BACKWARD_PRE and self._forwards_views_hold():
            for (name, module, _), view in zip(flat_param._param_infos, flat_param._tensors, strict=True):
                _show_tensor(module, name, view)
            return
        super()._use_unsharded_views(as_params)

    @property
    def shows_views(self) -> bool:
        """Whether modules show views of the flat parameter, in place of the parameters."""
        flat_param: Any = self.flat_param
        if not self._use_orig_params:
            return True
        shown = (getattr(module, name, None) for name, module, _ in flat_param._param_infos)
        return any(now is not p for now, p in zip(shown, flat_param._params, strict=True))

    def _forwards_views_hold(self) -> bool:
        """Whether the views that the forward has saved are views of what is gathered now.

        They are, unless a user gave them other values: between forward and backward, torch frees the memory and
        allocates it again under the same tensors.
        """
        flat_param: Any = self.flat_param
        if not self._shows_directly or not self._use_orig_params or flat_param._shared_param_infos:
            return False
        memory = {0 if view is None else view.untyped_storage().data_ptr() for view in flat_param._tensors}
        return memory == {flat_param.untyped_storage().data_ptr()}

    # ---- the memory of what is gathered

    def _alloc_padded_unsharded_flat_param(self) -> Tensor:
        unsharded = self._get_padded_unsharded_flat_param()
        unsharded.untyped_storage().resize_(unsharded.numel() * unsharded.itemsize)
        return unsharded

    def _free_unsharded_flat_param(self) -> None:
        unsharded = self._get_padded_unsharded_flat_param()
        storage = unsharded.untyped_storage()
        if storage.size():
            no_dispatch_record_stream(unsharded, self._device_handle.current_stream())
            storage.resize_(0)


class ShardedViews:
    """The parameters of a unit as views of its shard; empty, if this rank has nothing of them.

    What is asked of all parameters is asked in lists, for a generator's frame costs more than most answers.

    Args:
        flat_param: The flat parameter, of which torch has just made the views.
    """

    def __init__(self, flat_param: Any) -> None:
        self._sites = [(module, name) for name, module, _ in flat_param._param_infos]
        self._parameters: list[nn.Parameter] = list(flat_param._params)
        self._shard_address = flat_param.data_ptr()
        self._addresses = [parameter.data_ptr() for parameter in self._parameters]
        self._shapes = [parameter.shape for parameter in self._parameters]

    def are_of(self, flat_param: Tensor) -> bool:
        """Whether the flat parameter is sharded, and its shard the one that these are views of."""
        return flat_param.data_ptr() == self._shard_address

    def hold(self) -> bool:
        """Whether the parameters still are these views."""
        # Views keep their memory, so what has their addresses is that memory.
        same_memory = [parameter.data_ptr() for parameter in self._parameters] == self._addresses
        return same_memory and [parameter.shape for parameter in self._parameters] == self._shapes

    def are_shown(self) -> bool:
        """Whether modules have these parameters."""
        shown = [module._parameters.get(name) for module, name in self._sites]
        return all(map(operator.is_, shown, self._parameters))

    def have_no_gradient(self) -> bool:
        """Whether no parameter has a gradient."""
        return all(map(operator.is_, [parameter.grad for parameter in self._parameters], repeat(None)))

    def show(self) -> None:
        """Have modules show the parameters."""
        for (module, name), parameter in zip(self._sites, self._parameters, strict=True):
            _show_parameter(module, name, parameter)


def _can_show_directly(handle: FlatParamHandle) -> bool:
    """Whether ``setattr`` would put parameters and views where modules look for them, and do nothing else."""
    flat_param: Any = handle.flat_param
    kinds = {type(info.module) for info in chain(flat_param._param_infos, flat_param._shared_param_infos)}
    torchs_way = os.environ.get("FSDP_USE_UNSAFE_SETATTR") == "1"  # with which torch does much the same
    return (
        handle._fsdp_extension is None
        and not torchs_way
        and all(
            getattr(kind, method) is getattr(nn.Module, method)
            for kind in kinds
            for method in ("__setattr__", "__delattr__", "register_parameter")
        )
    )


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
