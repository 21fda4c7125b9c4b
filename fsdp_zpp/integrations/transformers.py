"""Hugging Face's ``Trainer``, and trainers derived from it such as TRL's ``SFTTrainer``, with a strategy.

    trainer = use_strategy(Trainer(model, arguments, ...), Strategy.zeropp())
    trainer.train(resume_from_checkpoint=True)

For a trainer that prepares a reference model in its constructor, such as TRL's ``DPOTrainer``, pass the class:

    trainer = use_strategy(DPOTrainer, Strategy.zeropp())(model, reference, arguments, ...)

Pass the model unsharded, with or without adapters. Checkpoints are Trainer's own for FSDP2, plus codec state; with PEFT
they leave out the base. They are sharded unless ``TrainingArguments`` ask for FSDP with full state dicts.
integrations/accelerate.py shards the model when training or the first evaluation begins.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from torch import Tensor, nn
from torch.distributed.fsdp import StateDictType
from torch.optim import Optimizer

from fsdp_zpp._torch_compat import replace_function
from fsdp_zpp.frozen.hugging_face import as_plain, peft_model_in
from fsdp_zpp.fsdp2.fully_shard import check_strategy
from fsdp_zpp.inference_weights import gathered_weights
from fsdp_zpp.runtime.api import invalidate, members
from fsdp_zpp.runtime.full_tensors import reshard
from fsdp_zpp.runtime.unit import named_units
from fsdp_zpp.strategy.strategy import Strategy

from ._common import MarkedSave, check_complete, load_beside, require, save_beside

require("transformers", "5.16")

from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils, is_peft_model
from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from . import accelerate as sharding
from .accelerate import ShardingAccelerator

# ---- writes of callbacks
#
# A Trainer's callbacks may write to models that they hold: TRL's ``SyncRefModelCallback`` averages weights into a
# reference model. A script can't call ``invalidate`` after a callback. But all ranks run the same callbacks, so every
# model that a callback holds is resharded after an optimizer step, and invalidated before the next step or evaluation.


class AnnouncesWrites(TrainerCallback):
    """Invalidates the weights of all models that other callbacks hold."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_optimizer_step(self, *arguments: object, **others: object) -> None:
        for model in self._callback_models():
            reshard(model)

    def on_step_begin(self, *arguments: object, **others: object) -> None:
        self.announce()

    def announce(self) -> None:
        for model in self._callback_models():
            invalidate(model)

    def _callback_models(self) -> Iterator[nn.Module]:
        for callback in self._trainer.callback_handler.callbacks:
            for value in vars(callback).values():
                # The trained model's weights are stale after each step anyway.
                if isinstance(value, nn.Module) and value is not self._trainer.model and named_units(value):
                    yield value


# ---- trl
#
# TRL's trainers shard reference models in their constructors, and send weights to vLLM. Patched, they use a strategy.
#
# TRL's ``prepare_fsdp``, which its modules import by name, calls torch's ``fully_shard``. ``VLLMGeneration`` gets full
# parameters from its ``_iter_named_params``, both for a server and for an engine in the same process.

NamedTensors = Iterator[tuple[str, Tensor]]


def _replace_function(holder: object, name: str, make: Callable[[Any], Any]) -> None:
    """Replace the function ``name`` of a module or class, if it has one, by ``make(original)``; do so only once."""
    if hasattr(holder, name):
        replace_function(holder, name, make)


def prepare_by_strategy(trainer: type) -> None:
    """Replace TRL's functions that shard reference models or send weights, in modules that ``trainer`` uses."""
    for cls in trainer.__mro__:
        if cls.__module__.startswith("trl."):
            _replace_function(sys.modules.get(cls.__module__), "prepare_fsdp", _preparing)
    # TRL's own function needs DTensor parameters, and merges adapters in place. But a quantized base has no parameters,
    # and a layer that the last forward left unsharded has no DTensors.
    generation = sys.modules.get("trl.generation.vllm_generation")
    _replace_function(getattr(generation, "VLLMGeneration", None), "_iter_named_params", _gathering)


def _preparing(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return a function of a model and an accelerator, in either order, that shards by the accelerator's strategy."""

    def prepare(*both: Any) -> nn.Module:
        model, accelerator = sorted(both, key=lambda each: isinstance(each, Accelerator))
        if not isinstance(accelerator, ShardingAccelerator):
            return original(*both)
        return accelerator.prepare_model(model, evaluation_mode=True).eval()

    return prepare


def _gathering(original: Callable[[Any], NamedTensors]) -> Callable[[Any], NamedTensors]:
    def iterate(generation: Any) -> NamedTensors:
        if not isinstance(generation.accelerator, ShardingAccelerator):
            return original(generation)
        return _each_once(gathered_weights(generation.model, merged=is_peft_model(generation.model)))

    return iterate


def _each_once(weights: NamedTensors) -> NamedTensors:
    """Yield each tied tensor under its first name only; vLLM ties weights itself."""
    previous = None
    for name, tensor in weights:
        if tensor is not previous:
            yield name, tensor
        previous = tensor


def prepare_references_by_strategy() -> None:
    """Replace accelerate's ``fsdp2_prepare_model``, so that an accelerator with a strategy shards by that strategy.

    LLaMA-Factory's and ms-swift's trainers call the function for reference models, in their constructors.
    """
    _replace_function(fsdp_utils, "fsdp2_prepare_model", _preparing)


# ---- transformers

T = TypeVar("T", bound=Trainer | type[Trainer])

_FULL_ADAPTERS = (
    "for checkpoints of adapters with FULL_STATE_DICT (fsdp_config={'state_dict_type': 'SHARDED_STATE_DICT'} needs no "
    "newer one)"
)


def use_strategy(trainer: T, strategy: Strategy) -> T:
    """Make ``trainer`` shard its model by ``strategy``, for training and evaluation.

    ``TrainingArguments`` need not mention FSDP, but then Trainer moves the whole model to the GPU first. With
    ``fsdp=True`` the model stays on its device until it is sharded, so it need not fit on one GPU. Then ``fsdp_config``
    applies (what to wrap, for example), and checkpoints have full state dicts unless it sets ``state_dict_type``.

    Args:
        trainer: A trainer that has neither trained nor evaluated yet, or a class of trainers. Pass the class for
            a trainer of TRL whose constructor prepares a reference or teacher model.
        strategy: Where each model state lives and how each hop is encoded.

    Returns:
        For a trainer, the same object, which now has a subclass of its former class. For a class, a subclass of it,
        whose instances use ``strategy`` to shard all models that they prepare.

    Raises:
        ImportError: If the trainer's settings need a newer accelerate.
        TypeError: If ``strategy`` is not a ``Strategy``, or a class is not derived from ``Trainer``.
        ValueError: If the trainer has settings that a strategy can't honour; the error says what to do instead. If a
            class was passed, the constructor of the returned class raises it.
    """
    if isinstance(trainer, type):
        return _subclass(trainer, strategy)  # type: ignore[no-any-return]
    if isinstance(trainer, ShardingTrainer):
        raise ValueError(f"this trainer has a strategy already, {trainer.strategy}")
    _shard_by(trainer, strategy)
    trainer.__class__ = _subclass(type(trainer), strategy)
    trainer._announce_writes()  # type: ignore[attr-defined]  # of its new class
    return trainer


def _subclass(cls: type, strategy: Strategy) -> Any:
    if not issubclass(cls, Trainer):
        raise TypeError(f"use_strategy takes a Trainer or a class derived from it, got {cls.__name__}")
    if issubclass(cls, ShardingTrainer):
        raise ValueError(f"the class {cls.__name__} has a strategy already, {cls.strategy}")
    check_strategy(strategy)
    prepare_by_strategy(cls)
    return type(f"Strategy{cls.__name__}", (ShardingTrainer, cls), {"strategy": strategy, "__module__": cls.__module__})


def _shard_by(trainer: Trainer, strategy: Strategy) -> None:
    if getattr(trainer.model, "is_distributed_loading_by_transformers", False):
        raise ValueError(
            "this model was sharded by from_pretrained(distributed_config=...), and a strategy would shard it again: "
            "load it without distributed_config"
        )
    if trainer.args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size=True repeats a step that ran out of memory, but a sharded model can't restart in the "
            "middle of a step: leave it out, and choose per_device_train_batch_size"
        )
    plugin, arguments = None, trainer.args.fsdp_plugin_args
    if arguments is not None and not trainer.is_fsdp_enabled:
        plugin = FullyShardedDataParallelPlugin(**arguments)  # on a CPU, accelerate drops the plugin
    sharding.use_strategy(trainer.accelerator, strategy, plugin=plugin)
    trainer.is_fsdp_enabled = True
    state_dict_type = trainer.accelerator.state.fsdp_plugin.state_dict_type
    if trainer.args.save_only_model and (
        trainer.args.load_best_model_at_end or state_dict_type == StateDictType.SHARDED_STATE_DICT
    ):
        raise ValueError(
            "save_only_model=True saves one file of full weights, and training can't resume from it: leave it out, or "
            'pass fsdp=True, fsdp_config={"state_dict_type": "FULL_STATE_DICT"} without load_best_model_at_end'
        )
    saves = trainer.args.save_strategy != "no"
    if saves and is_peft_model(trainer.model) and state_dict_type == StateDictType.FULL_STATE_DICT:
        # Older versions silently save only rank 0's shards of adapters, and load them only on rank 0.
        require("accelerate", "1.15", purpose=_FULL_ADAPTERS)


class ShardingTrainer(Trainer):
    """A Trainer that shards its model by its ``strategy``."""

    strategy: Strategy
    model: nn.Module  # None only before a hyperparameter search
    _writes: AnnouncesWrites
    _saves_checkpoint = False
    _marked_save: MarkedSave | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._announce_writes()

    def _announce_writes(self) -> None:
        self._writes = AnnouncesWrites(self)
        self.add_callback(self._writes)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # runs for each trial of a hyperparameter search
        _shard_by(self, self.strategy)

    def evaluation_loop(self, *arguments: Any, **options: Any) -> Any:
        self._writes.announce()  # callbacks may have written since the last step began
        return super().evaluation_loop(*arguments, **options)

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        """Run a micro-batch's forward and backward. An elastic node that joins others takes over their step count."""
        loss: Tensor = super().training_step(*arguments, **options)
        if self.strategy.local_steps is not None and self.strategy.local_steps.elastic is not None:
            step = members(self.model).step
            scheduler: Any = self.lr_scheduler
            for _ in range(self.state.global_step, step):
                scheduler.step()
            self.state.global_step = max(self.state.global_step, step)
        return loss

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        reshard(self.model)  # an evaluation may have left it unsharded
        return super().create_optimizer(*(() if model is None else (model,)))  # a user's own may take no argument

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        token = "" if self._marked_save is None else self._marked_save.token
        save_beside(self.model, filter(None, [self.optimizer]), Path(output_dir), token)

    def _save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        with patch.multiple(self, _saves_checkpoint=True, _marked_save=None):  # a failed save stays marked
            super()._save_checkpoint(*arguments, **options)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._marked_save is not None:
            self._marked_save.complete()  # before Trainer removes earlier checkpoints
            self._marked_save = None

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **options: Any) -> Any:
        last = resume_from_checkpoint is True and get_last_checkpoint(self.args.output_dir)
        if isinstance(checkpoint := last or resume_from_checkpoint, str):
            check_complete(Path(checkpoint), written_last=TRAINER_STATE_NAME)
        return super().train(resume_from_checkpoint, *arguments, **options)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            load_beside(self.model, filter(None, [self.optimizer]), Path(checkpoint))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as ``from_pretrained`` reads it, or adapters as PEFT reads them. Collective.

        With sharded state dicts, Trainer saves no such file; this method does, but not in checkpoints without adapters.
        """
        # Trainer records a checkpoint as the best one only if its folder exists. Without this line, the first write
        # makes the folder, and other ranks may look for the folder too early.
        if (folder := output_dir or self.args.output_dir) is not None:
            os.makedirs(folder, exist_ok=True)
        if self._saves_checkpoint and output_dir is not None and not self.args.save_only_model:
            self._marked_save = MarkedSave(Path(output_dir), place="inside", written_last=TRAINER_STATE_NAME)
        whole = is_peft_model(self.model) or not _internal_call
        with _with_full_state_dicts(self.accelerator) if whole else nullcontext():
            super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        is_peft = is_peft_model(self.model)
        with as_plain(peft_model_in(self.model), state_dict) if state_dict is not None and is_peft else nullcontext():
            super()._save(output_dir, state_dict)

    def push_to_hub(self, *arguments: Any, **options: Any) -> Any:
        with _with_full_state_dicts(self.accelerator):
            return super().push_to_hub(*arguments, **options)


def _with_full_state_dicts(accelerator: Accelerator) -> AbstractContextManager[None]:
    return patch.multiple(accelerator.state.fsdp_plugin, state_dict_type=StateDictType.FULL_STATE_DICT)
