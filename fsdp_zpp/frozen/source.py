"""Where weights are read from when the model has none: safetensors files, or a function."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from .weight import ReadRows

Source = str | os.PathLike[str] | Callable[[str], Tensor]
"""A safetensors file, an index of several, a folder with either, or a function of a parameter's name."""

_PEFT_PREFIX = "base_model.model."


class Checkpoint:
    """Weights in safetensors files, read slice by slice.

    Args:
        files: For each tensor its file.
    """

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files
        self._open: dict[Path, Any] = {}

    def check(self, names: Iterable[str]) -> None:
        """Raise for what is missing.

        Raises:
            ValueError: Naming it.
        """
        for name in names:
            if self._stored(name) is None:
                raise ValueError(
                    f"the checkpoint has no {stored_name(name)}; it has {', '.join(list(self._files)[:4])}, ..."
                )

    def reader(self, name: str, shape: torch.Size) -> ReadRows:
        """What reads rows of a weight."""
        part = self.slice(name)
        if tuple(part.get_shape()) != tuple(shape):
            raise ValueError(f"{name} is {tuple(shape)} in the model and {tuple(part.get_shape())} in the checkpoint")
        return lambda first, last: part[first:last]

    def read(self, name: str) -> Tensor | None:
        """A whole tensor, if there is one of this name."""
        return None if self._stored(name) is None else self.slice(name)[:]

    def load_left(self, model: nn.Module, device: torch.device | None) -> None:
        """Give values to the parameters and buffers of ``model`` that are still on the meta device."""
        load_left(model, device, self.read)

    def _stored(self, name: str) -> str | None:
        return next((key for key in (name, stored_name(name)) if key in self._files), None)

    def slice(self, name: str) -> Any:
        """A tensor, of which parts can be read."""
        key = self._stored(name)
        assert key is not None
        path = self._files[key]
        if path not in self._open:
            self._open[path] = safe_open(path, "pt")
        return self._open[path].get_slice(key)


class Generated:
    """Weights that a function makes, whole, one at a time."""

    def __init__(self, make: Callable[[str], Tensor]) -> None:
        self._make = make

    def check(self, names: Iterable[str]) -> None:
        """Whatever is asked for is made."""

    def reader(self, name: str, shape: torch.Size) -> ReadRows:
        """What makes rows of a weight."""

        def read(first: int, last: int) -> Tensor:
            whole = self._make(name)
            if whole.shape != shape:
                raise ValueError(f"{name} is {tuple(shape)} in the model, but was made as {tuple(whole.shape)}")
            return whole[first:last]

        return read

    def load_left(self, model: nn.Module, device: torch.device | None) -> None:
        """As :meth:`Checkpoint.load_left`."""
        load_left(model, device, self._make)


AnySource = Checkpoint | Generated


def source_from(checkpoint: Source) -> AnySource:
    """What ``checkpoint`` stands for.

    Raises:
        ValueError: If it is a path that holds no safetensors.
        TypeError: If it is neither path nor function.
    """
    if callable(checkpoint):
        return Generated(checkpoint)
    if not isinstance(checkpoint, (str, os.PathLike)):
        raise TypeError(f"checkpoint must be a path or a function of a parameter's name, got {checkpoint!r}")
    return Checkpoint(files_of(Path(checkpoint)))


def files_of(path: Path) -> dict[str, Path]:
    """For each tensor at ``path`` its file."""
    if path.is_dir():
        found = [*sorted(path.glob("*.safetensors.index.json")), *sorted(path.glob("*.safetensors"))]
        if not found:
            raise ValueError(f"{path} holds neither *.safetensors nor *.safetensors.index.json")
        path = found[0]
    if not path.exists():
        raise ValueError(f"there is no {path}")
    if path.name.endswith(".index.json"):
        where = json.loads(path.read_text())["weight_map"]
        return {name: path.parent / file for name, file in where.items()}
    with safe_open(path, "pt") as file:
        return dict.fromkeys(file.keys(), path)


def stored_name(name: str) -> str:
    """A parameter's name as the model without adapters has it."""
    return name.removeprefix(_PEFT_PREFIX).replace(".base_layer.", ".").replace(".original_module.", ".")


def load_left(model: nn.Module, device: torch.device | None, read: Callable[[str], Tensor | None]) -> None:
    """Give values to frozen parameters and persistent buffers that are on the meta device, if ``read`` has some."""
    device = device or torch.device("cpu")
    for path, module in model.named_modules():
        for name, old in list(module._parameters.items()):
            if old is None or not old.is_meta or old.requires_grad:
                continue
            value = read(f"{path}.{name}".removeprefix("."))
            if value is not None:
                fresh = nn.Parameter(value.to(device, old.dtype), requires_grad=False)
                _replace_everywhere(model, old, fresh)


def _replace_everywhere(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[name] = new
