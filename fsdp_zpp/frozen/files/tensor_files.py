"""Safetensors files and their indexes. Whatever is read is validated; each error names the file and the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by their names in files. Others, such as fp8, are left out: they need scales that are stored elsewhere."""

OTHER_FILES = "read different files from"
"""What ranks did differently, for the error of :func:`fsdp_zpp.collectives.agreement.agree`."""
_INDEX = ".safetensors.index.json"
BASE_INDEX = f"frozen_base{_INDEX}"
"""The index of a quantized base, which is no checkpoint in full precision."""
_MODEL = ("model.safetensors", f"model{_INDEX}")
"""The files that transformers looks for, in its order."""


@dataclass(frozen=True)
class Header:
    """Shape and dtype of a stored tensor.

    Attributes:
        shape: The shape.
        dtype: The dtype, or its name in the file if that is not in :data:`DTYPES`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | str


class TensorFiles:
    """Tensors in safetensors files, read slice by slice.

    Args:
        files: The file of each tensor.
        source: The index, or the one file, that lists the tensors; named in errors.
        remedy: What to do about a broken file, for errors.
    """

    def __init__(self, files: dict[str, Path], source: Path, remedy: str) -> None:
        self.source = source
        self._files, self._remedy = files, remedy
        self._open: dict[Path, tuple[safe_open, set[str]]] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def file_of(self, key: str) -> Path:
        """Return the file of a tensor."""
        return self._files[key]

    def header(self, key: str) -> Header:
        """Return the shape and dtype of a tensor.

        Raises:
            ValueError: If its file is missing or broken, or has no such tensor.
        """
        part = self.slice(key)
        dtype = part.get_dtype()
        return Header(tuple(part.get_shape()), DTYPES.get(dtype, dtype))

    def slice(self, key: str) -> Any:
        """Return a tensor that reads parts when it is indexed; they alias the file. Raises what :meth:`header` does."""
        file, keys = self._opened(self._files[key])
        if key not in keys:
            raise ValueError(f"{self._files[key]} has no {key}, which {self.source} lists in it; {self._remedy}")
        return file.get_slice(key)

    def values(self, key: str, first: int, last: int) -> Tensor:
        """Read the flat values ``first`` to ``last - 1`` of a tensor, and of others only those in the same rows."""
        part = self.slice(key)
        shape = torch.Size(part.get_shape())
        if len(shape) < 3:
            return _values_of_rows(lambda begin, end: part[begin:end], shape[1:].numel(), first, last)
        size, pieces = shape[1:].numel(), []
        for matrix in range(first // size, -(-last // size)):
            start = matrix * size
            rows = partial(lambda matrix, begin, end: part[matrix : matrix + 1, begin:end], matrix)
            within = max(first - start, 0), min(last - start, size)
            pieces.append(_values_of_rows(rows, shape[2:].numel(), *within))
        return torch.cat(pieces)

    def read(self, key: str) -> Tensor:
        """Copy a tensor, since what is read is mapped memory, which changes with the file."""
        self.slice(key)  # raises if the file lacks it, with the remedy
        whole: Tensor = self._opened(self._files[key])[0].get_tensor(key)
        return whole.clone()

    def _opened(self, path: Path) -> tuple[safe_open, set[str]]:
        if path not in self._open:
            file = open_file(path, self._remedy, f", which {self.source} names" if path != self.source else "")
            self._open[path] = file, set(file.keys())
        return self._open[path]


def _values_of_rows(rows: Callable[[int, int], Tensor], columns: int, first: int, last: int) -> Tensor:
    """Read the flat values ``first`` to ``last - 1`` of a matrix, by a function that reads some of its rows."""
    begin = first // columns
    return rows(begin, -(-last // columns)).reshape(-1)[first - begin * columns : last - begin * columns]


def open_file(path: Path, remedy: str, named_by: str = "") -> safe_open:
    """Open a safetensors file.

    Raises:
        ValueError: If it is missing, truncated, or not a safetensors file.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}{named_by}; {remedy}")
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is not a complete safetensors file ({error}); {remedy}") from error


def read_index(path: Path, remedy: str) -> tuple[dict[str, Path], dict[str, object]]:
    """Return the file of each tensor, and the whole content of the index.

    Raises:
        ValueError: If it is not an index, or names files outside its folder.
    """
    try:
        index = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not an index of safetensors files ({error}); {remedy}") from error
    file_of = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(file_of, dict):
        raise ValueError(f"{path} is not an index of safetensors files: it has no weight_map; {remedy}")
    for key, file in file_of.items():
        if not isinstance(file, str) or not _is_inside(file):
            # An index that was downloaded must not make the process read other files of this machine.
            raise ValueError(f"{path} names {file!r} as the file of {key}, which is not in its folder; {remedy}")
    return {key: path.parent / file for key, file in file_of.items()}, index


def _is_inside(file: str) -> bool:
    """Return whether a relative path stays inside its folder, by the rules of both POSIX and Windows."""
    kinds = (PurePosixPath(file), PureWindowsPath(file))
    return bool(file) and all(not path.anchor and ".." not in path.parts for path in kinds)


def find_checkpoint(path: Path) -> Path:
    """Find the safetensors file or index to read for ``path``, which is a folder or a file.

    In a folder, it is ``model.safetensors`` or its index, as transformers writes and reads them; otherwise the only
    index or the only safetensors file that is not an adapter's.

    Args:
        path: The folder or file.

    Raises:
        ValueError: If there is no candidate, or more than one.
    """
    if not path.is_dir():
        if not path.exists():
            raise ValueError(f"there is no {path}; give a safetensors file, an index of several, or their folder")
        return path
    names = sorted(file.name for file in path.iterdir())
    prefix = BASE_INDEX.removesuffix(_INDEX)
    models = [name for name in names if not name.startswith((prefix, "adapter_"))]
    indexes = [name for name in models if name.endswith(_INDEX)]
    files = [name for name in models if name.endswith(".safetensors")]
    matches = [name for name in _MODEL if name in names][:1] or indexes or files  # an index before the files it lists
    if len(matches) == 1:
        return path / matches[0]
    if matches:
        several = ", ".join(matches[:4])
        raise ValueError(f"{path} has no {' or '.join(_MODEL)}, but {several}, ...; give the path of one of them")
    if BASE_INDEX in names:
        raise ValueError(f"{path} holds a base that is already quantized; load it with load_frozen_params")
    adapter = next((name for name in names if name.endswith(".safetensors")), None)
    exception = "" if adapter is None else f", but for {adapter}, which is an adapter's"
    raise ValueError(f"{path} holds neither *.safetensors nor *{_INDEX}{exception}; give the folder of the base")
