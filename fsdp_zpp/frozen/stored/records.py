"""Records: the bytes of a group of values, each with the codes, then the scales and whatever else decodes them.

A group decodes on its own, and all groups of a weight have records of one length. So a chunk of a weight is a row of
records, and a part of one is a slice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGNMENT = 4
"""Bytes that records start at multiples of, for their scales."""


@dataclass(frozen=True)
class Field:
    """Some of the bytes of a record.

    Attributes:
        name: What they are.
        dtype: Their dtype, of at most 4 bytes.
        shape: How many there are in a record, as the shape in which they are read.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return how many bytes they take."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class RecordLayout:
    """Places of the fields in a record, one after the other."""

    fields: tuple[Field, ...]

    @property
    def nbytes(self) -> int:
        """Return the length of a record."""
        return sum(_aligned(field.nbytes) for field in self.fields)

    def get(self, records: Tensor, name: str) -> Tensor:
        """Return a field of each record.

        Args:
            records: uint8 [records, nbytes]; they may lie apart, each is contiguous.
            name: The field.

        Returns:
            Its values, [records, *shape] in its dtype; a view.
        """
        start, field = self._place(name)
        return records[:, start : start + field.nbytes].view(field.dtype).unflatten(1, field.shape)

    def pack(self, count: int, **values: Tensor) -> Tensor:
        """Return records of all fields.

        Args:
            count: The number of records.
            **values: For each field, its values in the order of the records, in its dtype. If there are fewer, zeros
                complete them: the last group may have fewer rows than the others.

        Returns:
            uint8 [count, nbytes].
        """
        records = next(iter(values.values())).new_zeros((count, self.nbytes), dtype=torch.uint8)
        for name, given in values.items():
            start, field = self._place(name)
            flat = given.contiguous().view(-1).view(torch.uint8)
            whole = len(flat) // field.nbytes
            place = records[:, start : start + field.nbytes]
            place[:whole] = flat[: whole * field.nbytes].view(whole, field.nbytes)
            if whole < count:
                rest = flat[whole * field.nbytes :]
                place[whole, : len(rest)] = rest
        return records

    def _place(self, name: str) -> tuple[int, Field]:
        start = 0
        for field in self.fields:
            if field.name == name:
                return start, field
            start += _aligned(field.nbytes)
        raise KeyError(name)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
