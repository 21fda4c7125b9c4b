"""fp8 with scales: DeepSeek's blocks (``weight_scale_inv``), and scales for each row or all of a weight.

``value = code * scale`` in fp32, rounded once. Names and values are those of transformers'
``integrations/finegrained_fp8.py``. Scales in e8m0, powers of two in a byte, are kept as fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from .format import Parts, StoredFormat, StoredTensors, refuse_misfit
from .records import Field, RecordLayout
from .settings import block_size

CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8)
"""Dtypes of scales. A uint8 has the bits of an e8m0."""
_SUFFIXES = ("_scale_inv", "_scale")
_UNBLOCKED = 128
"""Rows in a group where blocks don't say it."""


@dataclass(frozen=True, eq=False)
class Fp8(StoredFormat):
    """A matrix, or a stack of matrices, in fp8.

    Attributes:
        code_dtype: The dtype of the codes.
        block: Rows and columns that share a scale.
    """

    name: ClassVar[str] = "fp8"

    code_dtype: torch.dtype
    block: tuple[int, int]

    @classmethod
    def find(cls, tensors: StoredTensors, config: Mapping[str, Any]) -> dict[str, StoredFormat]:
        found: dict[str, StoredFormat] = {}
        stated = block_size(config, "weight_block_size")
        for key in tensors:
            dtype = tensors.dtype(key)
            # The scales of some formats are in fp8, too, such as those of nvfp4.
            if dtype not in CODES or len(tensors.shape(key)) < 2 or key.endswith(_SUFFIXES):
                continue
            assert isinstance(dtype, torch.dtype)
            names = [key + suffix for suffix in _SUFFIXES]
            if key.endswith(".weight"):
                names.append(key.removesuffix("weight") + "scale")
            scale = next((name for name in names if name in tensors), None)
            if scale is None:
                refuse_misfit(key, f"{dtype} without a scale", f"{names[0]}, which is missing")
            shape = torch.Size(tensors.shape(key))
            block = block_of(shape, tensors.shape(scale), stated, scale)
            if tensors.dtype(scale) not in _SCALES:
                refuse_misfit(scale, tensors.dtype(scale), "fp32, bf16, fp16 or e8m0")
            found[key] = cls(shape, torch.bfloat16, {"codes": key, "scales": scale}, dtype, block)
        return found

    @property
    def description(self) -> str:
        kind = str(self.code_dtype).removeprefix("torch.float8_")
        return f"{self.name} {kind} in blocks of {self.block[0]}x{self.block[1]}, {self.shape[-1]} columns"

    @cached_property
    def _rows(self) -> int:
        """Return how many rows of matrices that are put one below the other are in a group."""
        height, rows = self.block[0], self.shape[-2]
        # No block spans two matrices of a stack, so if a matrix ends within a block, a group is a matrix.
        return height if len(self.shape) == 2 or rows % height == 0 else rows

    @cached_property
    def layout(self) -> RecordLayout:
        height, width = self.block
        columns, rows = self.shape[-1], self._rows
        scales = (-(-rows // height), -(-columns // width))
        codes = Field("codes", torch.uint8, (rows, columns))
        return RecordLayout((codes, Field("scales", torch.float32, scales)))

    @property
    def group_numel(self) -> int:
        return self._rows * self.shape[-1]

    def pack(self, parts: Parts, first: int, last: int) -> Tensor:
        if len(self.shape) == 2:
            codes = parts["codes"][first * self._rows : last * self._rows]
            scales = self._of_matrix(parts["scales"], first, last)
        else:
            codes, scales = self._of_stack(parts, first * self._rows, last * self._rows)
        return self.layout.pack(last - first, codes=codes.contiguous().view(torch.uint8), scales=scales)

    def _of_matrix(self, scales: Any, first: int, last: int) -> Tensor:
        """Return the scales of groups of a matrix, fp32 [groups, columns of blocks]."""
        if self._is_single(scales):
            return _fp32(scales[...]).reshape(1, 1).expand(last - first, 1)
        return _fp32(scales[first:last])

    def _of_stack(self, parts: Parts, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return the codes and scales of some rows, counted through all matrices of a stack."""
        height, rows = self.block[0], self.shape[-2]
        matrices = slice(first // rows, -(-last // rows))
        codes = parts["codes"][matrices].reshape(-1, self.shape[-1])
        count = len(codes) // rows
        all_scales = parts["scales"]
        if self._is_single(all_scales):
            scales = _fp32(all_scales[...]).reshape(1, 1, 1).expand(count, 1, 1)
        else:
            scales = _fp32(all_scales[matrices])
        of_matrix = -(-rows // height)
        scales = scales.reshape(count * of_matrix, -1)
        begin = first - matrices.start * rows
        begin_scale = begin // height
        end_scale = begin_scale + (last - first) // self._rows * -(-self._rows // height)
        return codes[begin : begin + last - first], scales[begin_scale:end_scale]

    @staticmethod
    def _is_single(scales: Any) -> bool:
        shape = scales.shape if isinstance(scales, Tensor) else scales.get_shape()
        return torch.Size(shape).numel() == 1

    def decode(self, records: Tensor) -> Tensor:
        height, width = self.block
        codes = self.layout.get(records, "codes").view(self.code_dtype).float()
        scales = self.layout.get(records, "scales")
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(height, dim=1)[:, : codes.shape[1]]
        if scales.shape[2] > 1:
            scales = scales.repeat_interleave(width, dim=2)[:, :, : codes.shape[2]]
        return codes.mul_(scales).flatten(1)


def block_of(shape: torch.Size, scales: tuple[int, ...], stated: Sequence[int] | None, key: str) -> tuple[int, int]:
    """Return the rows and columns that share a scale.

    Args:
        shape: The shape of the weight.
        scales: The shape of the scales.
        stated: The rows and columns by the configuration.
        key: The name of the scales.

    Raises:
        ValueError: If the scales don't fit the weight.
    """
    rows, columns = shape[-2:]
    if torch.Size(scales).numel() == 1 or (len(shape) == 3 and torch.Size(scales).numel() == shape[0]):
        return (_UNBLOCKED if len(shape) == 2 else rows, columns)
    grid = scales[-2:] if len(scales) >= 2 else (*scales, 1)
    if len(scales) not in (len(shape), len(shape) - 1) or scales[: len(shape) - 2] != shape[:-2]:
        refuse_misfit(key, f"a tensor of shape {scales}", f"scales for a weight of shape {tuple(shape)}")
    usual = (128, 128)
    for block in (tuple(stated or usual), usual):
        if (-(-rows // block[0]), -(-columns // block[1])) == grid:
            return int(block[0]), int(block[1])
    if rows % grid[0] == 0 and columns % grid[1] == 0:
        return rows // grid[0], columns // grid[1]
    refuse_misfit(key, f"a tensor of shape {scales}", f"scales for a weight of shape {tuple(shape)}")


def _fp32(scales: Tensor) -> Tensor:
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()
