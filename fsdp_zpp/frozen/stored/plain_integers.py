"""Weights of compressed-tensors' formats ``int-quantized`` and ``naive-quantized``: one int8 a value (W8A8).

- ``weight``, int8 [out, in];
- ``weight_scale``, float [out, groups], [out, 1], or [1] for the whole weight;
- ``weight_zero_point``, int8 in the shape of the scales, only if the weight is asymmetric.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from .compressed_config import Scheme, as_stated
from .format import Parts, StoredFormat, StoredTensors, refuse_misfit
from .headers import float_dtype, matrix, refuse_zero_points, rows_of, scale_groups
from .packed_codes import scale_codes
from .records import Field, RecordLayout


@dataclass(frozen=True, eq=False)
class PlainIntegers(StoredFormat):
    """A matrix in ``int-quantized``; a group is a row.

    Attributes:
        scale_dtype: The dtype of the scales.
        scale_groups: Groups of inputs that share a scale.
    """

    name: ClassVar[str] = "compressed-tensors' int-quantized"

    scale_dtype: torch.dtype
    scale_groups: int

    @classmethod
    def find(cls, tensors: StoredTensors, config: Mapping[str, Any]) -> dict[str, StoredFormat]:
        if config.get("quant_method") != "compressed-tensors":
            return {}
        keys = [key for key in tensors if key.endswith(".weight") and tensors.dtype(key) == torch.int8]
        return {key: as_stated(config, key, "int", partial(cls._of, key, tensors)) for key in keys}

    @classmethod
    def _of(cls, weight: str, tensors: StoredTensors, scheme: Scheme | None) -> PlainIntegers:
        keys = {"codes": weight, "scale": f"{weight}_scale", "zero_point": f"{weight}_zero_point"}
        out, inputs = matrix(tensors, weight, torch.int8)
        groups = scale_groups(keys["scale"], out, inputs, tensors, scheme)
        if inputs % groups:
            refuse_misfit(keys["scale"], f"{groups} groups", f"a number that divides {inputs} inputs")
        if keys["zero_point"] not in tensors:
            if scheme is not None and not scheme.symmetric:
                refuse_misfit(keys["zero_point"], "missing", "zero points, since config.json says it is not symmetric")
            del keys["zero_point"]
        elif (tensors.shape(keys["zero_point"]), tensors.dtype(keys["zero_point"])) != (
            tensors.shape(keys["scale"]),
            torch.int8,
        ):
            found = f"{tensors.dtype(keys['zero_point'])} {tensors.shape(keys['zero_point'])}"
            refuse_misfit(keys["zero_point"], found, f"int8 {tensors.shape(keys['scale'])}")
        elif scheme is not None and scheme.symmetric:
            refuse_zero_points(keys["zero_point"], tensors)
        dtype = float_dtype(tensors, keys["scale"])
        return cls(torch.Size((out, inputs)), dtype, keys, dtype, groups)

    @property
    def description(self) -> str:
        kind = "asymmetric" if "zero_point" in self.keys else "symmetric"
        return f"{self.name}, {kind}, in {self.scale_groups} groups of {self.scale_dtype}, {self.shape[-1]} columns"

    @property
    def group_numel(self) -> int:
        return self.shape[-1]

    @cached_property
    def layout(self) -> RecordLayout:
        fields = [
            Field("codes", torch.int8, (1, self.shape[-1])),
            Field("scale", self.scale_dtype, (1, self.scale_groups)),
        ]
        if "zero_point" in self.keys:
            fields.append(Field("zero_point", torch.int8, (1, self.scale_groups)))
        return RecordLayout(tuple(fields))

    def pack(self, parts: Parts, first: int, last: int) -> Tensor:
        values = {role: rows_of(parts[role], first, last) for role in self.keys}
        return self.layout.pack(last - first, **values)

    def decode(self, records: Tensor) -> Tensor:
        codes, scale = self.layout.get(records, "codes"), self.layout.get(records, "scale")
        zeros = self.layout.get(records, "zero_point") if "zero_point" in self.keys else 0
        return scale_codes(codes, zeros, scale, None).float().flatten(1)
