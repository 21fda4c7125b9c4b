"""The codec of a weight that stays as it is stored: chunks are rows of records, which its format decodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NoReturn

import torch
from torch import Tensor

from fsdp_zpp.codecs.base import Place
from fsdp_zpp.codecs.blocks import BlockCodec

_ALIGNMENT = 16
"""Bytes that the chunks of a unit's weights start at multiples of, whichever codec has the next one."""


@dataclass(frozen=True)
class StoredCodec(BlockCodec):
    """Decodes records, and encodes nothing. Equal to the codec of any weight whose records decode in the same way.

    Args:
        description: Tells formats apart; see :class:`StoredFormat`.
        block: Values of a group.
        record_nbytes: Bytes of a group.
        decode_into: Decodes records into flat values.
    """

    places: ClassVar[tuple[Place, ...]] = ("frozen",)

    description: str
    block: int
    record_nbytes: int
    decode_into: Callable[[Tensor, Tensor], None] = dataclasses.field(compare=False, repr=False)

    def __str__(self) -> str:
        return f"as stored, {self.description}"

    def nbytes(self, numel: int) -> int:
        records = -(-numel // self.block) * self.record_nbytes
        return -(-records // _ALIGNMENT) * _ALIGNMENT

    def blocks(self, payload: Tensor, numel: int) -> tuple[Tensor, ...]:
        return (self.records(payload, numel),)

    def records(self, payload: Tensor, numel: int) -> Tensor:
        """Return the records in chunks of ``numel`` values, uint8 [chunks, nbytes(numel)]: [chunks, groups, bytes]."""
        groups = -(-numel // self.block)
        return payload[:, : groups * self.record_nbytes].unflatten(1, (groups, self.record_nbytes))

    def prepare_decode(self, device: torch.device) -> None:
        if device.type == "cuda":  # a format may keep a table on the device, for whose first copy the CPU waits
            record = torch.zeros(1, self.record_nbytes, dtype=torch.uint8, device=device)
            self.decode_into(record, torch.empty(self.block, device=device))

    def encode(self, values: Tensor, rows: int, cols: int) -> Tensor:
        self._refuse()

    def decode(self, payload: Tensor, out: Tensor, rows: int, cols: int) -> None:
        if rows > 1 and cols > 1:
            self._refuse()
        self.decode_rows(payload, out)

    def decode_rows(self, payload: Tensor, out: Tensor) -> None:
        numel = out.numel() // len(payload)
        flat = out.view(len(payload), numel)
        for records, values in zip(self.records(payload, numel), flat, strict=True):
            self.decode_into(records, values)

    def decode_sum(self, payload: Tensor, out: Tensor, rows: int, cols: int, scale: float) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotImplementedError(f"{self} keeps codes of frozen weights, and neither encodes nor sums values")
