"""Tensors of a checkpoint, of which some are stored quantized: they are shown, and read, as what they decode to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ..stored.detect import find_stored, read_config
from ..stored.format import StoredWeight, stored_in
from .tensor_files import Header, TensorFiles

_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu}
"""Dtypes that have no meaning without scales."""


class DecodedFiles:
    """Tensors in files, with those that make up a quantized weight as one, under the weight's name.

    Args:
        files: The files.

    Raises:
        ValueError: If a quantized weight is incomplete, or the checkpoint is quantized in an unknown way.
    """

    def __init__(self, files: TensorFiles) -> None:
        self.source = files.source
        self._files = files
        config = read_config(files.source)
        try:
            self._stored = find_stored(_Described(files), config)
        except ValueError as error:
            raise ValueError(f"{files.source}: {error}") from error
        parts = {key for stored in self._stored.values() for key in stored.keys.values()}
        self._keys = dict.fromkeys([key for key in files if key not in parts] + list(self._stored))

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def stored(self, key: str) -> StoredWeight | None:
        """Return a weight that is stored quantized; None for any other tensor."""
        if key not in self._stored:
            return None
        stored = self._stored[key]
        return stored_in(stored, {role: self._files.slice(name) for role, name in stored.keys.items()})

    def description(self, key: str) -> str:
        """Return how a tensor is stored, as text."""
        return self._stored[key].description if key in self._stored else "as it is"

    def file_of(self, key: str) -> Path:
        """Return the file of a tensor."""
        return self._files.file_of(self._first(key))

    def header(self, key: str) -> Header:
        """Return the decoded shape and dtype of a tensor; raises as :meth:`TensorFiles.header`."""
        if key not in self._stored:
            return self._files.header(key)
        return Header(tuple(self._stored[key].shape), self._stored[key].dtype)

    def values(self, key: str, first: int, last: int) -> Tensor:
        """Read the flat values ``first`` to ``last - 1`` of a tensor, fp32 if it is stored quantized."""
        stored = self.stored(key)
        return self._files.values(key, first, last) if stored is None else stored.values(first, last)

    def read(self, key: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Copy a tensor, in ``dtype`` if it is stored quantized, so that its values are rounded once."""
        stored = self.stored(key)
        if stored is None:
            return self._files.read(key)
        return stored.values(0, stored.shape.numel(), dtype).view(stored.shape)

    def _first(self, key: str) -> str:
        return next(iter(self._stored[key].keys.values())) if key in self._stored else key


class _Described:
    """Shapes and dtypes of tensors in files, for the formats; see ``StoredTensors``."""

    def __init__(self, files: TensorFiles) -> None:
        self._files = files

    def __contains__(self, key: str) -> bool:
        return key in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._files.header(key).shape

    def dtype(self, key: str) -> torch.dtype | str:
        """Return the dtype of a tensor, or its name if torch has none."""
        dtype = self._files.header(key).dtype
        return _DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype

    def read(self, key: str) -> Tensor:
        """Return a tensor."""
        return self._files.read(key)
