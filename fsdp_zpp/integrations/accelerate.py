"""Hugging Face's accelerate: an ``Accelerator`` that shards models by a strategy.

    accelerator = use_strategy(Accelerator(), Strategy.zeropp())
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

All else is as with accelerate's FSDP2. Settings of ``accelerate launch`` or a ``FullyShardedDataParallelPlugin`` (what
to wrap, mixed precision, activation checkpointing, the kind of state dict) apply, or are refused.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint as recompute_in_backward

from fsdp_zpp.frozen.hugging_face import adapter_state, dequantized_weights, save_adapter
from fsdp_zpp.fsdp2.fully_shard import check_strategy, clip_grad_norm_, fully_shard
from fsdp_zpp.planner.model_size import layers
from fsdp_zpp.runtime.api import ranks_of
from fsdp_zpp.runtime.full_tensors import reshard
from fsdp_zpp.runtime.unit import unit_of
from fsdp_zpp.strategy.strategy import Strategy

from ._common import MarkedSave, check_complete, load_beside, require, save_beside

require("accelerate", "1.13")

from accelerate import Accelerator, DistributedType, PartialState
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DynamoBackend, FullyShardedDataParallelPlugin, TorchDynamoPlugin, is_peft_model
from accelerate.utils.fsdp_utils import (
    fsdp2_prepare_auto_wrap_policy,
    get_module_children_bottom_up,
    get_parameters_from_modules,
)

# ---- checks
#
# Refuse settings of an accelerator that a strategy can't honour; each error says what to do instead.


def check_accelerator(accelerator: Accelerator) -> None:
    """Raise if ``accelerator`` has prepared a model, runs in one process, or has settings that a strategy refuses."""
    if accelerator._models:
        raise ValueError(
            "this accelerator has prepared a model already: call use_strategy before accelerator.prepare. A trainer of "
            "TRL that has a reference model prepares it in its constructor: give use_strategy the trainer's class, as "
            "in use_strategy(DPOTrainer, strategy)(model, ...)"
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
    if accelerator.parallelism_config is not None:
        _check_parallelism(accelerator.parallelism_config)


def _check_parallelism(config: ParallelismConfig) -> None:
    if config.sp_enabled:
        raise ValueError(
            f"sp_size={config.sp_size} in parallelism_config is DeepSpeed's sequence parallelism, which FSDP, with or "
            "without a strategy, can't take part in: use cp_size"
        )
    if not config.dp_shard_cp_dim_names:
        raise ValueError(
            "parallelism_config has no dimension to shard over, since dp_shard_size and cp_size are 1: set "
            "dp_shard_size to the number of data-parallel ranks, or to those of a node beside dp_replicate_size"
        )
    if config.tp_enabled:
        require("accelerate", "1.15", purpose="to clip gradients beside tensor parallelism")


def check_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    ranks = mesh["tp"]
    if not any(isinstance(each, DTensor) and each.device_mesh == ranks for each in model.parameters()):
        raise ValueError(
            f"parallelism_config has tp_size={ranks.size()}, but no parameter of this {type(model).__name__} is "
            'sharded over accelerator.torch_device_mesh["tp"]: call parallelize_module(model, '
            'accelerator.torch_device_mesh["tp"], plan) before prepare'
        )


def check_plugin(plugin: FullyShardedDataParallelPlugin) -> None:
    """Raise if ``plugin`` asks for FSDP1, or has only rank 0 load the weights."""
    if plugin.cpu_ram_efficient_loading:
        raise ValueError(
            "cpu_ram_efficient_loading=True loads the weights on rank 0 alone, and a strategy shards those of each "
            "rank: leave it out"
        )
    if plugin.fsdp_version != 2:
        # With or without a strategy, accelerate 1.15 can't load FSDP1's optimizer state from a sharded checkpoint: a
        # new optimizer has no keys to load it into.
        raise ValueError(
            f"a strategy needs fsdp_version=2, and the plugin says {plugin.fsdp_version}: set it in the plugin, with "
            "FSDP_VERSION=2 or with fsdp_version: 2 in accelerate's configuration"
        )


# ---- wrapping
#
# Shard a model as accelerate's plugin says, by a strategy in place of torch's own ``fully_shard``.


def shard(
    accelerator: Accelerator,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    strategy: Strategy,
    *,
    trained: bool = True,
) -> None:
    """Shard ``model`` in place, as the accelerator's plugin says, and give ``optimizers`` its shards.

    With mixed precision, parameters that require gradients become fp32 if the model is to be ``trained``.
    """
    if unit_of(model) is not None:
        reshard(model)
        return
    if isinstance(model, FSDPModule):
        raise ValueError(
            f"this {type(model).__name__} was sharded by torch's fully_shard before; leave that to "
            "accelerator.prepare, or use fsdp_zpp.fully_shard(..., strategy=strategy)"
        )
    # Each model gets a copy of the plugin: set_auto_wrap_policy writes the names of the model's layers into it.
    plugin = copy.copy(accelerator.state.fsdp_plugin)
    with patch.multiple(accelerator.state, fsdp_plugin=plugin):
        plugin.set_auto_wrap_policy(model)
        if plugin.activation_checkpointing:
            _recompute(plugin, model)
    if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        _compile_layers(model, accelerator.state.dynamo_plugin)
    if accelerator.mixed_precision != "no" and trained:
        # accelerate does this, too: mixed precision casts parameters for the computation.
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.float32)
    arguments = _arguments(plugin, model, accelerator)
    with _following(optimizers, model):
        for module in [*_units(model, plugin, strategy), model]:
            fully_shard(module, strategy=strategy, **arguments)
    if hasattr(model, "generate"):
        register_fsdp_forward_method(model, "generate")
    # transformers reads this to know that in ``generate`` all ranks must run the same number of forwards.
    vars(model)["_is_fsdp_managed_module"] = True


def _recompute(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> None:
    """Checkpoint activations of the layers that the plugin's policy chooses, without accelerate's wrapper modules."""
    chosen = _chosen(plugin, model)
    if not chosen:
        raise ValueError(
            f"activation_checkpointing=True recomputes the modules that the plugin's policy wraps, but it wraps none "
            f"of this {type(model).__name__}: name its layers in transformer_cls_names_to_wrap"
        )
    if any(getattr(module, "gradient_checkpointing", False) for layer in chosen for module in layer.modules()):
        raise ValueError("activation_checkpointing is set in the plugin (fsdp_config) and on the layers: leave one out")
    offloads = getattr(plugin, "activation_checkpointing_offload", False)  # accelerate 1.14 lacks it
    for layer in chosen:
        # A wrapper module would change the names of modules, by which PEFT saves and loads adapters.
        layer.forward = _recomputed(layer.forward, offloads)


def _recomputed(forward: Callable[..., Any], offloads: bool) -> Callable[..., Any]:
    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        with save_on_cpu(pin_memory=torch.cuda.is_available()) if offloads else nullcontext():
            return recompute_in_backward(forward, *args, use_reentrant=False, **kwargs)

    return recomputed


def _compile_layers(model: nn.Module, plugin: TorchDynamoPlugin) -> None:
    from accelerate.utils.other import compile_regions_fsdp2  # accelerate 1.13 lacks it

    torch._dynamo.config.capture_scalar_outputs = True  # routing decides how many tokens an expert gets
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    compile_regions_fsdp2(model, **plugin.to_kwargs())


def _arguments(plugin: FullyShardedDataParallelPlugin, model: nn.Module, accelerator: Accelerator) -> dict[str, Any]:
    parallelism = accelerator.parallelism_config
    arguments = {
        "mesh": None if parallelism is None else accelerator.torch_device_mesh[tuple(parallelism.fsdp_dim_names)],
        "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        "offload_policy": plugin.cpu_offload,
    }
    if plugin.reshard_after_forward is False:  # True is only the plugin's default, so fully_shard decides
        arguments["reshard_after_forward"] = False
    if plugin.ignored_modules is not None:
        arguments["ignored_params"] = get_parameters_from_modules(plugin.ignored_modules, model, accelerator.device)
    return arguments


def _units(model: nn.Module, plugin: FullyShardedDataParallelPlugin, strategy: Strategy) -> list[nn.Module]:
    """Return the modules that become units besides the model itself, bottom-up."""
    numels = [sum(p.numel() for p in model.parameters() if p.requires_grad == trained) for trained in (True, False)]
    if strategy.frozen is not None and numels[0] < numels[1]:
        return []
    chosen = _chosen(plugin, model)
    by_layers = plugin.transformer_cls_names_to_wrap == []  # the model names no layers
    return list(layers(model)) if by_layers and chosen == [] else chosen or []


def _chosen(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> list[nn.Module] | None:
    """Return the modules in ``model`` that the plugin's policy chooses, bottom-up; None if it has no policy."""
    chooses = fsdp2_prepare_auto_wrap_policy(plugin, model)
    if chooses is None:
        return None
    candidates = dict.fromkeys(get_module_children_bottom_up(model)[:-1])  # a shared module occurs more than once
    return [each for each in candidates if chooses(each) and not isinstance(each, nn.ModuleList | nn.ModuleDict)]


@contextmanager
def _following(optimizers: Sequence[Optimizer], model: nn.Module) -> Iterator[None]:
    """Return a context for sharding ``model``; at its end, ``optimizers`` get the sharded parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if any(optimizer.state for optimizer in optimizers):
        raise ValueError(
            "the optimizer has made steps on a model that is not sharded yet: prepare both before training"
        )
    if any(id(parameter) not in names for group in groups for parameter in group["params"]):
        raise ValueError("the optimizer has a parameter that is not the model's: prepare both of them together")
    for group in groups:  # hold names meanwhile, so that optimizers don't keep full parameters alive
        group["params"] = [names[id(parameter)] for parameter in group["params"]]
    yield
    sharded = dict(model.named_parameters())
    for group in groups:  # a quantized weight is no parameter any more
        group["params"] = [sharded[name] for name in group["params"] if name in sharded]


# ---- checkpoints
#
# ``save_state`` and ``load_state`` of several models and optimizers.
#
# accelerate saves its optimizer number i with its model number i. But models that are only evaluated have no optimizer,
# and others have several. So during a save or a load, accelerate's list of models starts with the trained models. Its
# list of optimizers has an entry for each trained model: one optimizer, or a tuple, which torch's state dicts accept.

Folder = str | os.PathLike[str]
_MODEL = "_fsdp_zpp_model"  # attribute of prepared optimizers


def model_of(optimizer: Optimizer, models: Sequence[nn.Module]) -> nn.Module:
    """Return the one of ``models`` that ``optimizer`` trains."""
    owners = {id(parameter): model for model in models for parameter in model.parameters()}
    parameters = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    if any(each not in owners for each in parameters):
        raise ValueError(
            "the optimizer has a parameter that is not a shard of the model: a forward leaves the root unsharded, so "
            "construct the optimizer before it, or after model.reshard()"
        )
    owned = dict.fromkeys(owners[each] for each in parameters)
    if len(owned) > 1:
        raise ValueError(
            f"the optimizer has parameters of {len(owned)} models, but save_state saves each optimizer with one: make "
            "an optimizer for each model, or make the models parts of one module, and prepare that"
        )
    return next(iter(owned), models[0])


@contextmanager
def paired(accelerator: Accelerator) -> Iterator[None]:
    """Return a context in which accelerate lists each trained model at the index of its optimizers."""
    trained: dict[nn.Module, list[Optimizer]] = {}
    for optimizer in accelerator._optimizers:
        trained.setdefault(getattr(optimizer, _MODEL), []).append(optimizer)
    models = [*trained, *(model for model in accelerator._models if model not in trained)]
    optimizers = [each[0] if len(each) == 1 else tuple(each) for each in trained.values()]
    with patch.multiple(accelerator, _models=models, _optimizers=optimizers):
        yield


def _codec_states(accelerator: Accelerator, folder: Folder) -> Iterator[tuple[nn.Module, Sequence[Optimizer], Path]]:
    """Yield each model that may have codec state, its optimizers, and the path that its codec state is saved beside."""
    # Models without optimizers are only evaluated, and have no codec state.
    optimizers: list[Optimizer | Sequence[Optimizer]] = accelerator._optimizers or [()]
    for index, (model, each) in enumerate(zip(accelerator._models, optimizers, strict=False)):
        own = [each] if isinstance(each, Optimizer) else list(each)
        yield model, own, Path(folder) / f"model_{index}" if index else Path(folder)


# ---- accelerator
#
# ``use_strategy``, and the subclass of an accelerator that it makes.

A = TypeVar("A", bound=Accelerator)


def use_strategy(accelerator: A, strategy: Strategy, *, plugin: FullyShardedDataParallelPlugin | None = None) -> A:
    """Make ``accelerator.prepare`` shard its model by ``strategy``.

    Each module that the plugin's policy wraps becomes a unit, and so does the model. Without a plugin, the policy wraps
    the layers that a model of transformers names (``_no_split_modules``), or else the entries of the outermost
    ``nn.ModuleList``s. If the strategy quantizes most of the model (``frozen=``), only the whole model becomes a unit:
    a quantized base is gathered layer by layer anyway. ``save_state`` and ``load_state`` include codec state.

    accelerate has one configuration per process, so every other Accelerator of the process uses FSDP2, too.

    Args:
        accelerator: An accelerator that has prepared nothing yet. It needs no plugin and no environment variable.
        strategy: Where each model state lives and how each hop is encoded.
        plugin: All other settings of FSDP. Default: the accelerator's own plugin, or one for FSDP2. On CPUs an
            accelerator drops the plugin that it was given, so pass it here.

    Returns:
        ``accelerator``, whose class is now a subclass of what it was.

    Raises:
        ImportError: If layers are to be compiled, and accelerate is too old for that.
        TypeError: If ``strategy`` is not a ``Strategy``.
        ValueError: If the accelerator has prepared a model, runs in one process, or was configured for what a strategy
            can't honour; the error says what to do instead.
    """
    check_strategy(strategy)
    if isinstance(accelerator, ShardingAccelerator):
        raise ValueError(f"this accelerator has a strategy already, {accelerator.strategy}")
    check_accelerator(accelerator)
    plugin = plugin or getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    check_plugin(plugin)
    # accelerate sets the type FSDP only if it sees a GPU, but FSDP runs on CPUs, too. Set it in the PartialState as
    # well: each prepared optimizer makes a new AcceleratorState, which copies the type from there.
    accelerator.state.fsdp_plugin = plugin
    accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    cls = type(accelerator)
    accelerator.__class__ = type(f"Strategy{cls.__name__}", (ShardingAccelerator, cls), {})
    accelerator.strategy = strategy
    accelerator.register_save_state_pre_hook(accelerator._save_codec_states)
    accelerator.register_load_state_pre_hook(accelerator._load_codec_states)
    return accelerator


class ShardingAccelerator(Accelerator):
    """Shards models by its ``strategy`` where accelerate would call torch's own ``fully_shard``."""

    strategy: Strategy
    _token = ""  # of the save in progress

    def prepare(self, *objects: object, device_placement: list[bool] | None = None) -> Any:
        # accelerate demands a model and its optimizer in one call, to give the optimizer the shards. Here either may
        # come alone: a model may only be evaluated, and an optimizer may be made from the shards later.
        kinds = [sum(isinstance(each, kind) for each in objects) for kind in (nn.Module, Optimizer)]
        if kinds[0] == 1 and kinds[1]:
            return super().prepare(*objects, device_placement=device_placement)
        if kinds[0] > 1 and kinds[1]:
            raise ValueError(
                "several models and optimizers were given, and nothing says which belong together: prepare each model "
                "with its optimizers in a call of its own"
            )
        if self.parallelism_config is not None and self.parallelism_config.cp_enabled:
            objects = self._prepare_cp(*objects)
        prepared = self._prepare_fsdp2(*objects)
        return prepared if len(prepared) > 1 else prepared[0]

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        shard(self, model, [], self.strategy, trained=not evaluation_mode)
        self._list(model)
        vars(model)["_is_accelerate_prepared"] = True
        return model

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        model = model_of(optimizer, self._models)
        prepared = super().prepare_optimizer(optimizer, device_placement)
        setattr(prepared, _MODEL, model)  # the optimizer is saved with this model
        return prepared

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        # accelerate's own method compares the list to each model's by ==, which may raise if both are equally long.
        self.unscale_gradients()
        parameters = list(parameters)
        if any(isinstance(each, DTensor) and each.device.type != each.device_mesh.device_type for each in parameters):
            # torch sums norms on the gradients' device, and NCCL reduces no CPU tensors.
            return clip_grad_norm_(parameters, max_norm, norm_type)
        # accelerate 1.15 has a method that takes plain gradients together with DTensors.
        clip = getattr(self, "_clip_grad_norm_dtensor_aware", nn.utils.clip_grad_norm_)
        return clip(parameters, max_norm, norm_type=norm_type)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Return full weights, with the quantized ones dequantized, on the CPU of rank 0. Collective.

        For a PEFT model, return the weights that its ``save_pretrained`` saves, without the base.
        """
        if is_peft_model(model):
            return adapter_state(model, ranks_of(model))
        weights: dict[str, Tensor] = super().get_state_dict(model, unwrap)
        return weights | dequantized_weights(model)

    def save_model(
        self,
        model: nn.Module,
        save_directory: Folder,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save full weights, as accelerate does, or the adapters of a PEFT model, as PEFT does. Collective."""
        if is_peft_model(model):
            save_adapter(model, save_directory, safe_serialization=safe_serialization)
        else:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)

    def save_state(self, output_dir: Folder | None = None, *arguments: object, **options: object) -> str:
        with paired(self), self._saving(output_dir) as save:
            self._token = "" if save is None else save.token
            folder: str = super().save_state(output_dir, *arguments, **options)
        return folder

    def load_state(self, input_dir: Folder | None = None, *arguments: object, **options: object) -> None:
        with paired(self):
            if (checkpoint := self._checkpoint_to_load(input_dir)) is not None:
                check_complete(checkpoint, models=max(len(self._optimizers), 1))
            super().load_state(input_dir, *arguments, **options)

    def _save_codec_states(self, models: list[nn.Module], weights: list[object], output_dir: Folder) -> None:
        for model, optimizers, checkpoint in _codec_states(self, output_dir):
            save_beside(model, optimizers, checkpoint, self._token)

    def _load_codec_states(self, models: list[nn.Module], input_dir: Folder) -> None:
        # accelerate passes the models that it has yet to load, none under FSDP; so ``models`` is ignored.
        for model, optimizers, checkpoint in _codec_states(self, input_dir):
            load_beside(model, optimizers, checkpoint)

    def _saving(self, output_dir: Folder | None) -> AbstractContextManager[MarkedSave | None]:
        if self.project_configuration.automatic_checkpoint_naming:
            if self.project_dir is None:
                return nullcontext()  # accelerate raises
            # accelerate saves only to a new folder, and counts the entries of its parent: the mark is beside that.
            return MarkedSave(Path(self.project_dir, "checkpoints", f"checkpoint_{self.save_iteration}"), place="above")
        return nullcontext() if output_dir is None else MarkedSave(Path(output_dir).expanduser(), place="inside")

    def _checkpoint_to_load(self, input_dir: Folder | None) -> Path | None:
        """Return the checkpoint that accelerate loads; None if it is going to raise."""
        if input_dir is not None:
            return Path(input_dir).expanduser()
        if self.project_dir is None or not self.project_configuration.automatic_checkpoint_naming:
            return None
        named = Path(self.project_dir, "checkpoints").glob("checkpoint_*")
        return max(named, key=lambda folder: int(folder.name.rpartition("_")[2]), default=None)

    def _prepare_tp(self, *objects: object) -> tuple[object, ...]:
        # accelerate's own method makes replicated parameters DTensors, by a class that transformers 5.24 lacks.
        for model in objects:
            if isinstance(model, nn.Module):
                check_tensor_parallel(model, self.torch_device_mesh)
        return objects

    def _prepare_fsdp2(self, *objects: object) -> tuple[object, ...]:
        optimizers = [each for each in objects if isinstance(each, Optimizer)]
        models = [each for each in objects if isinstance(each, nn.Module)]
        for model in models:
            shard(self, model, optimizers, self.strategy)
            self._list(model)
        # The second pass prepares schedulers, which need the prepared optimizers.
        return tuple(map(self._prepare_one, [self._prepare_one(each, first_pass=True) for each in objects]))

    def _list(self, model: nn.Module) -> None:
        if not any(prepared is model for prepared in self._models):
            self._models.append(model)
