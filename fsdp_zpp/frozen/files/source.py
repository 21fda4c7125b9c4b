"""Sources of a model's weights, in full precision or quantized: safetensors files, or a function."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from fsdp_zpp.module_names import model_name

from ..stored.format import StoredWeight
from ..weight import ReadValues
from .completeness import check_header, match_keys, refuse_sharded_tensors, refuse_unfilled
from .decoded_files import DecodedFiles
from .expert_stacks import StackedFiles
from .model_tensors import ModelTensor, frozen_names, model_tensors
from .tensor_files import Header, TensorFiles, find_checkpoint, open_file, read_index

logger = logging.getLogger("fsdp_zpp")

Source = str | os.PathLike[str] | Callable[[str], Tensor]
"""A safetensors file, an index of several, a folder with either, or a function of a tensor's name."""

_REMEDY = "give a complete checkpoint of this model in safetensors, downloaded or converted again"
_COMPARED = 2**22
"""Values of each of two tensors that are compared at a time, which may be embeddings of gigabytes."""


class WeightSource(Protocol):
    """A source of a model's tensors."""

    def cover(self, model: nn.Module) -> list[ModelTensor]:
        """Return the tensors to read. Changes nothing.

        Raises:
            ValueError: If the source lacks a tensor that ``model`` needs, or has it in another shape or kind of dtype.
        """

    def reader(self, tensor: ModelTensor) -> ReadValues:
        """Return a function that reads values of ``tensor``."""

    def read(self, tensor: ModelTensor) -> Tensor:
        """Copy ``tensor``."""

    def stored(self, tensor: ModelTensor) -> StoredWeight | None:
        """Return ``tensor`` as it is stored; None if it is stored in full precision.

        Raises:
            NoStackError: If only its decoded values can be read.
        """

    def summary(self) -> str:
        """Return, as text, what must be the same on all ranks."""


class Checkpoint:
    """Weights in safetensors files.

    Args:
        path: A file, an index, or a folder with either.
        warns: Whether to warn of tensors that a model has no place for; set it on one rank only, or each rank warns.

    Raises:
        ValueError: If it holds no safetensors.
    """

    def __init__(self, path: Path, warns: bool) -> None:
        self._warns = warns
        self._source = find_checkpoint(path)
        if self._source.name.endswith(".index.json"):
            files, _ = read_index(self._source, _REMEDY)
        else:
            files = dict.fromkeys(open_file(self._source, _REMEDY).keys(), self._source)
        self._files = StackedFiles(DecodedFiles(TensorFiles(files, self._source, _REMEDY)))
        self._keys: dict[ModelTensor, str] = {}
        self._headers: list[tuple[str, Header, str]] = []

    def cover(self, model: nn.Module) -> list[ModelTensor]:
        matches = match_keys(model, self._files.keys, f"the checkpoint {self._source}", _REMEDY)
        for tensor, keys in matches:
            for key in keys:
                header = self._files.header(key)
                check_header(tensor, key, header, f"the checkpoint's {self._files.file_of(key)}")
                self._headers.append((key, header, self._files.description(key)))
            for other in keys[1:]:
                self._check_equal(model, keys[0], other)
            self._keys[tensor] = keys[0]
        if self._warns:
            self._warn_of_others(model)
        return list(self._keys)

    def reader(self, tensor: ModelTensor) -> ReadValues:
        key = self._keys[tensor]
        return lambda first, last: self._files.values(key, first, last)

    def read(self, tensor: ModelTensor) -> Tensor:
        return self._files.read(self._keys[tensor], tensor.tensor.dtype)

    def stored(self, tensor: ModelTensor) -> StoredWeight | None:
        return self._files.stored(self._keys[tensor])

    def summary(self) -> str:
        return repr(self._headers)

    def _check_equal(self, model: nn.Module, one: str, other: str) -> None:
        """Raise if two tensors that the model ties differ in the files: the model can have only one of their values."""
        shape = self._files.header(one).shape
        if not shape:
            same = torch.equal(self._files.read(one), self._files.read(other))
        else:
            numel = torch.Size(shape).numel()
            some = [(first, min(first + _COMPARED, numel)) for first in range(0, numel, _COMPARED)]
            same = all(torch.equal(self._files.values(one, *each), self._files.values(other, *each)) for each in some)
        if not same:
            raise ValueError(
                f"this {model_name(model)} ties {one} and {other}, but they differ in the checkpoint {self._source}; "
                "construct the model with tie_word_embeddings=False"
            )

    def _warn_of_others(self, model: nn.Module) -> None:
        """Warn of tensors that the model has no place for: the checkpoint may be of a larger model."""
        known = {key for tensor in model_tensors(model) for key in tensor.keys}
        known |= {name for names in frozen_names(model).values() for name in names}
        parts = {key: self._files.parts(key) for key in self._files.keys}
        used = {part for key in known & parts.keys() for part in parts[key]}
        # Matrices of a stack are used by the stack's name; a renamed key is not a tensor of its own.
        if others := [key for key, those in parts.items() if those == [key] and key not in used]:
            logger.warning(
                "%s: the checkpoint %s has %d tensors that the model has no place for: %s",
                model_name(model),
                self._source,
                len(others),
                ", ".join(others[:4]),
            )


class Generated:
    """Weights that a function returns, one at a time.

    Args:
        make: Returns all values of a tensor, by its name in the model without adapters.
    """

    def __init__(self, make: Callable[[str], Tensor]) -> None:
        self._make = make

    def cover(self, model: nn.Module) -> list[ModelTensor]:
        refuse_sharded_tensors(model, "a checkpoint")
        tensors = model_tensors(model)
        refuse_unfilled(model, tensors)
        return [tensor for tensor in tensors if tensor.needs_a_value]

    def reader(self, tensor: ModelTensor) -> ReadValues:
        # Made once for all of its values, and only when they are asked for.
        flat = functools.cache(lambda: self.read(tensor).reshape(-1))
        return lambda first, last: flat()[first:last]

    def read(self, tensor: ModelTensor) -> Tensor:
        try:
            value = self._make(tensor.name)
        except KeyError as error:
            raise ValueError(
                f"the checkpoint function has no {tensor.name} (KeyError: {error}); it is asked for all frozen "
                "parameters and persistent buffers and must return each of them"
            ) from error
        if not isinstance(value, Tensor):
            raise TypeError(f"the checkpoint function must return a tensor, got {value!r} for {tensor.name}")
        header = Header(tuple(value.shape), value.dtype)
        check_header(tensor, tensor.name, header, "what the checkpoint function returned")
        return value.detach().clone()

    def stored(self, tensor: ModelTensor) -> StoredWeight | None:
        return None

    def summary(self) -> str:
        return ""


def source_from(checkpoint: Source, warns: bool) -> WeightSource:
    """Return the source that the argument ``checkpoint`` describes; ``warns`` as for :class:`Checkpoint`.

    Raises:
        ValueError: If it is a path that holds no safetensors.
        TypeError: If it is neither a path nor a function.
    """
    if callable(checkpoint):
        return Generated(checkpoint)
    if not isinstance(checkpoint, (str, os.PathLike)):
        raise TypeError(f"checkpoint must be a path or a function of a parameter's name, got {checkpoint!r}")
    return Checkpoint(Path(checkpoint), warns)
