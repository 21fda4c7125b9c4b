"""Hugging Face's accelerate: an ``Accelerator`` that shards models by a strategy.

    accelerator = use_strategy(Accelerator(), Strategy.zeropp())
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

All else stays as it is with accelerate's FSDP2. What a ``FullyShardedDataParallelPlugin`` or ``accelerate launch`` says
of it (what to wrap, mixed precision, activation checkpointing, the kind of state dict) holds, too, or is refused.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, register_fsdp_forward_method
from torch.optim import Optimizer

from fsdp_zpp.adapters.fsdp2 import fully_shard
from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.frozen.peft_saving import adapter_state
from fsdp_zpp.planner.model_size import layers
from fsdp_zpp.runtime.unit import unit_of

from ._codec_files import load_codec_state, save_codec_state
from ._requirement import require

require("accelerate", "1.13")

from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import DynamoBackend, FullyShardedDataParallelPlugin, is_peft_model
from accelerate.utils.fsdp_utils import (
    fsdp2_apply_ac,
    fsdp2_prepare_auto_wrap_policy,
    get_module_children_bottom_up,
    get_parameters_from_modules,
)

from ._accelerate_saves import SavingAccelerator

A = TypeVar("A", bound=Accelerator)


def use_strategy(accelerator: A, strategy: Strategy, *, plugin: FullyShardedDataParallelPlugin | None = None) -> A:
    """Have ``accelerator.prepare`` shard its model by ``strategy``.

    Each module that the plugin's policy wraps becomes a unit, and the model another. Without a plugin those are the
    layers that a model of transformers names (``_no_split_modules``), or else the entries of the outermost
    ``nn.ModuleList``s. A model with a base that the strategy quantizes (``frozen=``) is wrapped once: such a base is
    gathered layer by layer anyway. ``save_state`` and ``load_state`` hold the codec state, too.

    accelerate keeps one configuration for a process, so any other Accelerator in it becomes one for FSDP2.

    Args:
        accelerator: An accelerator that has prepared nothing yet. It needs no plugin and no environment variable.
        strategy: Where each model state lives and how each hop is encoded.
        plugin: What else there is to say of FSDP. Default: the accelerator's own, or one for FSDP2. On CPUs an
            accelerator drops its plugin, so there it has to be given here.

    Returns:
        ``accelerator``, whose class is now a subclass of what it was.

    Raises:
        ImportError: If layers are to be compiled, and accelerate is too old for that.
        TypeError: If ``strategy`` is not a ``Strategy``.
        ValueError: If the accelerator has prepared a model, runs in one process, or was configured for what a strategy
            can't honour; says what to do instead.
    """
    if not isinstance(strategy, Strategy):
        raise TypeError(f"strategy must be a Strategy such as Strategy.zeropp(), got {strategy!r}")
    _check_accelerator(accelerator)
    if (plugin := plugin or getattr(accelerator.state, "fsdp_plugin", None)) is None:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    _check_plugin(plugin)
    # accelerate chooses FSDP only where it sees a GPU; torch's FSDP, and all that depends on this, runs on CPUs, too.
    # Each AcceleratorState that is made, one with every optimizer, takes this from the PartialState.
    accelerator.state.fsdp_plugin = plugin
    accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    cls = type(accelerator)
    accelerator.__class__ = type(f"Strategy{cls.__name__}", (ShardingAccelerator, cls), {})
    accelerator.strategy = strategy
    accelerator.register_save_state_pre_hook(partial(_save_codec_state, accelerator))
    accelerator.register_load_state_pre_hook(partial(_load_codec_state, accelerator))
    return accelerator


class ShardingAccelerator(SavingAccelerator):
    """Shards models by a strategy where accelerate would call torch's own ``fully_shard``.

    Attributes:
        strategy: The strategy.
    """

    strategy: Strategy

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        # accelerate prepares a model and its optimizer together, or it could not give the optimizer the shards. But a
        # model may be there to be evaluated only, and an optimizer that is made later has the shards.
        kinds = [sum(isinstance(each, kind) for each in objects) for kind in (nn.Module, Optimizer)]
        if kinds[0] == 1 and kinds[1]:
            return super().prepare(*objects, device_placement=device_placement)
        if kinds[0] > 1 and kinds[1]:
            raise ValueError(
                "several models and optimizers were given, and nothing says which belong together: prepare each model "
                "with its optimizers in a call of its own"
            )
        prepared = self._prepare_fsdp2(*objects)
        return prepared if len(prepared) > 1 else prepared[0]

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        self._shard(model, [])
        if not any(known is model for known in self._models):
            self._models.append(model)
        model._is_accelerate_prepared = True  # type: ignore[assignment]
        return model

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        # accelerate's compares the parameters with those of each model, which fails if one has as many.
        self.unscale_gradients()
        # accelerate 1.15 has a function of its own, which takes gradients that are no DTensors beside those that are.
        clip = getattr(self, "_clip_grad_norm_dtensor_aware", nn.utils.clip_grad_norm_)
        return clip(list(parameters), max_norm, norm_type=norm_type)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Full weights; of a PEFT model, what its ``save_pretrained`` saves, and not the base. Collective."""
        return adapter_state(model) if is_peft_model(model) else super().get_state_dict(model, unwrap)

    def _prepare_fsdp2(self, *objects: Any) -> tuple[Any, ...]:
        optimizers = [each for each in objects if isinstance(each, Optimizer)]
        models = [each for each in objects if isinstance(each, nn.Module)]
        for model in models:
            self._shard(model, optimizers)
        if optimizers:
            _check_has_shards(optimizers, models or self._models)
            # In a checkpoint, the first model goes with the first optimizer.
            self._models[:0] = [model for model in models if not any(known is model for known in self._models)]
        # In two passes, since a scheduler is prepared for an optimizer that is prepared.
        return tuple(map(self._prepare_one, [self._prepare_one(each, first_pass=True) for each in objects]))

    def _shard(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        if unit_of(model) is not None:
            reshard(model)
            return
        if isinstance(model, FSDPModule):
            raise ValueError(
                f"this {type(model).__name__} was sharded by torch's fully_shard before; leave that to "
                "accelerator.prepare, or use fsdp_zpp.fully_shard(..., strategy=strategy)"
            )
        own = self.state.fsdp_plugin
        # A copy for each model, since it then holds the names of that model's layers.
        self.state.fsdp_plugin = plugin = copy.copy(own)
        try:
            plugin.set_auto_wrap_policy(model)
            _check_checkpointing(plugin, model)
            if plugin.activation_checkpointing:
                model = fsdp2_apply_ac(self, model)
        finally:
            self.state.fsdp_plugin = own
        if self.state.dynamo_plugin.backend != DynamoBackend.NO:
            _compile_layers(model, self.state.dynamo_plugin)
        if self.mixed_precision != "no":
            _upcast(model)
        arguments = _arguments(plugin, model, self.device)
        with _following(optimizers, model):
            for module in [*_units(model, plugin, self.strategy), model]:
                fully_shard(module, strategy=self.strategy, **arguments)
        if hasattr(model, "generate"):
            register_fsdp_forward_method(model, "generate")
        # transformers looks here to tell that all ranks of a generation must make as many forwards.
        model._is_fsdp_managed_module = True  # type: ignore[assignment]


def _check_accelerator(accelerator: Accelerator) -> None:
    if isinstance(accelerator, ShardingAccelerator):
        raise ValueError(f"this accelerator has a strategy already, {accelerator.strategy}")
    if accelerator._models:
        raise ValueError(
            "this accelerator has prepared a model already: call use_strategy before accelerator.prepare. TRL's "
            "trainers that have a reference model prepare it in their constructor, so a strategy can't shard it"
        )
    dynamo = accelerator.state.dynamo_plugin
    if dynamo.backend != DynamoBackend.NO:
        if not dynamo.use_regional_compilation:
            raise ValueError(
                "torch.compile of a whole model does not see where a strategy gathers: compile layer by layer, with "
                "TorchDynamoPlugin(use_regional_compilation=True) or ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=true"
            )
        require("accelerate", "1.14", purpose="to compile layer by layer")
    kind = accelerator.distributed_type
    if accelerator.num_processes == 1 or not dist.is_initialized():
        raise ValueError(
            "a strategy shards over several processes, but accelerate has only one: start several with accelerate "
            "launch or torchrun, and on CPUs pass Accelerator(cpu=True)"
        )
    if not str(kind.value).startswith("MULTI") and kind != DistributedType.FSDP:
        raise ValueError(f"a strategy is for torch's FSDP, but this accelerator was configured for {kind.value}")
    if (config := accelerator.parallelism_config) is None:
        return
    if config.dp_replicate_enabled:
        raise ValueError(
            f"dp_replicate_size={config.dp_replicate_size} in parallelism_config makes an HSDP mesh, but with a "
            "strategy its scopes decide what is replicated: leave it out, and use Strategy('III') for HSDP, with "
            "gpus_per_node= the size of a replica"
        )
    if config.non_data_parallel_size > 1:
        raise ValueError(
            "a strategy can't be combined with tensor, context or sequence parallelism through accelerate: leave out "
            "parallelism_config, or call fsdp_zpp.fully_shard(mesh=mesh['dp_shard'], ...) yourself"
        )


def _check_plugin(plugin: FullyShardedDataParallelPlugin) -> None:
    if plugin.cpu_ram_efficient_loading:
        raise ValueError(
            "cpu_ram_efficient_loading=True loads the weights on rank 0 alone, and a strategy shards those of each "
            "rank: leave it out"
        )
    if plugin.fsdp_version != 2:
        # accelerate 1.15 loads no state into FSDP1's optimizers from a sharded checkpoint (a fresh one has no keys to
        # load into), with or without a strategy.
        raise ValueError(
            f"a strategy needs fsdp_version=2, and the plugin says {plugin.fsdp_version}: set it in the plugin, with "
            "FSDP_VERSION=2 or with fsdp_version: 2 in accelerate's configuration"
        )


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


def _compile_layers(model: nn.Module, plugin: Any) -> None:
    """As accelerate does for its own FSDP2, in place."""
    from accelerate.utils.other import compile_regions_fsdp2  # which accelerate 1.13 lacks

    torch._dynamo.config.capture_scalar_outputs = True  # experts have as many rows as tokens were routed to them
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    compile_regions_fsdp2(model, **plugin.to_kwargs())


def _upcast(model: nn.Module) -> None:
    """Keep what is trained in fp32, as accelerate does; mixed precision casts it for the computation."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)


def _arguments(plugin: FullyShardedDataParallelPlugin, model: nn.Module, device: torch.device) -> dict[str, Any]:
    """The arguments of ``fully_shard`` that the plugin stands for."""
    arguments = {
        "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        "offload_policy": plugin.cpu_offload,
    }
    if plugin.reshard_after_forward is False:  # the plugin's default is True, torch's is to decide
        arguments["reshard_after_forward"] = False
    if plugin.ignored_modules is not None:
        arguments["ignored_params"] = get_parameters_from_modules(plugin.ignored_modules, model, device)
    return arguments


def _units(model: nn.Module, plugin: FullyShardedDataParallelPlugin, strategy: Strategy) -> list[nn.Module]:
    """The modules that are units beside the model, bottom-up."""
    numels = [sum(p.numel() for p in model.parameters() if p.requires_grad == trained) for trained in (True, False)]
    if strategy.frozen is not None and numels[0] < numels[1]:
        return []
    chosen = fsdp2_prepare_auto_wrap_policy(plugin, model)
    if chosen is None:
        return []
    candidates = dict.fromkeys(get_module_children_bottom_up(model)[:-1])  # a shared module is there more than once
    found = [
        module for module in candidates if chosen(module) and not isinstance(module, nn.ModuleList | nn.ModuleDict)
    ]
    # The policy chooses a layer that is recomputed twice: itself, and what has it recomputed, which is to gather it.
    inside = {id(getattr(module, "_checkpoint_wrapped_module", None)) for module in found}
    found = [module for module in found if id(module) not in inside]
    by_layers = plugin.transformer_cls_names_to_wrap == []  # of a model that names none
    return list(layers(model)) if by_layers and not found else found


def _check_has_shards(optimizers: Sequence[Optimizer], models: Sequence[nn.Module]) -> None:
    shards = {id(parameter) for model in models for parameter in model.parameters()}
    if any(id(each) not in shards for each in _parameters_of(optimizers)):
        raise ValueError(
            "the optimizer has a parameter that is not a shard of the model: a forward leaves the root unsharded, so "
            "construct the optimizer before it, or after model.reshard()"
        )


def _parameters_of(optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
    return [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]


def reshard(model: nn.Module) -> None:
    """Have ``model.parameters()`` be the shards: a forward without a backward leaves those of the root unsharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def _following(optimizers: Sequence[Optimizer], model: nn.Module) -> Iterator[None]:
    """A context in which a model is sharded, after which optimizers have its parameters.

    In between they have the names of parameters, so that they do not keep the memory of full ones.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if any(optimizer.state for optimizer in optimizers):
        raise ValueError(
            "the optimizer has made steps on a model that is not sharded yet: prepare both before training"
        )
    if any(id(parameter) not in names for parameter in _parameters_of(optimizers)):
        raise ValueError("the optimizer has a parameter that is not the model's: prepare both of them together")
    for group in groups:
        group["params"] = [names[id(parameter)] for parameter in group["params"]]
    yield
    sharded = dict(model.named_parameters())
    for group in groups:  # what was quantized is no parameter any more
        group["params"] = [sharded[name] for name in group["params"] if name in sharded]


def _save_codec_state(
    accelerator: Accelerator, models: list[nn.Module], weights: list[Any], output_dir: str | os.PathLike[str]
) -> None:
    for model in models[:1]:  # others are there to be evaluated, and keep nothing from step to step
        save_codec_state(model, accelerator._optimizers, Path(output_dir))


def _load_codec_state(accelerator: Accelerator, models: list[nn.Module], input_dir: str | os.PathLike[str]) -> None:
    # accelerate hands over the models that are still to be loaded, which is none under FSDP.
    for model in accelerator._models[:1]:
        load_codec_state(model, accelerator._optimizers, Path(input_dir))
