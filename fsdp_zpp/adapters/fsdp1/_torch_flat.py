"""Private names of torch's flat parameters, before their first forward: taken apart and put together again."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._init_utils import _init_param_handle_from_params as init_handle

from fsdp_zpp.collectives.hops import all_gather_single

from ._torch import FlatParamHandle

OnChange = Callable[[FullyShardedDataParallel], None]


class FlatUnit:
    """The flat parameter of an instance of FSDP; see frozen/sharded_params.py.

    Args:
        instance: The instance, which has one.
        on_change: Called when the instance has another flat parameter, or none.
    """

    def __init__(self, instance: FullyShardedDataParallel, on_change: OnChange) -> None:
        self._instance, self._on_change = instance, on_change

    @property
    def _handle(self) -> Any:
        return self._instance._handle

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The original parameters, if FSDP shows them."""
        return list(self._handle.flat_param._params or ())

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained."""
        return self._handle.flat_param.requires_grad

    @property
    def sites(self) -> list[tuple[nn.Module, str, torch.Size]]:
        """Modules and their names for what is in it, those of a shared parameter too, and the shape it had."""
        flat = self._handle.flat_param
        infos = zip(flat._param_infos, flat._shapes, strict=True)
        shapes = {(info.module, info.param_name): shape for info, shape in infos}
        shared = [(info, shapes[info.prim_module, info.prim_param_name]) for info in flat._shared_param_infos]
        own = [(module, name, shape) for (module, name), shape in shapes.items()]
        return own + [(info.module, info.param_name, shape) for info, shape in shared]

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The mixed precision's ``param_dtype``."""
        return self._instance.mixed_precision.param_dtype

    @property
    def can_open(self) -> bool:
        """Whether it shows its parameters, all of them data-parallel, in a model that torch has not initialized yet."""
        return bool(self.parameters) and self._handle._fsdp_extension is None and self._instance._is_root is None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Have its parameters be plain, all of them on every rank; what is left of them is flattened in the end."""
        instance: Any = self._instance
        parameters, sites, module = self.parameters, self.sites, self._handle._fully_sharded_module
        _make_plain(self._handle, parameters, instance.compute_device)
        instance._handle = None  # and with it the shard
        instance.params.clear()
        instance._fully_sharded_module_to_handle.clear()
        try:
            yield
        finally:
            registered = {id(parameter) for site, _, _ in sites for parameter in site._parameters.values()}
            left = [parameter for parameter in parameters if id(parameter) in registered]
            for parameter in parameters:
                if id(parameter) not in registered:
                    parameter.data = parameter.new_empty(0)  # whoever still has it would keep the memory of all
            init_handle(instance, left, module)  # which copies what is left
            self._on_change(instance)


@torch.no_grad()
def _make_plain(handle: FlatParamHandle, parameters: list[nn.Parameter], device: torch.device) -> None:
    """Give the original parameters all of their values. Collective."""
    if not handle._skip_writeback_check and (handle.uses_sharded_strategy or not handle._offload_params):
        handle._writeback_orig_params()  # as before FSDP's first gather, of what was given other values meanwhile
    values = handle._get_unflat_views(_whole(handle, device))
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value


def _whole(handle: FlatParamHandle, device: torch.device) -> Tensor:
    """The flat parameter, padding included, on the device that computes. Collective."""
    flat: Any = handle.flat_param
    shard: Tensor = flat.detach().to(device)  # from where it is offloaded to
    if not handle.uses_sharded_strategy:
        return shard
    whole = shard.new_empty(shard.numel() * handle.world_size)
    all_gather_single()(whole, shard, group=handle.process_group)
    return whole[: sum(flat._numels_with_padding)]


_INSTANCES: weakref.WeakValueDictionary[int, FullyShardedDataParallel] = weakref.WeakValueDictionary()
"""Numbered in the order of their construction, which is the same on all ranks."""
_NUMBERS = itertools.count()


def constructed(instance: FullyShardedDataParallel) -> None:
    """Record an instance, so that :func:`flat_units` finds those that enclose the part of a model that it is given."""
    _INSTANCES[next(_NUMBERS)] = instance


def flat_units(model: nn.Module, on_change: OnChange) -> list[FlatUnit]:
    """The flat parameters that hold parameters of ``model``, in the order of their construction, as far as known."""
    modules = dict.fromkeys(model.modules())
    # Some may have been constructed before this package was imported.
    inside = [module for module in modules if isinstance(module, FullyShardedDataParallel)]
    instances = [*_INSTANCES.values(), *inside]
    units = [FlatUnit(each, on_change) for each in dict.fromkeys(instances) if each._handle is not None]
    return [unit for unit in units if any(module in modules for module, _, _ in unit.sites)]
