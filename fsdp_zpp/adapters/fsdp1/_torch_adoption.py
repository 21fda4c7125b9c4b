"""Private names by which a strategy takes over an instance of FullyShardedDataParallel: its handle and hook."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_zpp.runtime.unit import StrategyUnit

from ._torch import FlatParamHandle, unshard_param_utils
from ._torch_flat_layout import FlatParameterLayout
from ._torch_handle import StrategyHandle, reduction_hook


def adopt_handle(
    module: FullyShardedDataParallel, unit: StrategyUnit, layout: FlatParameterLayout
) -> StrategyHandle | None:
    """Have the flat parameter of ``module``, if it has one, gathered and its gradient reduced by ``unit``.

    Args:
        module: The instance.
        unit: Its unit.
        layout: Where its parameters lie.

    Returns:
        The flat parameter's handle.
    """
    if module._handle is None:
        return None
    handle: Any = module._handle
    handle.__class__ = StrategyHandle
    handle.adopt(module, unit, layout)
    if unit.reduce is not None:
        # register_comm_hook() would do, but may be called on a root only, and settles who is the root.
        module._comm_hook, module._comm_hook_state = reduction_hook, handle
    return handle


def flattened_sites(module: FullyShardedDataParallel) -> set[tuple[nn.Module, str]]:
    """The modules of the parameters in ``module``'s own flat parameter, with the names there."""
    handle = module._handle
    return set() if handle is None else {(info.module, info.param_name) for info in handle.flat_param._param_infos}


def handle_of(module: FullyShardedDataParallel) -> StrategyHandle | None:
    """The handle of ``module``'s flat parameter, if a strategy has adopted it; it reads weights ahead of a gather."""
    handle = module._handle
    return handle if isinstance(handle, StrategyHandle) else None


def prefetch_shards_alone(root: nn.Module) -> None:
    """Prefetch nothing in forwards if a unit is not sharded: FSDP would hide the gradients of one that is not run."""
    instances: list[Any] = FullyShardedDataParallel.fsdp_modules(root)
    handles = [handle for each in instances if (handle := handle_of(each)) is not None]
    if not all(handle.uses_sharded_strategy for handle in handles):
        for each in instances:
            each.forward_prefetch = False


def announce_writebacks() -> None:
    """Have ``written_back()`` of a strategy's handle called after each of FSDP's writebacks."""
    original = unshard_param_utils._writeback_to_local_shard

    @functools.wraps(original)
    def writeback_to_local_shard(handle: FlatParamHandle, writeback_grad: bool) -> None:
        original(handle, writeback_grad)
        if isinstance(handle, StrategyHandle):
            handle.written_back()

    unshard_param_utils._writeback_to_local_shard = writeback_to_local_shard
