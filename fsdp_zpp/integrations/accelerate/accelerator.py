"""``use_strategy``, and the subclass of an accelerator that it makes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from accelerate import Accelerator, DistributedType, PartialState
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import FullyShardedDataParallelPlugin, is_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_zpp.adapters.fsdp2.gradient_norm import clip_grad_norm_
from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.frozen.files.whole_state_dicts import dequantized_weights
from fsdp_zpp.frozen.hugging_face.peft_saving import adapter_state, save_adapter
from fsdp_zpp.integrations._cut_off_saves import MarkedSave, check_complete
from fsdp_zpp.runtime.model_ranks import ranks_of

from .checkpoints import load_codec_states, model_of, paired, remember_model, save_codec_states
from .checks import check_accelerator, check_plugin, check_tensor_parallel
from .wrapping import shard

A = TypeVar("A", bound=Accelerator)
Folder = str | os.PathLike[str]


def use_strategy(accelerator: A, strategy: Strategy, *, plugin: FullyShardedDataParallelPlugin | None = None) -> A:
    """Make ``accelerator.prepare`` shard its model by ``strategy``.

    Each module that the plugin's policy wraps becomes a unit, and the model another. Without a plugin those are the
    layers that a model of transformers names (``_no_split_modules``), or else the entries of the outermost
    ``nn.ModuleList``s. A model with a base that the strategy quantizes (``frozen=``) is wrapped once: such a base is
    gathered layer by layer anyway. ``save_state`` and ``load_state`` hold the codec state, too.

    accelerate keeps one configuration for a process, so any other Accelerator in it becomes one for FSDP2.

    Args:
        accelerator: An accelerator that has prepared nothing yet. It needs no plugin and no environment variable.
        strategy: Where each model state lives and how each hop is encoded.
        plugin: All other settings of FSDP. Default: the accelerator's own, or one for FSDP2. On CPUs an accelerator
            drops its plugin, so there it has to be given here.

    Returns:
        ``accelerator``, whose class is now a subclass of what it was.

    Raises:
        ImportError: If layers are to be compiled, and accelerate is too old for that.
        TypeError: If ``strategy`` is not a ``Strategy``.
        ValueError: If the accelerator has prepared a model, runs in one process, or was configured for what a strategy
            can't honour; the error says what to do instead.
    """
    if not isinstance(strategy, Strategy):
        raise TypeError(f"strategy must be a Strategy such as Strategy.zeropp(), got {strategy!r}")
    if isinstance(accelerator, ShardingAccelerator):
        raise ValueError(f"this accelerator has a strategy already, {accelerator.strategy}")
    check_accelerator(accelerator)
    plugin = plugin or getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    check_plugin(plugin)
    # accelerate chooses FSDP only where it sees a GPU; torch's FSDP, and all that depends on this, runs on CPUs, too.
    # Each AcceleratorState that is made, one with every optimizer, takes this from the PartialState.
    accelerator.state.fsdp_plugin = plugin
    accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    cls = type(accelerator)
    accelerator.__class__ = type(f"Strategy{cls.__name__}", (ShardingAccelerator, cls), {})
    accelerator.strategy = strategy
    accelerator.register_save_state_pre_hook(partial(save_codec_states, accelerator))
    accelerator.register_load_state_pre_hook(partial(load_codec_states, accelerator))
    return accelerator


class ShardingAccelerator(Accelerator):
    """Shards models by a strategy where accelerate would call torch's own ``fully_shard``.

    Attributes:
        strategy: The strategy.
    """

    strategy: Strategy

    def prepare(self, *objects: object, device_placement: list[bool] | None = None) -> Any:
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
        remember_model(prepared, model)
        return prepared

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        # accelerate's compares the parameters with those of each model, which fails if one has as many.
        self.unscale_gradients()
        parameters = list(parameters)
        if any(isinstance(each, DTensor) and each.device.type != each.device_mesh.device_type for each in parameters):
            # torch adds norms up where gradients are, and NCCL takes nothing from the CPU.
            return clip_grad_norm_(parameters, max_norm, norm_type)
        # accelerate 1.15 has a function of its own, which takes gradients that are no DTensors beside those that are.
        clip = getattr(self, "_clip_grad_norm_dtensor_aware", nn.utils.clip_grad_norm_)
        return clip(parameters, max_norm, norm_type=norm_type)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Return full weights, quantized ones dequantized, on the CPU of rank 0. Collective.

        For a PEFT model, these are the weights that its ``save_pretrained`` saves, without the base.
        """
        if is_peft_model(model):
            return adapter_state(model, ranks_of(model))
        weights: dict[str, Tensor] = super().get_state_dict(model, unwrap)
        return weights | dequantized_weights(model)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save full weights, as accelerate does, or the adapters of a PEFT model, as PEFT does. Collective."""
        if is_peft_model(model):
            save_adapter(model, save_directory, safe_serialization=safe_serialization)
        else:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)

    def save_state(self, output_dir: Folder | None = None, *arguments: object, **options: object) -> str:
        with paired(self), self._saving(output_dir):
            folder: str = super().save_state(output_dir, *arguments, **options)
        return folder

    def load_state(self, input_dir: Folder | None = None, *arguments: object, **options: object) -> None:
        if (checkpoint := self._checkpoint_to_load(input_dir)) is not None:
            check_complete(checkpoint)
        with paired(self):
            super().load_state(input_dir, *arguments, **options)

    def _saving(self, output_dir: Folder | None) -> AbstractContextManager[None]:
        if self.project_configuration.automatic_checkpoint_naming:
            if self.project_dir is None:
                return nullcontext()  # accelerate raises
            # It refuses to save into a folder that is there, and counts all that is beside it.
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
        # accelerate's makes copies on each rank DTensors, too, with a class that transformers 5.24 no longer has.
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
        # In two passes, since a scheduler is prepared for an optimizer that is prepared.
        return tuple(map(self._prepare_one, [self._prepare_one(each, first_pass=True) for each in objects]))

    def _list(self, model: nn.Module) -> None:
        if not any(prepared is model for prepared in self._models):
            self._models.append(model)
