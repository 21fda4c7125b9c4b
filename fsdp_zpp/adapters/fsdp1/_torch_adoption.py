"""Private names by which a strategy takes over an instance of FullyShardedDataParallel: its handle and hook."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import _is_fsdp_flattened
from torch.distributed.fsdp._flat_param import FlatParameter

from fsdp_zpp.runtime.unit import StrategyUnit

from ._torch import FlatParamHandle, HandleTrainingState, unshard_param_utils
from ._torch_flat_layout import FlatParameterLayout
from ._torch_handle import StrategyHandle
from ._torch_step_gradients import StepGradients


def adopt_handle(
    instance: FullyShardedDataParallel, unit: StrategyUnit, layout: FlatParameterLayout
) -> StrategyHandle | None:
    """Let torch gather and reduce the flat parameter of ``instance``, if it has one, through ``unit``.

    Args:
        instance: The instance.
        unit: Its unit.
        layout: Where its parameters lie.

    Returns:
        The flat parameter's handle; None if the instance has no flat parameter.
    """
    if instance._handle is None:
        return None
    handle: Any = instance._handle
    handle.__class__ = StrategyHandle
    handle.adopt(instance, unit, layout)
    if unit.reductions.all:
        # register_comm_hook() would do, but may be called on a root only, and settles who is the root.
        instance._comm_hook, instance._comm_hook_state = StepGradients.reduce, handle.gradients
    return handle


def flattened_sites(instance: FullyShardedDataParallel) -> set[tuple[nn.Module, str]]:
    """Return the modules of the parameters in the flat parameter of ``instance``, with the names there."""
    handle = instance._handle
    return set() if handle is None else {(info.module, info.param_name) for info in handle.flat_param._param_infos}


def has_shards(instance: FullyShardedDataParallel, module: nn.Module) -> bool:
    """Return whether files of ``module``, in ``instance``, would lack values, or names that PEFT looks for."""
    if hasattr(module, "peft_config"):  # wrappers change the names, sharded or not
        return True
    handles = [each._handle for each in FullyShardedDataParallel.fsdp_modules(instance) if each._handle is not None]
    return any(
        handle.uses_sharded_strategy and handle._training_state != HandleTrainingState.SUMMON_FULL_PARAMS
        for handle in handles
    )


def is_flattened(parameter: nn.Parameter) -> bool:
    """Return whether an instance has ``parameter`` in its flat parameter, by whatever strategy."""
    return _is_fsdp_flattened(parameter) and not isinstance(parameter, FlatParameter)


def handle_of(instance: FullyShardedDataParallel) -> StrategyHandle | None:
    """Return the handle of the flat parameter of ``instance``, if a strategy has adopted it."""
    handle = instance._handle
    return handle if isinstance(handle, StrategyHandle) else None


def prefetch_shards_alone(root: nn.Module) -> None:
    """Prefetch nothing in forwards if a unit is not sharded: if such a unit is not run, FSDP hides its gradients."""
    instances: list[Any] = FullyShardedDataParallel.fsdp_modules(root)
    handles = [handle for each in instances if (handle := handle_of(each)) is not None]
    if not all(handle.uses_sharded_strategy for handle in handles):
        for each in instances:
            each.forward_prefetch = False


def announce_writebacks() -> None:
    """Call ``written_back()`` of a strategy's handle after each of FSDP's writebacks."""
    original = unshard_param_utils._writeback_to_local_shard

    @functools.wraps(original)
    def writeback_to_local_shard(handle: FlatParamHandle, writeback_grad: bool) -> None:
        original(handle, writeback_grad)
        if isinstance(handle, StrategyHandle):
            handle.written_back()

    unshard_param_utils._writeback_to_local_shard = writeback_to_local_shard
