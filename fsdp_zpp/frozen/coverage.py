"""Whether files have all that a model needs, tensor for tensor, in exactly its shape; before anything is changed.

What a checkpoint lacks would stay as the constructor left it, at random or on the meta device, and train on without a
word. So that is an error, and everything is compared before the first tensor is read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ..support import DTYPES, model_name
from .model_tensors import ModelTensor, model_tensors
from .tensor_files import Header

_TIED = "they are two tensors now, as accelerate's init_empty_weights leaves them: call model.tie_weights() after it"


def found_in(model: nn.Module, keys: Collection[str], where: str, remedy: str) -> list[tuple[ModelTensor, list[str]]]:
    """The tensors of ``model`` that ``keys`` has, and by which of their names.

    Args:
        model: The model; not sharded.
        keys: What there is.
        where: What has them, in errors.
        remedy: What to do if it lacks some.

    Raises:
        ValueError: If the model needs others, or is sharded.
    """
    refuse_sharded_tensors(model, where)
    there = frozenset(keys)
    found = [(tensor, [key for key in tensor.keys if key in there]) for tensor in model_tensors(model)]
    missing = [tensor for tensor, those in found if tensor.needs_a_value and not those]
    if missing:
        known = ", ".join(list(keys)[:4])
        more = f" ({len(missing)} tensors of this {model_name(model)} are missing)" if len(missing) > 1 else ""
        raise ValueError(
            f"{where} has no {missing[0].name}; it has {known}, ...{more}; {_tie_of(model, missing) or remedy}"
        )
    refuse_unfilled(model, [tensor for tensor, those in found if not those])
    return [(tensor, those) for tensor, those in found if those]


def refuse_unfilled(model: nn.Module, tensors: Iterable[ModelTensor]) -> None:
    """Raise for a buffer of the base on the meta device that no file has, as state dicts don't.

    Raises:
        ValueError: Naming it.
    """
    for tensor in tensors:
        if tensor.names and not tensor.persistent and tensor.tensor.is_meta:
            raise ValueError(
                f"{tensor.name} is on the meta device and no checkpoint has it, as it is a buffer that "
                f"{model_name(model)} computes itself; construct the model with accelerate's init_empty_weights, which "
                "leaves buffers, and call model.tie_weights() after it, or give the buffer its value first"
            )


def refuse_sharded_tensors(model: nn.Module, where: str) -> None:
    """Raise if FSDP has sharded anything of ``model``.

    Raises:
        ValueError: Naming it.
    """
    for path, module in model.named_modules():
        sharded = isinstance(module, (FullyShardedDataParallel, FSDPModule))
        if sharded or any(isinstance(parameter, DTensor) for parameter in module._parameters.values()):
            name = path or f"this {model_name(model)}"
            raise ValueError(f"{name} is sharded already; load {where} before you wrap the model")


def check_header(tensor: ModelTensor, key: str, header: Header, where: object) -> None:
    """Raise unless a stored tensor is what the model has: exactly the shape, and a dtype of its kind.

    Args:
        tensor: The model's.
        key: The stored one's name.
        header: What is stored.
        where: Its file.

    Raises:
        ValueError: Naming both.
    """
    shape, ours, theirs = tuple(tensor.tensor.shape), tensor.tensor.dtype, header.dtype
    if header.shape != shape:
        raise ValueError(
            f"{key} is {shape} in the model and {header.shape} in {where}; give the files of this very architecture"
        )
    both_float = ours.is_floating_point and theirs in DTYPES
    both_integers = not ours.is_floating_point and isinstance(theirs, torch.dtype) and not theirs.is_floating_point
    if theirs != ours and not both_float and not both_integers:
        raise ValueError(f"{key} is {ours} in the model and {theirs} in {where}; give files in {ours}")


def _tie_of(model: nn.Module, missing: Iterable[ModelTensor]) -> str:
    """What to say of a missing tensor that the model should share with another one."""
    for target, source in [tie for module in model.modules() for tie in _declared_ties(module)]:
        for name in [name for tensor in missing for name in tensor.names]:
            if any(re.search(f"(^|\\.){end}$", name) for end in (target, source)):
                return f"{type(model).__name__} ties {target} to {source}, but {_TIED}"
    return ""


def _declared_ties(module: nn.Module) -> list[tuple[str, str]]:
    """What a transformers model says of its ties: which weight to which."""
    ties = getattr(module, "all_tied_weights_keys", None)
    if ties is None:
        config = getattr(module, "config", None)
        ties = getattr(module, "_tied_weights_keys", None) if getattr(config, "tie_word_embeddings", False) else None
    return list(ties.items()) if isinstance(ties, dict) else []
