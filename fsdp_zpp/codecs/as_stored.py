"""``"as stored"`` and ``"auto"``: frozen weights keep the codes in which a checkpoint, or a library, has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NoReturn

from torch import Tensor

from .base import Codec, Place
from .blockwise import Int8

FrozenName = Literal["as stored", "auto"]
"""Names in place of a codec of frozen weights."""


@dataclass(frozen=True)
class AsStored(Codec):
    """Stands for the format of each weight until that is known. It encodes nothing itself.

    Args:
        otherwise: The codec of weights that are not stored quantized; None leaves them as they are.
    """

    places: ClassVar[tuple[Place, ...]] = ("frozen",)

    otherwise: Codec | None = None

    @property
    def name(self) -> FrozenName:
        """Return the name that stands for it."""
        return "as stored" if self.otherwise is None else "auto"

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return repr(self.name)

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
            f"{self.name!r} keeps the codes that a checkpoint has, and encodes no values itself; name a codec with as "
            "many bits, such as NF4(64) or Int8(256)"
        )


NAMED: dict[object, AsStored] = {codec.name: codec for codec in (AsStored(), AsStored(Int8(256)))}
"""What stands for each name."""


def codec_of_frozen(value: Codec | FrozenName | None) -> Codec | None:
    """Return the codec of frozen weights that ``value`` is or names."""
    return NAMED[value] if isinstance(value, str) else value


def codec_of_plain(codec: Codec | None) -> Codec | None:
    """Return what ``codec``, of frozen weights, means for weights in full precision."""
    return codec.otherwise or codec if isinstance(codec, AsStored) else codec
