"""``"as stored"``: frozen weights keep the codes that a checkpoint, or the library that loaded them, has them in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NoReturn

from torch import Tensor

from .base import Codec, Place

AS_STORED = "as stored"
"""The name, in place of a codec."""


@dataclass(frozen=True)
class AsStored(Codec):
    """Stands for the format of each weight until that is known. It encodes nothing itself."""

    places: ClassVar[tuple[Place, ...]] = ("frozen",)

    def __str__(self) -> str:
        return AS_STORED

    def __repr__(self) -> str:
        return repr(AS_STORED)

    def nbytes(self, numel: int) -> int:
        self._refuse()

    def encode(self, values: Tensor, rows: int, cols: int) -> Tensor:
        self._refuse()

    def decode(self, payload: Tensor, out: Tensor, rows: int, cols: int) -> None:
        self._refuse()

    def decode_sum(self, payload: Tensor, out: Tensor, rows: int, cols: int, scale: float) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ValueError(
            f"{AS_STORED!r} keeps the codes that a checkpoint has, and encodes no values itself; name a codec with as "
            "many bits, such as NF4(64) or Int8(256)"
        )


def as_codec(value: object) -> object:
    """Return the codec that stands for ``"as stored"`` if ``value`` is that name, else ``value``."""
    return AsStored() if value == AS_STORED and isinstance(value, str) else value
