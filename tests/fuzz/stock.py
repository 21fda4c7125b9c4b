"""What stock FSDP must be made to do through torch's private names, since it has no public ones for it."""

from __future__ import annotations

from typing import Any

from harness.adapter import STOCK
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
)


def forget_accumulated(module: nn.Module) -> None:
    """Drop what a unit has accumulated, as README's zero_grad does; stock's keeps some of it."""
    if isinstance(module, FullyShardedDataParallel):
        flat_param: Any = module._handle.flat_param
        flat_param.grad = None
        if hasattr(flat_param, "_saved_grad_shard"):
            del flat_param._saved_grad_shard
    elif isinstance(module, FSDPModule):
        for param in module._get_fsdp_state()._fsdp_param_group.fsdp_params:
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
        elif isinstance(module, FullyShardedDataParallel) and strategy is STOCK and module._handle:
            module._handle.reshard(free_unsharded_flat_param=True)


def follow_move(model: Any) -> None:
    """Have stock FSDP1 use the memory that it was moved to: by itself it goes back to the old one after a forward."""
    for module in FullyShardedDataParallel.fsdp_modules(model):
        flat: Any = None if module._handle is None else module._handle.flat_param
        if flat is not None and hasattr(flat, "_local_shard") and flat.shape == flat._local_shard.shape:
            flat._local_shard = flat.data
