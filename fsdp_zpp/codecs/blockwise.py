"""Symmetric blockwise integers: the codecs ``Int8`` and ``Int4``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from fsdp_zpp.suggestions import explains_keywords
from fsdp_zpp_kernels import (
    PayloadLayout,
    dequantize,
    dequantize_rows,
    dequantize_sum,
    dequantize_sum_quantize,
    quantize,
)

from .base import Codec, check_block
from .blocks import BlockCodec, blocks_of_layout


@dataclass(frozen=True)
class Blockwise(BlockCodec):
    """Symmetric blockwise integers: each ``block`` of values has scale = absmax / qmax, so that no value clips.

    Args:
        block: Number of values that share one fp32 scale, a power of two from 32 to 4096.

    Raises:
        TypeError: If ``block`` is not an int.
        ValueError: If ``block`` is not a power of two in that range.
    """

    block: int = 256
    bits: ClassVar[int]

    def __post_init__(self) -> None:
        check_block(self, self.block)
        _ = self.layout  # raises if the block is out of range

    def __str__(self) -> str:
        return f"int{self.bits}({self.block})"

    @cached_property
    def layout(self) -> PayloadLayout:
        """Return where codes and scales lie in a payload."""
        return PayloadLayout(self.bits, self.block)

    def nbytes(self, numel: int) -> int:
        return self.layout.nbytes(numel)

    def scales(self, payload: Tensor, numel: int) -> Tensor:
        """Return a view of the scales in a payload [chunks, nbytes(numel)]: fp32 [chunks, blocks]."""
        return self.layout.scales(payload, numel)

    def blocks(self, payload: Tensor, numel: int) -> tuple[Tensor, ...]:
        return blocks_of_layout(self.layout, payload, numel)

    def encode(self, values: Tensor, rows: int, cols: int) -> Tensor:
        return quantize(values, rows, cols, self.bits, self.block)

    def decode(self, payload: Tensor, out: Tensor, rows: int, cols: int) -> None:
        dequantize(payload, out, rows, cols, self.bits, self.block)

    def decode_rows(self, payload: Tensor, out: Tensor) -> None:
        dequantize_rows(payload, out, self.bits, self.block)

    def decode_sum(self, payload: Tensor, out: Tensor, rows: int, cols: int, scale: float) -> None:
        dequantize_sum(payload, out, rows, cols, self.bits, self.block, scale)

    def decode_sum_encode(self, payload: Tensor, numel: int, codec: Codec, scale: float) -> Tensor:
        if not isinstance(codec, Blockwise):  # the fused kernel writes no other format
            return super().decode_sum_encode(payload, numel, codec, scale)
        return dequantize_sum_quantize(
            payload, numel, 1, payload.shape[1], self.bits, self.block, codec.bits, codec.block, scale
        )


@explains_keywords
@dataclass(frozen=True)
class Int8(Blockwise):
    """8-bit symmetric blockwise integers in [-127, 127]; 1 + 4 / block bytes per value."""

    bits: ClassVar[int] = 8


@explains_keywords
@dataclass(frozen=True)
class Int4(Blockwise):
    """4-bit symmetric blockwise integers in [-7, 7]; 0.5 + 4 / block bytes per value."""

    block: int = 128
    bits: ClassVar[int] = 4
