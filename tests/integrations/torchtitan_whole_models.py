"""Trainings by torchtitan of which all, adapters or a part is trained, saved in all ways, for ``torchtitan_on_cpu``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torchtitan.components.lora import LoRAConverter
from torchtitan.config import ConfigManager
from torchtitan.models.llama3 import parallelize_llama
from torchtitan.trainer import Trainer
from torchtitan_training import small_config

from fsdp_zpp.integrations.torchtitan import with_strategy


def full() -> Trainer.Config:
    """Return a configuration in which all is trained."""
    return with_strategy(small_config(), None)


def lora() -> Trainer.Config:
    """Return a configuration with torchtitan's adapters."""
    config = small_config()
    assert config.model_spec is not None
    converter = LoRAConverter.Config(target_modules=["wo", "w1", "w2"]).build()
    config.model_spec = replace(config.model_spec, model=converter.convert(config.model_spec.model))
    return with_strategy(config, None)


def partly_frozen() -> Trainer.Config:
    """Return a configuration with embedding and attention frozen, by a user's own function."""
    config = with_strategy(small_config(), None)
    assert config.model_spec is not None
    config.model_spec = replace(config.model_spec, parallelize_fn=_freeze_and_parallelize)
    return config


def _freeze_and_parallelize(model: Any, **arguments: Any) -> nn.Module:
    for module in (model.tok_embeddings, model.layers["0"].attention):
        module.requires_grad_(False)
    return parallelize_llama(model, **arguments)


def build(config: str, folder: Path, *options: str) -> Trainer:
    """Return the trainer of a configuration of this module."""
    flags = ["--module", __name__, "--config", config, "--dump_folder", str(folder), *options]
    return ConfigManager().parse_args(flags).build()


def logits_of(model: nn.Module) -> Tensor:
    """Return what a model answers, on the CPU."""
    tokens = torch.arange(1, 13, device=next(model.parameters()).device).view(1, -1)
    with torch.no_grad():
        return model(tokens).cpu()


def trained(config: str, folder: Path, *options: str) -> dict[int, Tensor]:
    """Train, and return what the model answers after each step that is saved, and before all of them."""
    trainer = build(config, folder, *options)
    model, save = trainer.model_parts[0], trainer.checkpointer.save
    answers = {}

    def watched(step: int, last_step: bool = False) -> bool:
        if done := save(step, last_step):
            answers[step] = logits_of(model)
        return done

    load = trainer.checkpointer.load

    def watched_load(step: int = -1) -> bool:
        done = load(step)
        answers[0] = logits_of(model)
        return done

    # torchtitan's loop waits for two seconds at its end.
    with (
        mock.patch.object(trainer.checkpointer, "save", watched),
        mock.patch.object(trainer.checkpointer, "load", watched_load),
        mock.patch("time.sleep"),
    ):
        trainer.train()
    trainer.close()
    return answers


def loaded(config: str, folder: Path, checkpoints: list[Path]) -> list[Tensor]:
    """Return what a model that is not sharded answers with all that is in each checkpoint."""
    trainer = build(config, folder, "--parallelism.strategy", "None")
    model = trainer.model_config.build()
    trainer.close()
    with torch.no_grad():
        model.init_states(buffer_device=None)
        for parameter in model.parameters():
            parameter.zero_()  # nothing of which is to stay
    answers = []
    for checkpoint in checkpoints:
        state = model.state_dict()
        dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
        model.load_state_dict(state)
        answers.append(logits_of(model))
    return answers


def refusal(config: str, folder: Path, *options: str) -> str:
    """Return what a trainer that is to be refused raises."""
    try:
        build(config, folder, *options)
    except ValueError as error:
        return str(error)
    raise AssertionError(f"{options} were accepted")
