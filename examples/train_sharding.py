"""Sharding the model, with FullyShardedDataParallel or with fully_shard."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard as torch_fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from train_options import Options

from fsdp_zpp import Strategy, fully_shard


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a Hugging Face model, or of one that wraps it."""
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return [module for module in model.modules() if type(module).__name__ in names]


def shard(
    model: nn.Module, strategy: Strategy | None, options: Options, device: torch.device, by_layer: bool = True
) -> FullyShardedDataParallel | FSDPModule:
    """Shard ``model``, one unit per decoder layer or all of it as one; ``strategy`` None is torch's own FULL_SHARD."""
    # With a mesh FullyShardedDataParallel's checkpoints hold DTensors; without one, the deprecated ShardedTensors.
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    layer_classes = {type(layer) for layer in layers_of(model)}
    if options.fsdp2:
        return _shard_fsdp2(model.to(device), strategy, options, mesh, by_layer)
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    sharded = FullyShardedDataParallel(
        model,
        # fsdp_zpp teaches FSDP to take a Strategy, which torch's annotation doesn't know.
        sharding_strategy=strategy or ShardingStrategy.FULL_SHARD,  # type: ignore[arg-type]
        auto_wrap_policy=ModuleWrapPolicy(layer_classes) if by_layer else None,
        mixed_precision=half if options.precision == "bf16" else None,
        device_mesh=mesh,
        device_id=device,
        use_orig_params=True,
    )
    if options.activation_checkpointing:
        # Inside of the units, so that recomputation finds the weights that backward has gathered.
        apply_activation_checkpointing(sharded, check_fn=lambda module: type(module) in layer_classes)
    return sharded


def _shard_fsdp2(
    model: nn.Module, strategy: Strategy | None, options: Options, mesh: DeviceMesh, by_layer: bool
) -> FSDPModule:
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    arguments: dict[str, Any] = {"mesh": mesh}
    if options.precision == "bf16":
        arguments["mp_policy"] = half
    if options.activation_checkpointing:
        classes = {type(layer) for layer in layers_of(model)}
        apply_activation_checkpointing(model, check_fn=lambda module: type(module) in classes)
    for module in (*(layers_of(model) if by_layer else ()), model):
        if strategy is None:
            torch_fully_shard(module, **arguments)
        else:
            fully_shard(module, strategy=strategy, **arguments)
    return model


def accumulating(model: nn.Module, accumulates: bool) -> AbstractContextManager[Any]:
    """A context for a micro-batch, in which gradients stay on this rank if ``accumulates``."""
    if isinstance(model, FullyShardedDataParallel):
        return model.no_sync() if accumulates else nullcontext()
    model.set_requires_gradient_sync(not accumulates)
    return nullcontext()


def clip_gradients(model: nn.Module, max_norm: float) -> None:
    """Clip the norm of all gradients of all ranks together."""
    if isinstance(model, FullyShardedDataParallel):
        model.clip_grad_norm_(max_norm)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def unit_sizes(model: nn.Module, trained: bool = False, by_layer: bool = True) -> list[int]:
    """Values, or ``trained`` ones, in each unit that :func:`shard` will make of ``model``, the root unit first."""

    def size(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)

    layers = [size(layer) for layer in layers_of(model)] if by_layer else []
    return [size(model) - sum(layers), *layers]
