"""Checks that files have every tensor that a model needs, in exactly its shape, before the model changes.

A tensor that a checkpoint lacks would stay as the constructor left it, random or on the meta device, and training would
continue without a warning. So that is an error, and all headers are compared before the first tensor is read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from fsdp_zpp.module_names import model_name
from fsdp_zpp.runtime.validation import DTYPES

from .model_tensors import ModelTensor, model_tensors
from .tensor_files import Header

_TIED = "accelerate's init_empty_weights has left them as separate tensors; call model.tie_weights() after it"


def match_keys(model: nn.Module, keys: Collection[str], where: str, remedy: str) -> list[tuple[ModelTensor, list[str]]]:
    """Return the tensors of ``model`` that files have, each with those of its names that are among ``keys``.

    Args:
        model: The model; not sharded.
        keys: The names of the tensors in the files.
        where: The files, as errors name them.
        remedy: What to do if the files lack a tensor, for errors.

    Raises:
        ValueError: If the model needs a tensor that the files lack, or is sharded.
    """
    refuse_sharded_tensors(model, where)
    stored = frozenset(keys)
    matches = [(tensor, [key for key in tensor.keys if key in stored]) for tensor in model_tensors(model)]
    missing = [tensor for tensor, names in matches if tensor.needs_a_value and not names]
    if missing:
        examples = ", ".join(list(keys)[:4])
        more = f" ({len(missing)} tensors of this {model_name(model)} are missing)" if len(missing) > 1 else ""
        raise ValueError(
            f"{where} has no {missing[0].name}; it has {examples}, ...{more}; {_tie_of(model, missing) or remedy}"
        )
    refuse_unfilled(model, [tensor for tensor, names in matches if not names])
    return [(tensor, names) for tensor, names in matches if names]


def refuse_unfilled(model: nn.Module, tensors: Iterable[ModelTensor]) -> None:
    """Raise if a non-persistent buffer of the base is on the meta device: no state dict has it, and so no file.

    Raises:
        ValueError: It names the buffer.
    """
    for tensor in tensors:
        if tensor.names and not tensor.persistent and tensor.tensor.is_meta:
            raise ValueError(
                f"{tensor.name} is on the meta device and in no checkpoint: it is a buffer that {model_name(model)} "
                "computes itself; construct the model with accelerate's init_empty_weights, which gives buffers their "
                "values, and call model.tie_weights() after it, or give the buffer its value first"
            )


def refuse_sharded_tensors(model: nn.Module, where: str) -> None:
    """Raise if FSDP has sharded any part of ``model``.

    Raises:
        ValueError: It names that part.
    """
    for path, module in model.named_modules():
        sharded = isinstance(module, (FullyShardedDataParallel, FSDPModule))
        if sharded or any(isinstance(parameter, DTensor) for parameter in module._parameters.values()):
            name = path or f"this {model_name(model)}"
            raise ValueError(f"{name} is already sharded; load {where} before you wrap the model")


def check_header(tensor: ModelTensor, key: str, header: Header, where: object) -> None:
    """Raise unless a stored tensor has exactly the shape of the model's, and a dtype that casts to its dtype.

    Args:
        tensor: The model's tensor.
        key: The name of the stored tensor.
        header: Its shape and dtype.
        where: Its file, as errors name it.

    Raises:
        ValueError: If it does not fit; the error names both shapes or both dtypes.
    """
    shape, dtype, stored = tuple(tensor.tensor.shape), tensor.tensor.dtype, header.dtype
    if header.shape != shape:
        raise ValueError(
            f"{key} is {shape} in the model and {header.shape} in {where}; give files of the same architecture"
        )
    # A cast between float and integer is refused, and so is a dtype by name (a string), such as fp8: its values mean
    # nothing without their scales.
    both_float = dtype.is_floating_point and stored in DTYPES
    both_integers = not dtype.is_floating_point and isinstance(stored, torch.dtype) and not stored.is_floating_point
    if stored != dtype and not both_float and not both_integers:
        raise ValueError(f"{key} is {dtype} in the model and {stored} in {where}; give files in {dtype}")


def _tie_of(model: nn.Module, missing: Iterable[ModelTensor]) -> str:
    """Return the remedy if a missing tensor should be tied to another one; empty if it should not."""
    for target, source in [tie for module in model.modules() for tie in _declared_ties(module)]:
        for name in [name for tensor in missing for name in tensor.names]:
            if any(re.search(f"(^|\\.){end}$", name) for end in (target, source)):
                return f"{type(model).__name__} ties {target} to {source}, but {_TIED}"
    return ""


def _declared_ties(module: nn.Module) -> list[tuple[str, str]]:
    """Return the ties that a transformers model declares, as pairs of a target and its source."""
    ties = getattr(module, "all_tied_weights_keys", None)
    if ties is None:
        config = getattr(module, "config", None)
        ties = getattr(module, "_tied_weights_keys", None) if getattr(config, "tie_word_embeddings", False) else None
    # transformers 4 has a list of targets, which does not tell their sources.
    return list(ties.items()) if isinstance(ties, dict) else []
