"""What stock FSDP must be made to do through torch's private names, since it has no public ones for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from harness.adapter import STOCK
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
)
from torch.distributed.tensor import DTensor


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
            group = module._get_fsdp_state()._fsdp_param_group
            if strategy is STOCK and group is not None and group._all_gather_result is not None:
                group.wait_for_unshard()  # or the next forward goes on with what an asynchronous unshard has gathered
            module.reshard()
        elif isinstance(module, FullyShardedDataParallel) and strategy is STOCK and _has_started(module):
            handle: Any = module._handle
            if handle._use_orig_params:
                handle._writeback_orig_params()  # parameters that were replaced, which the next line would lose
            handle.reshard(free_unsharded_flat_param=True)


def _has_started(module: FullyShardedDataParallel) -> bool:
    handle = module._handle
    return handle is not None and handle.uses_sharded_strategy and hasattr(handle.flat_param, "_local_shard")


@dataclass(frozen=True)
class HeldParameter:
    """What this rank holds of a parameter.

    Args:
        parameter: As an optimizer has it.
        shown: Returns it as modules show it.
    """

    parameter: nn.Parameter
    shown: Callable[[], nn.Parameter]

    @property
    def values(self) -> Any:
        """Its values on this rank, to be read and written."""
        data: Any = self.parameter.detach()
        return data.to_local() if isinstance(data, DTensor) else data

    @property
    def is_trained(self) -> bool:
        """Whether steps change it."""
        return self.shown().requires_grad or self.parameter.grad is not None


def held(model: nn.Module) -> list[list[HeldParameter]]:
    """What this rank holds of the parameters of each unit."""
    units, groups = [], set()
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            originals: Any = module._handle.flat_param._params
            units.append([HeldParameter(p, partial(_same, p)) for p in originals])
        elif isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            if group is None or group in groups:  # modules of a list share one
                continue
            groups.add(group)
            infos = [param._module_info for param in group.fsdp_params]
            shown = [partial(getattr, info.module, info.param_name) for info in infos]
            units.append(
                [HeldParameter(param.sharded_param, now) for param, now in zip(group.fsdp_params, shown, strict=True)]
            )
    return units


def _same(parameter: nn.Parameter) -> nn.Parameter:
    return parameter


def follow_move(model: Any) -> None:
    """Have stock FSDP1 use the memory that it was moved to: by itself it goes back to the old one after a forward."""
    for module in FullyShardedDataParallel.fsdp_modules(model):
        flat: Any = None if module._handle is None else module._handle.flat_param
        if flat is not None and hasattr(flat, "_local_shard") and flat.shape == flat._local_shard.shape:
            flat._local_shard = flat.data
