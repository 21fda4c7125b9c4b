"""Full tensors of a sharded model, gathered on its first rank for files that other programs read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor

from fsdp_zpp.module_names import original_path

from ._torch_sharded import reshard


def full_parameters(model: nn.Module, wanted: Callable[[str, nn.Parameter], bool]) -> dict[str, Tensor]:
    """Copy the parameters that are ``wanted`` to the CPU, by their FQNs without wrappers. Collective.

    Ranks of the model other than its first may get shards, or nothing. FSDP's own full state dicts don't serve: the one
    of FullyShardedDataParallel gathers all parameters, and the one of fully_shard has what a forward left gathered.

    Args:
        model: The model, sharded or not.
        wanted: Whether to copy a parameter, by its FQN and the parameter.
    """
    reshard(model)  # else the root's modules may show tensors in mixed precision's dtype
    with _unsharded(model) if _instances(model) else nullcontext():
        return {
            original_path(name): _full(parameter.detach())
            for name, parameter in model.named_parameters()
            if wanted(original_path(name), parameter)
        }


def full_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copy the persistent buffers to the CPU, by their FQNs without wrappers. Collective."""
    return {
        original_path(f"{path}.{name}").removeprefix("."): _full(buffer.detach())
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def _instances(model: nn.Module) -> list[FullyShardedDataParallel]:
    return [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]


def _unsharded(model: nn.Module) -> AbstractContextManager[object]:
    """Give the first rank all parameters in full, on the CPU, in this context; not those that are quantized."""
    on_accelerator = any(parameter.device.type != "cpu" for parameter in model.parameters())
    # What is not sharded needs no gathering, and torch refuses to offload it.
    sharded = all(instance.sharding_strategy != ShardingStrategy.NO_SHARD for instance in _instances(model))
    # writeback=False, since torch refuses rank0_only with it; nothing is written here anyway.
    return FullyShardedDataParallel.summon_full_params(
        model, writeback=False, offload_to_cpu=on_accelerator and sharded, rank0_only=on_accelerator and sharded
    )


def _full(tensor: Tensor) -> Tensor:
    """Copy a tensor, in full, to the CPU. Collective if it is sharded."""
    if isinstance(tensor, DTensor):
        # Offloaded shards are on the CPU, from which NCCL can't gather.
        on_device: Any = tensor.to(tensor.device_mesh.device_type)
        tensor = on_device.full_tensor()
    return tensor.to("cpu", copy=True)
