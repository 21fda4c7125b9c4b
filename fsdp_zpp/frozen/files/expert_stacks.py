"""Experts of MoE layers, which checkpoints store as single matrices and models of transformers as stacks.

A model's ``mlp.experts.gate_up_proj`` has the shape ``[experts, gate and up, width]``. Files have
``mlp.experts.0.gate_proj.weight`` and so on, as models had before transformers 5, and as transformers still saves them.
The matrices of a stack are put together as they are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from ..stored.format import StoredWeight, stacked
from .decoded_files import DecodedFiles
from .tensor_files import Header

_EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(.+)")
_PARTS = {
    "gate_up_proj": (("gate_proj.weight", "up_proj.weight"), ("w1.weight", "w3.weight")),
    "down_proj": (("down_proj.weight",), ("w2.weight",)),
}
"""For each stack, the stored matrices that form one of its matrices, top to bottom; the second way is Mixtral's."""

_MIXTRAL = (".block_sparse_moe.", ".mlp.")
"""The name of Mixtral's MoE layer in files and in models."""


class StackedFiles:
    """Tensors in files, and stacks that are assembled from them.

    Args:
        files: The files.
    """

    def __init__(self, files: DecodedFiles) -> None:
        self.source = files.source
        self._files = files
        self._stacks = _stacks_in(files)
        self._renamed = {key.replace(*_MIXTRAL): key for key in files if _MIXTRAL[0] in key}

    @property
    def keys(self) -> list[str]:
        """Return the names of all tensors, and of all stacks that can be assembled."""
        return list(dict.fromkeys([*self._files, *self._stacks, *self._renamed]))

    def parts(self, key: str) -> list[str]:
        """Return the names in the files of the tensors that ``key`` is read from."""
        # Here and below, a tensor that the files store under this very name takes precedence over an assembled stack.
        if key in self._files:
            return [key]
        return (
            [part for matrix in self._stacks[key] for part in matrix] if key in self._stacks else [self._renamed[key]]
        )

    def description(self, key: str) -> str:
        """Return how a tensor, or the first part of it, is stored, as text."""
        return self._files.description(self.parts(key)[0])

    def file_of(self, key: str) -> object:
        """Return the file of a tensor, or of the first part of it."""
        return self._files.file_of(self.parts(key)[0])

    def header(self, key: str) -> Header:
        """Return the shape and dtype of a tensor.

        Raises:
            ValueError: As :meth:`TensorFiles.header`, and if the matrices of a stack differ in shape or dtype.
        """
        if key not in self._stacks or key in self._files:
            return self._files.header(self.parts(key)[0])
        matrices = [[self._files.header(part) for part in matrix] for matrix in self._stacks[key]]
        first = matrices[0][0]
        if any(matrix != matrices[0] for matrix in matrices) or any(
            len(part.shape) != 2 or part.shape[1:] != first.shape[1:] or part.dtype != first.dtype
            for part in matrices[0]
        ):
            raise ValueError(
                f"the experts of {key} differ in shape or dtype in {self.source}; give a complete checkpoint"
            )
        return Header((len(matrices), sum(part.shape[0] for part in matrices[0]), *first.shape[1:]), first.dtype)

    def values(self, key: str, first: int, last: int) -> Tensor:
        """Read the flat values ``first`` to ``last - 1`` of a tensor, fp32 if it is stored quantized."""
        if key in self._files or key not in self._stacks:
            return self._files.values(self.parts(key)[0], first, last)
        # All matrices have the shape of the first: the header says so.
        sizes = [torch.Size(self._files.header(part).shape).numel() for part in self._stacks[key][0]]
        pieces = []
        for matrix in range(first // sum(sizes), -(-last // sum(sizes))):
            start = matrix * sum(sizes)
            for part, size in zip(self._stacks[key][matrix], sizes, strict=True):
                if first < start + size and start < last:
                    pieces.append(self._files.values(part, max(first - start, 0), min(last - start, size)))
                start += size
        return torch.cat(pieces)

    def read(self, key: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Copy a tensor, in ``dtype`` if it is stored quantized."""
        if key in self._files or key not in self._stacks:
            return self._files.read(self.parts(key)[0], dtype)
        matrices = self._stacks[key]
        return torch.stack([torch.cat([self._files.read(part, dtype) for part in matrix]) for matrix in matrices])

    def stored(self, key: str) -> StoredWeight | None:
        """Return a weight that is stored quantized; None for any other tensor.

        Raises:
            NoStackError: If its matrices can't be put together without being decoded.
            ValueError: If only some of them are stored quantized.
        """
        if key in self._files or key not in self._stacks:
            return self._files.stored(self.parts(key)[0])
        matrices = [[self._files.stored(part) for part in matrix] for matrix in self._stacks[key]]
        known = [[part for part in matrix if part is not None] for matrix in matrices]
        if not any(known):
            return None
        if known != matrices:
            raise ValueError(f"some matrices of {key} are quantized, and others are not; give a complete checkpoint")
        return stacked(known, key)


def _stacks_in(keys: Iterable[str]) -> dict[str, list[list[str]]]:
    """Return for each stack that is stored in parts: the stored matrices that form each of its matrices."""
    experts: dict[str, dict[int, set[str]]] = {}
    for key in keys:
        if match := _EXPERT.fullmatch(key):
            prefix, index, name = match.groups()
            experts.setdefault(prefix, {}).setdefault(int(index), set()).add(name)
    stacks = {}
    for prefix, by_index in experts.items():
        if sorted(by_index) != list(range(len(by_index))):
            continue  # an expert is missing, so there is no such stack, and the model's is reported as missing
        for stack, ways in _PARTS.items():
            for names in ways:
                if all(set(names) <= those for those in by_index.values()):
                    matrices = [[f"{prefix}.{i}.{name}" for name in names] for i in range(len(by_index))]
                    stacks[f"{prefix}.{stack}".replace(*_MIXTRAL)] = matrices
    return stacks
