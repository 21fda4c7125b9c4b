"""Decodes stacks of matrices in mxfp4, as gpt-oss stores its experts.

A stack of shape [experts, in, out] is stored transposed, in two tensors:

- ``*_blocks``, uint8 [experts, out, in / 32, 16]: 32 neighbouring inputs are a block, two of them a byte;
- ``*_scales``, uint8 [experts, out, in / 32]: the scale of each block in e8m0, its exponent plus 127, or 255 for NaN.

So 32 neighbouring inputs of a matrix, with all outputs, are a group: blocks [out, 16] and scales [out].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from .format import Parts, StoredFormat, StoredTensors, refuse_misfit
from .fp4_codes import unpack_fp4
from .headers import lacking
from .records import Field, RecordLayout
from .settings import Known

_BLOCK = 32
SETTINGS: Known = dict.fromkeys(("quant_method", "modules_to_not_convert", "dequantize"))


def decode_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode rows of matrices.

    Args:
        blocks: uint8 [..., rows, in / 32, 16].
        scales: e8m0, or uint8 with its bits, [..., rows, in / 32].
        dtype: The dtype of the result. transformers multiplies in it; fp32 and bf16 hold the products exactly.

    Returns:
        The values, [..., rows, in].
    """
    factors = scales.view(torch.float8_e8m0fnu).to(dtype)
    return (unpack_fp4(blocks, dtype) * factors.unsqueeze(-1)).flatten(-2)


@dataclass(frozen=True, eq=False)
class Mxfp4(StoredFormat):
    """A stack of matrices in mxfp4."""

    name: ClassVar[str] = "mxfp4"

    @classmethod
    def find(cls, tensors: StoredTensors, config: Mapping[str, Any]) -> dict[str, StoredFormat]:
        ends = "_blocks", "_scales"
        names = [key.removesuffix(ends[0]) for key in tensors if key.endswith(ends[0])]
        return {name: cls._of({end[1:]: name + end for end in ends}, tensors) for name in names}

    @classmethod
    def _of(cls, keys: dict[str, str], tensors: StoredTensors) -> Mxfp4:
        blocks, scales = keys.values()
        shape = tensors.shape(blocks)
        if len(shape) != 4 or shape[3] != _BLOCK // 2:
            refuse_misfit(blocks, f"a tensor of shape {shape}", f"shape [experts, out, in / {_BLOCK}, {_BLOCK // 2}]")
        if scales not in tensors:
            raise lacking(scales)
        if tensors.shape(scales) != shape[:3]:
            refuse_misfit(scales, f"a tensor of shape {tensors.shape(scales)}", f"shape {shape[:3]}")
        if tensors.dtype(blocks) != torch.uint8:
            refuse_misfit(blocks, tensors.dtype(blocks), "uint8")
        if tensors.dtype(scales) not in (torch.uint8, torch.float8_e8m0fnu):
            refuse_misfit(scales, tensors.dtype(scales), "uint8 or e8m0")
        return cls(torch.Size((shape[0], shape[2] * _BLOCK, shape[1])), torch.bfloat16, keys)

    @property
    def description(self) -> str:
        return f"{self.name}, {self.shape[-1]} columns"

    @property
    def group_numel(self) -> int:
        return _BLOCK * self.shape[-1]

    @cached_property
    def layout(self) -> RecordLayout:
        out = self.shape[-1]
        codes = Field("blocks", torch.uint8, (out, _BLOCK // 2))
        return RecordLayout((codes, Field("scales", torch.float8_e8m0fnu, (out,))))

    def pack(self, parts: Parts, first: int, last: int) -> Tensor:
        per_matrix = self.shape[1] // _BLOCK
        values: dict[str, list[Tensor]] = {"blocks": [], "scales": []}
        while first < last:
            matrix, begin = divmod(first, per_matrix)
            # The rest of a matrix, or as many whole matrices as there are.
            whole = max(1, (last - first) // per_matrix) if begin == 0 else 1
            end = min(per_matrix, begin + last - first)
            for name, pieces in values.items():
                some: Tensor = parts[name][matrix : matrix + whole, :, begin:end]
                pieces.append(some.transpose(1, 2).flatten(0, 1))
            first += whole * (end - begin)
        fields = {name: torch.cat(pieces).view(torch.uint8) for name, pieces in values.items()}
        return self.layout.pack(len(fields["scales"]), **fields)

    def decode(self, records: Tensor) -> Tensor:
        blocks, scales = self.layout.get(records, "blocks"), self.layout.get(records, "scales")
        return decode_mxfp4(blocks.unsqueeze(-2), scales.unsqueeze(-1), torch.float32).mT.flatten(1)
