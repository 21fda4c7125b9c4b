"""What stock FSDP must be made to do through torch's private names, since it has no public ones for it."""

from __future__ import annotations

from typing import Any

from harness.adapter import STOCK
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
)


def forget_accumulated(unit: nn.Module, nested: bool = False) -> None:
    """Drop what a unit has accumulated, as README's zero_grad does; stock's keeps some of it.

    Args:
        unit: The unit.
        nested: Whether those within it drop theirs, too.
    """
    for module in unit.modules() if nested else [unit]:
        if isinstance(module, FullyShardedDataParallel):
            _forget_of_handle(module._handle)
        elif isinstance(module, FSDPModule):
            _forget_of_group(module._get_fsdp_state()._fsdp_param_group)


def _forget_of_handle(handle: Any) -> None:
    if handle is not None:
        handle.flat_param.grad = None
        if hasattr(handle.flat_param, "_saved_grad_shard"):
            del handle.flat_param._saved_grad_shard


def _forget_of_group(group: Any) -> None:
    for param in group.fsdp_params if group is not None else []:
        param.sharded_param.grad = None
        if hasattr(param, "_unsharded_param"):
            param.unsharded_param.grad = None
        if param.unsharded_accumulated_grad is not None:  # from torch 2.15 on, that same gradient
            param.unsharded_accumulated_grad = None


def reshard(model: Any, strategy: Any) -> None:
    """A forward leaves the root unsharded, and stock FSDP1 goes on with that whatever is written to the shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
        elif isinstance(module, FullyShardedDataParallel) and strategy is STOCK and _has_started(module):
            module._handle.reshard(free_unsharded_flat_param=True)


def _has_started(module: FullyShardedDataParallel) -> bool:
    handle = module._handle
    return handle is not None and handle.uses_sharded_strategy and hasattr(handle.flat_param, "_local_shard")


def follow_move(model: Any) -> None:
    """Have stock FSDP1 use the memory that it was moved to: by itself it goes back to the old one after a forward."""
    for module in FullyShardedDataParallel.fsdp_modules(model):
        flat: Any = None if module._handle is None else module._handle.flat_param
        if flat is not None and hasattr(flat, "_local_shard") and flat.shape == flat._local_shard.shape:
            flat._local_shard = flat.data
