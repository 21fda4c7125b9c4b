"""Rows that carry some values exactly, beside those that a codec encodes.

Values that share a scale with far larger ones are lost. So the few that a codec would lose travel in fp32, in the tail
of a row, while it encodes zeros in their places::

    | what the codec makes of the chunk | zeros to 16 bytes | ``tail`` fp32 values |

The tail is the caller's: no method of :class:`ExactTail` reads or writes it, so in a payload that one returns it is
uninitialized. Only the caller knows what the tails hold, which of them are summed, and where their values belong.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property
from typing import TypeGuard

import torch
from torch import Tensor

from fsdp_zpp_kernels import (
    PayloadLayout,
    add_delta,
    dequantize,
    dequantize_sum,
    dequantize_sum_quantize,
    quantize,
    quantize_delta,
)
from fsdp_zpp_kernels.payload import ALIGNMENT

from .base import Codec, FullPrecision
from .blockwise import Blockwise
from .delta import Int4Delta


@dataclass(frozen=True)
class ExactTail(Codec):
    """A codec whose rows end in a tail. With the library's codecs, kernels leave room for it; others cost a copy.

    Args:
        codec: Encodes what precedes the tail.
        tail: Number of fp32 values at the end of each row, a multiple of 4, so that rows stay aligned to 16 bytes.

    Raises:
        ValueError: If ``tail`` is negative or no multiple of 4.
    """

    codec: Codec
    tail: int

    def __post_init__(self) -> None:
        PayloadLayout(8, 32, self.tail)  # raises if the tail is not valid

    def __str__(self) -> str:
        return f"{self.codec}, {self.tail} values exactly"

    @cached_property
    def blockwise(self) -> Blockwise | None:
        """Return the codec whose kernels encode values; None if ``codec`` has none."""
        codec = self.codec.whole if isinstance(self.codec, Int4Delta) else self.codec
        return codec if isinstance(codec, Blockwise) else None

    def tails(self, payload: Tensor) -> Tensor:
        """Return a view of the tails in a payload [..., nbytes(numel)]: fp32 [..., tail]."""
        return tails_of(payload, self.tail)

    def nbytes(self, numel: int) -> int:
        return -(-self.codec.nbytes(numel) // ALIGNMENT) * ALIGNMENT + 4 * self.tail

    def encode(self, values: Tensor, rows: int, cols: int) -> Tensor:
        codec = self.blockwise
        if codec is not None:
            return quantize(values, rows, cols, codec.bits, codec.block, self.tail)
        coded = self.codec.encode(values, rows, cols)
        nbytes = coded.shape[1]
        start = _aligned(nbytes)
        payload = coded.new_empty((len(coded), start + 4 * self.tail))
        payload[:, :nbytes] = coded
        payload[:, nbytes:start] = 0  # ranks compare payloads byte by byte
        return payload

    def decode(self, payload: Tensor, out: Tensor, rows: int, cols: int) -> None:
        codec = self.blockwise
        if codec is not None:
            dequantize(payload, out, rows, cols, codec.bits, codec.block, self.tail)
        else:
            self.codec.decode(self._coded(payload, out.numel() // (rows * cols)), out, rows, cols)

    def decode_sum(self, payload: Tensor, out: Tensor, rows: int, cols: int, scale: float) -> None:
        codec = self.blockwise
        if codec is not None:
            dequantize_sum(payload, out, rows, cols, codec.bits, codec.block, scale, self.tail)
        else:
            self.codec.decode_sum(self._coded(payload, out.numel() // (rows * cols)), out, rows, cols, scale)

    def sums(self, payload: Tensor, numel: int, scale: float) -> Tensor:
        if self.blockwise is not None:
            return super().sums(payload, numel, scale)
        return self.codec.sums(self._coded(payload, numel), numel, scale)

    def decode_sum_encode(self, payload: Tensor, numel: int, codec: Codec, scale: float) -> Tensor:
        source = self.blockwise
        target = codec.blockwise if isinstance(codec, ExactTail) and codec.tail == self.tail else None
        if source is None or target is None:
            return super().decode_sum_encode(payload, numel, codec, scale)
        chunks, layouts = payload.shape[1], (source.bits, source.block, target.bits, target.block)
        return dequantize_sum_quantize(payload, numel, 1, chunks, *layouts, scale, self.tail)

    def _coded(self, payload: Tensor, numel: int) -> Tensor:
        """Return what precedes the tails, as ``codec`` takes it."""
        coded = payload[..., : self.codec.nbytes(numel)]
        return coded if isinstance(self.codec, FullPrecision) else coded.contiguous()  # only ours need no copy

    # ---- with Int4Delta

    @property
    def _delta(self) -> Int4Delta:
        assert isinstance(self.codec, Int4Delta), f"{self.codec!r} sends no deltas"
        return self.codec

    @cached_property
    def changes(self) -> ExactTail:
        """Return the codec of the deltas, with the same tail."""
        return exact_tail(self._delta.changes, self.tail)

    def encode_delta(self, base: Tensor, values: Tensor) -> Tensor:
        """Encode as :meth:`Int4Delta.encode_delta` does; both ``base`` and the result have tails."""
        codec, changes = self._delta.whole, self._delta.changes
        return quantize_delta(values, base, codec.bits, codec.block, changes.bits, changes.block, self.tail)

    def apply_delta(self, base: Tensor, deltas: Tensor, numel: int) -> Tensor:
        """Add as :meth:`Int4Delta.apply_delta` does; ``base``, ``deltas`` and the result have tails."""
        codec, changes = self._delta.whole, self._delta.changes
        return add_delta(base, deltas, numel, codec.bits, codec.block, changes.bits, changes.block, self.tail)


def tails_of(payload: Tensor, tail: int) -> Tensor:
    """Return a view of the last ``tail`` fp32 values of each row of a payload [..., nbytes]: fp32 [..., tail]."""
    return payload.view(torch.float32)[..., -tail:]


exact_tail = functools.lru_cache(maxsize=128)(ExactTail)
"""Return one instance for each of the last codecs and tails, since every hop asks for one.

A model has tens of them, but the length of a tail depends on the parameters that a step uses.
"""


def without_tail(codec: Codec) -> tuple[Codec, int]:
    """Return the codec of what precedes a row's tail, and the length of the tail: ``codec`` and 0 if it has none."""
    return (codec.codec, codec.tail) if isinstance(codec, ExactTail) else (codec, 0)


def sends_deltas(codec: Codec | None) -> TypeGuard[Int4Delta | ExactTail]:
    """Return whether a codec has ``encode_delta``, ``apply_delta`` and ``changes``."""
    return isinstance(codec.codec if isinstance(codec, ExactTail) else codec, Int4Delta)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
