"""Shards a model as accelerate's plugin describes it, by a strategy in place of torch's own ``fully_shard``."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend, FullyShardedDataParallelPlugin, TorchDynamoPlugin
from accelerate.utils.fsdp_utils import (
    fsdp2_apply_ac,
    fsdp2_prepare_auto_wrap_policy,
    get_module_children_bottom_up,
    get_parameters_from_modules,
)
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, register_fsdp_forward_method
from torch.optim import Optimizer

from fsdp_zpp.adapters.fsdp2 import fully_shard
from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.planner.model_size import layers
from fsdp_zpp.runtime.tensors_of_model import reshard
from fsdp_zpp.runtime.unit import unit_of


def shard(
    accelerator: Accelerator,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    strategy: Strategy,
    *,
    trained: bool = True,
) -> None:
    """Shard ``model`` in place, as the accelerator's plugin says, and give ``optimizers`` its shards.

    Mixed precision keeps what requires gradients in fp32, unless the model is not to be ``trained``.

    Raises:
        ValueError: If torch has sharded the model, or if model, optimizers and plugin don't fit together.
    """
    if unit_of(model) is not None:
        reshard(model)
        return
    if isinstance(model, FSDPModule):
        raise ValueError(
            f"this {type(model).__name__} was sharded by torch's fully_shard before; leave that to "
            "accelerator.prepare, or use fsdp_zpp.fully_shard(..., strategy=strategy)"
        )
    own = accelerator.state.fsdp_plugin
    # A copy for each model, since it then holds the names of that model's layers.
    accelerator.state.fsdp_plugin = plugin = copy.copy(own)
    try:
        plugin.set_auto_wrap_policy(model)
        _check_checkpointing(plugin, model)
        if plugin.activation_checkpointing:
            model = fsdp2_apply_ac(accelerator, model)
    finally:
        accelerator.state.fsdp_plugin = own
    if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        _compile_layers(model, accelerator.state.dynamo_plugin)
    if accelerator.mixed_precision != "no" and trained:
        _upcast(model)
    arguments = _arguments(plugin, model, accelerator)
    with _following(optimizers, model):
        for module in [*_units(model, plugin, strategy), model]:
            fully_shard(module, strategy=strategy, **arguments)
    if hasattr(model, "generate"):
        register_fsdp_forward_method(model, "generate")
    # transformers looks here to tell that all ranks of a generation must make as many forwards.
    vars(model)["_is_fsdp_managed_module"] = True


def _check_checkpointing(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> None:
    """Raise if activations are to be recomputed, but the plugin does not say of which modules."""
    if not plugin.activation_checkpointing:
        return
    chosen = fsdp2_prepare_auto_wrap_policy(plugin, model)
    if chosen is None or not any(map(chosen, model.modules())):
        raise ValueError(
            f"activation_checkpointing=True recomputes the modules that the plugin's policy wraps, but it wraps none "
            f"of this {type(model).__name__}: name its layers in transformer_cls_names_to_wrap"
        )


def _compile_layers(model: nn.Module, plugin: TorchDynamoPlugin) -> None:
    """Compile layers in place, as accelerate does for its own FSDP2."""
    from accelerate.utils.other import compile_regions_fsdp2  # which accelerate 1.13 lacks

    torch._dynamo.config.capture_scalar_outputs = True  # experts have as many rows as tokens were routed to them
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    compile_regions_fsdp2(model, **plugin.to_kwargs())


def _upcast(model: nn.Module) -> None:
    """Keep what is trained in fp32, as accelerate does; mixed precision casts it for the computation."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)


def _arguments(plugin: FullyShardedDataParallelPlugin, model: nn.Module, accelerator: Accelerator) -> dict[str, Any]:
    """Return the arguments of ``fully_shard`` that the plugin and ``parallelism_config`` stand for."""
    parallelism = accelerator.parallelism_config
    arguments = {
        "mesh": None if parallelism is None else accelerator.torch_device_mesh[tuple(parallelism.fsdp_dim_names)],
        "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        "offload_policy": plugin.cpu_offload,
    }
    if plugin.reshard_after_forward is False:  # the plugin's default is True, torch's is to decide
        arguments["reshard_after_forward"] = False
    if plugin.ignored_modules is not None:
        arguments["ignored_params"] = get_parameters_from_modules(plugin.ignored_modules, model, accelerator.device)
    return arguments


def _units(model: nn.Module, plugin: FullyShardedDataParallelPlugin, strategy: Strategy) -> list[nn.Module]:
    """Return the modules that are units beside the model, bottom-up."""
    numels = [sum(p.numel() for p in model.parameters() if p.requires_grad == trained) for trained in (True, False)]
    if strategy.frozen is not None and numels[0] < numels[1]:
        return []
    chosen = fsdp2_prepare_auto_wrap_policy(plugin, model)
    if chosen is None:
        return []
    candidates = dict.fromkeys(get_module_children_bottom_up(model)[:-1])  # a shared module is there more than once
    wrapped = [
        module for module in candidates if chosen(module) and not isinstance(module, nn.ModuleList | nn.ModuleDict)
    ]
    # The policy chooses a layer that is recomputed twice: itself, and what has it recomputed, which is to gather it.
    inside = {id(getattr(module, "_checkpoint_wrapped_module", None)) for module in wrapped}
    wrapped = [module for module in wrapped if id(module) not in inside]
    by_layers = plugin.transformer_cls_names_to_wrap == []  # of a model that names none
    return list(layers(model)) if by_layers and not wrapped else wrapped


def _parameters_of(optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
    return [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]


@contextmanager
def _following(optimizers: Sequence[Optimizer], model: nn.Module) -> Iterator[None]:
    """Return a context in which a model is sharded, after which optimizers have its parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if any(optimizer.state for optimizer in optimizers):
        raise ValueError(
            "the optimizer has made steps on a model that is not sharded yet: prepare both before training"
        )
    if any(id(parameter) not in names for parameter in _parameters_of(optimizers)):
        raise ValueError("the optimizer has a parameter that is not the model's: prepare both of them together")
    for group in groups:  # names in between, so that optimizers do not keep the memory of full parameters
        group["params"] = [names[id(parameter)] for parameter in group["params"]]
    yield
    sharded = dict(model.named_parameters())
    for group in groups:  # what was quantized is no parameter any more
        group["params"] = [sharded[name] for name in group["params"] if name in sharded]
