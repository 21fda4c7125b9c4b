"""``save_state`` and ``load_state`` of several models and optimizers.

accelerate saves its optimizer number i with its model number i. But models that are evaluated only have no optimizer,
and others have several. So while it saves and loads, its models are those that are trained, then the others, and each
of its optimizers is all of one model's: torch's state dicts take several for one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from fsdp_zpp.integrations._base_files import check_base_identity, save_base_identity
from fsdp_zpp.integrations._codec_files import load_codec_state, save_codec_state

_MODEL = "_fsdp_zpp_model"
"""Attribute of prepared optimizers: their model."""


def model_of(optimizer: Optimizer, models: Sequence[nn.Module]) -> nn.Module:
    """Return the one of ``models`` that ``optimizer`` trains.

    Raises:
        ValueError: If it has parameters of several models, or parameters that are not their shards.
    """
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


def remember_model(optimizer: Optimizer, model: nn.Module) -> None:
    """Record that :func:`paired` saves a prepared optimizer with ``model``."""
    setattr(optimizer, _MODEL, model)


@contextmanager
def paired(accelerator: Accelerator) -> Iterator[None]:
    """Return a context in which each model is where its optimizers are. See the top of this file."""
    models, optimizers = accelerator._models, accelerator._optimizers
    trained: dict[nn.Module, list[Optimizer]] = {}
    for optimizer in optimizers:
        trained.setdefault(getattr(optimizer, _MODEL), []).append(optimizer)
    accelerator._models = [*trained, *(model for model in models if model not in trained)]
    accelerator._optimizers = [each[0] if len(each) == 1 else tuple(each) for each in trained.values()]
    try:
        yield
    finally:
        accelerator._models, accelerator._optimizers = models, optimizers


def save_codec_states(
    accelerator: Accelerator, models: list[nn.Module], weights: list[object], output_dir: str | os.PathLike[str]
) -> None:
    """Save the codec state of all models, in a hook of ``save_state``, which :func:`paired` surrounds."""
    for model, optimizers, checkpoint in _codec_states(accelerator, output_dir):
        save_base_identity(model, checkpoint)
        save_codec_state(model, optimizers, checkpoint)


def load_codec_states(accelerator: Accelerator, models: list[nn.Module], input_dir: str | os.PathLike[str]) -> None:
    """Load the codec state of all models, in a hook of ``load_state``, which :func:`paired` surrounds."""
    # accelerate hands over the models that are still to be loaded, which is none under FSDP.
    for model, optimizers, checkpoint in _codec_states(accelerator, input_dir):
        check_base_identity(model, checkpoint)
        load_codec_state(model, optimizers, checkpoint)


def _codec_states(
    accelerator: Accelerator, folder: str | os.PathLike[str]
) -> Iterator[tuple[nn.Module, Sequence[Optimizer], Path]]:
    """Yield the models that may have codec state, their optimizers, and the checkpoint that it lies next to."""
    # Models without optimizers are there to be evaluated, and keep nothing from step to step.
    optimizers: list[Optimizer | Sequence[Optimizer]] = accelerator._optimizers or [()]
    for index, (model, each) in enumerate(zip(accelerator._models, optimizers, strict=False)):
        own = [each] if isinstance(each, Optimizer) else list(each)
        yield model, own, Path(folder) / f"model_{index}" if index else Path(folder)
