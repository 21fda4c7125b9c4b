"""Whole tensors of a sharded model on its first rank, for files that others read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from .base import original_path


def whole_parameters(model: nn.Module, wanted: Callable[[str, nn.Parameter], bool]) -> dict[str, Tensor]:
    """Copies on the CPU of parameters that are ``wanted``, by their paths without wrappers.

    Collective; on other ranks than the first they may be missing. Of FSDP's own full state dicts, the one of
    FullyShardedDataParallel takes all parameters along, and the one of fully_shard what a forward left gathered.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    with _unsharded(model) if _has_fsdp1(model) else nullcontext():
        return {
            original_path(name): _whole(parameter.detach())
            for name, parameter in model.named_parameters()
            if wanted(original_path(name), parameter)
        }


def whole_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies on the CPU of the buffers that state dicts have, by their paths without wrappers. Collective."""
    return {
        original_path(f"{path}.{name}").removeprefix("."): _whole(buffer.detach())
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def _has_fsdp1(model: nn.Module) -> bool:
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def _unsharded(model: nn.Module) -> AbstractContextManager[Any]:
    """All of the model, whole, on the first rank; what is quantized is no part of it."""
    elsewhere = any(parameter.device.type != "cpu" for parameter in model.parameters())
    return FullyShardedDataParallel.summon_full_params(
        model, writeback=False, offload_to_cpu=elsewhere, rank0_only=elsewhere
    )


def _whole(tensor: Tensor) -> Tensor:
    """A copy of a whole tensor on the CPU. Collective, if it is sharded."""
    if isinstance(tensor, DTensor):
        # Offloaded shards are on the CPU, where the collectives of GPUs can't gather them.
        on_device: Any = tensor.to(tensor.device_mesh.device_type)
        tensor = on_device.full_tensor()
    return tensor.to("cpu", copy=True)
