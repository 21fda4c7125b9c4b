"""Private names of torch's flat parameters: their memory, and the views that modules show in place of parameters.

torch makes all views of a unit anew whenever it unshards or reshards it, four times a step, and nearly always they are
the same: that takes a fifth of the time that Python spends in FSDP. Here views are made once and kept until something
moves or replaces what they are views of. Until then, modules only switch between the sharded and the unsharded ones.
"""

from __future__ import annotations

import os
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from fsdp_zpp.torch_internals import Needed, check_needed

from ._torch import FlatParamHandle, HandleTrainingState, no_dispatch_record_stream

_HANDLE = "torch.distributed.fsdp._flat_param.FlatParamHandle"
_FLAT = "torch.distributed.fsdp._flat_param.FlatParameter"
_NEEDED = (
    Needed("torch.distributed.fsdp._flat_param", "FlatParamHandle", "showing views in place of parameters"),
    Needed(_HANDLE, "_setattr_tensor _setattr_param flat_param _training_state", "the same"),
    Needed(_HANDLE, "_use_sharded_views _use_unsharded_views _unsharded_flat_param_for_skipped_views", "the same"),
    Needed(_HANDLE, "_use_orig_params _skip_writeback_check _fsdp_extension uses_sharded_strategy", "the same"),
    Needed(_HANDLE, "_writeback_orig_params", "noticing parameters that were given other values"),
    Needed(_HANDLE, "_alloc_padded_unsharded_flat_param _free_unsharded_flat_param", "the memory of what is gathered"),
    Needed(_HANDLE, "_get_padded_unsharded_flat_param _device_handle", "the same"),
    Needed(_FLAT, "_param_infos _shared_param_infos _shard_param_infos _params _tensors", "what a unit's modules show"),
    Needed("torch.nn.Module", "_parameters", "the same"),
    Needed("torch.nn.modules.module", "_global_parameter_registration_hooks", "the same"),
)
check_needed("adapter for FullyShardedDataParallel", _NEEDED)


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
        if self._sharded_views is None or not self._sharded_views.are_of(flat_param):
            super()._use_sharded_views()
            self._sharded_views = ShardedViews(flat_param) if self._has_plain_views() else None
            return
        # Meanwhile modules have shown views of what was gathered; the parameters are still views of this shard.
        self._unsharded_flat_param_for_skipped_views = None
        self._sharded_views.show()
        if self._training_state == HandleTrainingState.BACKWARD_POST:
            flat_param._tensors[:] = [None] * len(flat_param._tensors)

    def _has_plain_views(self) -> bool:
        """Whether the views of the shard are slices of it, and writes to their parameters are looked for."""
        return (
            self._shows_directly
            and self.uses_sharded_strategy
            and not self._skip_writeback_check
            and not self.flat_param._shared_param_infos
        )

    def _writeback_orig_params(self) -> bool:
        if self._sharded_views is not None and self._sharded_views.are_untouched(self.flat_param):
            return False
        wrote_back: bool = super()._writeback_orig_params()
        if wrote_back:
            self.drop_views()
        return wrote_back

    # ---- while it is unsharded, modules show views of what was gathered

    def _use_unsharded_views(self, as_params: bool) -> None:
        if as_params:
            self.drop_views()  # parameters become views of what was gathered
        elif self._training_state == HandleTrainingState.BACKWARD_PRE and self._views_of_forward_hold():
            flat_param: Any = self.flat_param
            for (name, module, _), view in zip(flat_param._param_infos, flat_param._tensors, strict=True):
                _show_tensor(module, name, view)
            return
        super()._use_unsharded_views(as_params)

    def _views_of_forward_hold(self) -> bool:
        """Whether the views that the forward has saved are of the memory that was gathered to now.

        That memory was freed after the forward and allocated anew, which a tensor that shares it does not notice.
        """
        flat_param: Any = self.flat_param
        if not self._shows_directly or not self._use_orig_params or flat_param._shared_param_infos:
            return False
        first = flat_param._tensors[0]
        return first is not None and _address(first) == _address(flat_param)

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
    """The parameters of a unit, as views of its shard.

    Args:
        flat_param: The flat parameter, whose parameters torch has just made views of it.
    """

    def __init__(self, flat_param: Any) -> None:
        self._address = flat_param.data_ptr()
        infos = zip(flat_param._param_infos, flat_param._params, strict=True)
        self._sites = [(module, name, param) for (name, module, _), param in infos]
        in_shard = [info.in_shard for info in flat_param._shard_param_infos]
        of_shard = zip(self._sites, in_shard, strict=True)
        self._in_shard = [(*site, site[2].data_ptr()) for site, is_in_shard in of_shard if is_in_shard]

    def are_of(self, flat_param: Tensor) -> bool:
        """Whether the flat parameter is still the shard that these are views of."""
        # They keep its memory, so nothing else can lie there.
        return flat_param.data_ptr() == self._address

    def show(self) -> None:
        """Have modules show the parameters."""
        for module, name, param in self._sites:
            _show_parameter(module, name, param)

    def are_untouched(self, flat_param: Tensor) -> bool:
        """Whether modules show the parameters, which have neither other memory nor a gradient."""
        if flat_param.grad is not None or not self.are_of(flat_param):
            return False
        for module, name, param, address in self._in_shard:
            if module._parameters.get(name) is not param or param.data_ptr() != address or param.grad is not None:
                return False
        return True


def _can_show_directly(handle: FlatParamHandle) -> bool:
    """Whether ``setattr`` would put parameters and views where modules look for them, and do nothing else."""
    flat_param: Any = handle.flat_param
    modules = {info.module for info in chain(flat_param._param_infos, flat_param._shared_param_infos)}
    chosen_by_user = "FSDP_USE_UNSAFE_SETATTR" in os.environ  # torch's variable, for a way of its own
    return handle._fsdp_extension is None and not chosen_by_user and all(map(_is_plain, modules))


def _is_plain(module: nn.Module) -> bool:
    kind = type(module)
    methods = ("__setattr__", "__delattr__", "register_parameter")
    return all(getattr(kind, name) is getattr(nn.Module, name) for name in methods)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


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
