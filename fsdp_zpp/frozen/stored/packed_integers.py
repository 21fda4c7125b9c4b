"""Decodes weights of compressed-tensors' format ``pack-quantized``: int4 and int8, such as Kimi's experts.

With f = 32 / bits codes in a word, codes that are signed but packed plus 2^(bits - 1):

- ``weight_packed``, int32 [out, in / f]: a word holds neighbouring inputs;
- ``weight_scale``, float [out, groups], [out, 1], or [1] for the whole weight;
- ``weight_zero_point``, only if the weight is asymmetric: int32 [out / f, groups]: a word holds neighbouring outputs;
- ``weight_g_idx``, only if groups are in the order of activations: the group of each input, or -1;
- ``weight_shape``: out and in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from .compressed_config import Scheme, as_stated, refuse_other_formats
from .format import Parts, StoredFormat, StoredTensors, refuse_misfit
from .group_order import GroupOrder
from .headers import float_dtype, matrix, rows_of, scale_groups
from .packed_codes import scale_codes, unpack_codes
from .records import Field, RecordLayout
from .settings import refuse_setting


def decode_packed_integers(
    packed: Tensor, scale: Tensor, zero_point: Tensor | None, group_of: Tensor | None, bits: int, columns: int
) -> Tensor:
    """Decode rows of a weight, or of each weight of a stack.

    Args:
        packed: int32 [..., rows, columns / f].
        scale: Floats, [..., rows, groups].
        zero_point: int32 [..., rows / f, groups]; None if all are 0.
        group_of: Integers, [..., columns]. None: groups are equally many neighbouring columns.
        bits: 4 or 8.
        columns: The number of columns, which need not fill the last word.

    Returns:
        The values, [..., rows, columns], in the dtype of ``scale``.
    """
    codes = unpack_codes(packed, bits)[..., :columns]
    rows = packed.shape[-2]
    # Both are packed plus 2^(bits - 1), which the difference does not have.
    zeros = 2 ** (bits - 1) if zero_point is None else unpack_codes(zero_point.mT, bits)[..., :rows].mT
    return scale_codes(codes, zeros, scale, group_of)


@dataclass(frozen=True, eq=False)
class PackedIntegers(StoredFormat):
    """A matrix in ``pack-quantized``; a group is as many rows as a word holds codes, or one if it is symmetric.

    Attributes:
        bits: 4 or 8.
        scale_dtype: The dtype of the scales.
        scale_groups: Groups of inputs that share a scale.
        order: The group of each input, if groups are not neighbouring inputs.
    """

    name: ClassVar[str] = "compressed-tensors' pack-quantized"

    bits: int
    scale_dtype: torch.dtype
    scale_groups: int
    order: GroupOrder | None

    @classmethod
    def find(cls, tensors: StoredTensors, config: Mapping[str, Any]) -> dict[str, StoredFormat]:
        refuse_other_formats(config)
        end = ".weight_packed"
        weights = [k.removesuffix("_packed") for k in tensors if k.endswith(end) and tensors.dtype(k) == torch.int32]
        return {weight: as_stated(config, weight, "int", partial(cls._of, weight, tensors)) for weight in weights}

    @classmethod
    def _of(cls, weight: str, tensors: StoredTensors, scheme: Scheme | None) -> PackedIntegers:
        keys = {role: f"{weight}_{role}" for role in ("packed", "scale", "zero_point", "g_idx", "shape")}
        out, words = matrix(tensors, keys["packed"], torch.int32)
        inputs, bits = _inputs_and_bits(keys["shape"], out, words, tensors, scheme)
        groups = scale_groups(keys["scale"], out, inputs, tensors, scheme)
        if keys["zero_point"] in tensors:
            matrix(tensors, keys["zero_point"], torch.int32, shape=(-(-out * bits // 32), groups))
            if scheme is not None and scheme.symmetric:
                refuse_misfit(keys["zero_point"], "zero points", "none, since config.json says that it is symmetric")
        elif scheme is not None and not scheme.symmetric:
            refuse_misfit(keys["zero_point"], "missing", "zero points, since config.json says that it is not symmetric")
        order = None
        if (key := keys["g_idx"]) in tensors:
            order = GroupOrder.of(tensors.read(key), inputs, groups, key)
        elif scheme is not None and scheme.ordered and groups > 1:
            refuse_misfit(key, "missing", "the group of each input, since config.json has another actorder than theirs")
        if order is None and inputs % groups:
            refuse_misfit(keys["scale"], f"{groups} groups", f"a number that divides {inputs} inputs")
        used = {role: key for role, key in keys.items() if key in tensors}
        dtype = float_dtype(tensors, keys["scale"])
        return cls(torch.Size((out, inputs)), dtype, used, bits, dtype, groups, order)

    @cached_property
    def description(self) -> str:
        kind = "asymmetric" if self._asymmetric else "symmetric"
        order = "" if self.order is None else f", {self.order}"
        return (
            f"{self.name} of {self.bits} bits, {kind}, in {self.scale_groups} groups of {self.scale_dtype}, "
            f"{self.shape[-1]} columns{order}"
        )

    @property
    def _asymmetric(self) -> bool:
        return "zero_point" in self.keys

    @property
    def _rows(self) -> int:
        """Return the number of rows of a group: as many as have their zero points in one word."""
        return 32 // self.bits if self._asymmetric else 1

    @property
    def group_numel(self) -> int:
        return self._rows * self.shape[-1]

    @cached_property
    def layout(self) -> RecordLayout:
        words = -(-self.shape[-1] * self.bits // 32)
        fields = [
            Field("packed", torch.int32, (self._rows, words)),
            Field("scale", self.scale_dtype, (self._rows, self.scale_groups)),
        ]
        if self._asymmetric:
            fields.append(Field("zero_point", torch.int32, (1, self.scale_groups)))
        return RecordLayout(tuple(fields))

    def pack(self, parts: Parts, first: int, last: int) -> Tensor:
        rows = first * self._rows, min(last * self._rows, self.shape[0])
        values = {role: rows_of(parts[role], *rows) for role in ("packed", "scale")}
        if self._asymmetric:
            values["zero_point"] = rows_of(parts["zero_point"], first, last)
        return self.layout.pack(last - first, **values)

    def decode(self, records: Tensor) -> Tensor:
        packed, scale = self.layout.get(records, "packed"), self.layout.get(records, "scale")
        zero_point = self.layout.get(records, "zero_point") if self._asymmetric else None
        order = None if self.order is None else self.order.on(records.device)
        values = decode_packed_integers(packed, scale, zero_point, order, self.bits, self.shape[-1])
        return values.float().flatten(1)


def _inputs_and_bits(key: str, out: int, words: int, tensors: StoredTensors, scheme: Scheme | None) -> tuple[int, int]:
    """Return the number of inputs of a weight, which its shape says, and the bits of its codes."""
    if key not in tensors or tensors.shape(key) != (2,) or tensors.dtype(key) not in (torch.int32, torch.int64):
        refuse_misfit(key, tensors.shape(key) if key in tensors else "missing", "the shape of the weight")
    rows, inputs = tensors.read(key).tolist()
    if rows != out:
        refuse_misfit(key, f"{rows} rows", f"{out} rows, as many as its codes have")
    possible = [bits for bits in range(1, 9) if -(-inputs * bits // 32) == words]
    if scheme is not None:
        possible = [scheme.bits] if scheme.bits in possible or scheme.bits not in (4, 8) else []
    if len(possible) != 1 or possible[0] not in (4, 8):
        found = possible or 32 * words / max(1, inputs)
        refuse_setting(PackedIntegers.name, f"bits of {key}", found, "4 and 8")
    return inputs, possible[0]
