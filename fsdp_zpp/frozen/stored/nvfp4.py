"""Decodes weights of compressed-tensors' format ``nvfp4-pack-quantized``.

- ``weight_packed``, uint8 [out, in / 2]: two neighbouring inputs a byte;
- ``weight_scale``, float8_e4m3fn [out, in / 16];
- ``weight_global_scale``, fp32 [1]: what the scales were multiplied by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from .compressed_config import Scheme, as_stated
from .format import REMEDY, Parts, StoredFormat, StoredTensors, refuse_misfit
from .fp4_codes import unpack_fp4
from .headers import matrix, rows_of
from .records import Field, RecordLayout
from .settings import refuse_setting

_BLOCK = 16


def decode_nvfp4(packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """Decode rows of a weight, or of each weight of a stack.

    Args:
        packed: uint8 [..., rows, in / 2].
        scale: float8_e4m3fn [..., rows, in / 16].
        global_scale: fp32 [..., 1].

    Returns:
        The values, fp32 [..., rows, in].
    """
    scales = scale.float() / global_scale.float().unsqueeze(-1)
    values = unpack_fp4(packed, torch.float32)
    return (values.unflatten(-1, (scale.shape[-1], -1)) * scales.unsqueeze(-1)).flatten(-2)


@dataclass(frozen=True, eq=False)
class Nvfp4(StoredFormat):
    """A matrix in ``nvfp4-pack-quantized``; a group is a row, whose record has the global scale, too."""

    name: ClassVar[str] = "compressed-tensors' nvfp4-pack-quantized"

    @classmethod
    def find(cls, tensors: StoredTensors, config: Mapping[str, Any]) -> dict[str, StoredFormat]:
        end = ".weight_global_scale"
        weights = [key.removesuffix("_global_scale") for key in tensors if key.endswith(end)]
        return {weight: as_stated(config, weight, "float", partial(cls._of, weight, tensors)) for weight in weights}

    @classmethod
    def _of(cls, weight: str, tensors: StoredTensors, scheme: Scheme | None) -> Nvfp4:
        if scheme is not None:
            stated = scheme.bits, scheme.strategy, scheme.group_size, scheme.symmetric
            if stated != (allowed := (4, "tensor_group", _BLOCK, True)):
                refuse_setting(cls.name, "num_bits, strategy, group_size, symmetric", stated, f"{allowed} alone")
        keys = {role: f"{weight}_{role}" for role in ("packed", "scale", "global_scale")}
        out, octets = matrix(tensors, keys["packed"], torch.uint8)
        if octets * 2 % _BLOCK:
            refuse_misfit(keys["packed"], f"{octets * 2} columns", f"columns in multiples of {_BLOCK}")
        matrix(tensors, keys["scale"], torch.float8_e4m3fn, shape=(out, octets * 2 // _BLOCK))
        whole_scale = tensors.shape(keys["global_scale"]), tensors.dtype(keys["global_scale"])
        if whole_scale not in (((), torch.float32), ((1,), torch.float32)):
            refuse_misfit(keys["global_scale"], f"{whole_scale[1]} {whole_scale[0]}", "one number in fp32")
        return cls(torch.Size((out, octets * 2)), torch.bfloat16, keys)

    @property
    def description(self) -> str:
        return f"{self.name}, {self.shape[-1]} columns"

    @property
    def group_numel(self) -> int:
        return self.shape[-1]

    @cached_property
    def layout(self) -> RecordLayout:
        columns = self.shape[-1]
        return RecordLayout(
            (
                Field("packed", torch.uint8, (1, columns // 2)),
                Field("scale", torch.float8_e4m3fn, (1, columns // _BLOCK)),
                Field("global_scale", torch.float32, (1,)),
            )
        )

    def pack(self, parts: Parts, first: int, last: int) -> Tensor:
        values = {role: rows_of(parts[role], first, last) for role in self.keys}
        return self.layout.pack(last - first, **values)

    def decode(self, records: Tensor) -> Tensor:
        packed, scale, whole_scale = (self.layout.get(records, field.name) for field in self.layout.fields)
        return decode_nvfp4(packed, scale, whole_scale).flatten(1)

    def refuse_infinite(self, records: Tensor) -> None:
        super().refuse_infinite(records)
        if not self.layout.get(records, "global_scale").all():
            raise ValueError(f"{self.keys.get('global_scale', self.name)} is 0, and scales are divided by it; {REMEDY}")
