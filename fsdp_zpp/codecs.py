"""Codecs: how a chunk of values is written as bytes for one hop, and read back.

[Note: Chunks and the rank permutation]
A *chunk* is one rank's shard of a flat tensor. FSDP orders chunks by rank, which is (node, local); a hop wants
or leaves them in (local, node) order. So every method that touches full-precision values takes the grid of
chunks as ``rows`` x ``cols`` and transposes it on the way: chunk (r, c) on the one side is chunk (c, r) on the
other. A side that needs no reordering passes ``rows=1`` or ``cols=1``.

[Note: One payload]
A chunk's bytes, scales included, are one row of a uint8 tensor, so a hop is a single collective. Rows have the
same length for every chunk and blocks never straddle a chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fsdp_zpp.kernels import (
    PayloadLayout,
    dequantize,
    dequantize_sum,
    dequantize_sum_quantize,
    dequantize_sum_quantize_corrected,
    quantize,
    quantize_corrected,
)

if TYPE_CHECKING:
    from .error_buffer import ErrorBuffer


class Codec(ABC):
    """How values travel. Subclass it to add a codec; instances are immutable and hashable.

    Attributes:
        for_frozen_only: Whether it is for weights that are quantized once, not for what is sent in every step.
    """

    for_frozen_only: ClassVar[bool] = False

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Bytes of the payload of a chunk of ``numel`` values."""

    @abstractmethod
    def encode(self, values: Tensor, rows: int, cols: int) -> Tensor:
        """Encode ``rows * cols`` chunks.

        Args:
            values: Flat values of shape [rows * cols * numel], bf16, fp16 or fp32.
            rows: Rows of the grid of chunks in ``values``.
            cols: Columns of the grid.

        Returns:
            uint8 payload of shape [cols * rows, nbytes(numel)], the grid transposed.
        """

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor, rows: int, cols: int) -> None:
        """Decode a (rows, cols) grid of payload rows into flat ``out``, the grid transposed."""

    @abstractmethod
    def decode_sum(self, payload: Tensor, out: Tensor, rows: int, cols: int, scale: float) -> None:
        """Decode ``payload`` [peers, rows * cols, nbytes], sum over peers in fp32, times ``scale``, into ``out``."""

    def decode_sum_encode(self, payload: Tensor, numel: int, codec: Codec, scale: float) -> Tensor:
        """Decode and sum as :meth:`decode_sum`, and encode the fp32 sums with another codec, in order.

        Args:
            payload: uint8 of shape [peers, chunks, nbytes(numel)].
            numel: Values in a chunk.
            codec: The codec of the next hop.
            scale: Factor on the sums.

        Returns:
            uint8 payload of shape [chunks, codec.nbytes(numel)].
        """
        chunks = payload.shape[1]
        return codec.encode(self._sums(payload, numel, scale), 1, chunks)

    def encode_corrected(self, values: Tensor, rows: int, cols: int, errors: ErrorBuffer) -> Tensor:
        """Encode with error feedback, as :meth:`encode` does without; see [Note: Error feedback] in error_buffer.py.

        Args:
            values: As in :meth:`encode`.
            rows: As in :meth:`encode`.
            cols: As in :meth:`encode`.
            errors: What earlier calls have left out, which is added; then updated by what this one leaves out.
        """
        chunks = rows * cols
        old = errors.read(chunks)
        corrected = values.view(rows, cols, -1).transpose(0, 1).flatten().float() + old
        payload = self.encode(corrected, 1, chunks)
        sent = torch.empty_like(corrected)
        self.decode(payload, sent, 1, chunks)
        new = errors.beta * old + (1 - errors.beta) * (corrected - sent)
        errors.write(torch.where(new.isfinite(), new, old), chunks)
        return payload

    def decode_sum_encode_corrected(
        self, payload: Tensor, numel: int, codec: Codec, scale: float, errors: ErrorBuffer
    ) -> Tensor:
        """:meth:`decode_sum_encode` with error feedback on what it encodes, as in :meth:`encode_corrected`."""
        return codec.encode_corrected(self._sums(payload, numel, scale), 1, payload.shape[1], errors)

    def _sums(self, payload: Tensor, numel: int, scale: float) -> Tensor:
        chunks = payload.shape[1]
        sums = torch.empty(chunks * numel, dtype=torch.float32, device=payload.device)
        self.decode_sum(payload, sums, 1, chunks, scale)
        return sums


def check_block(codec: Codec, block: object) -> None:
    """Raise unless the ``block`` that a codec was given is an int."""
    if isinstance(block, bool) or not isinstance(block, int):
        raise TypeError(f"{type(codec).__name__}'s block must be an int, got {block!r}")


@dataclass(frozen=True)
class Blockwise(Codec):
    """Symmetric blockwise integers: scale = absmax / qmax for every ``block`` values, so that nothing clips.

    Args:
        block: Values that share one fp32 scale; a power of two from 32 to 4096.

    Raises:
        ValueError: If ``block`` is not a power of two in that range.
    """

    block: int = 256
    bits: ClassVar[int]

    def __post_init__(self) -> None:
        check_block(self, self.block)
        PayloadLayout(self.bits, self.block)

    def __str__(self) -> str:
        return f"int{self.bits}({self.block})"

    @property
    def layout(self) -> PayloadLayout:
        """Where codes and scales are in a payload."""
        return PayloadLayout(self.bits, self.block)

    def nbytes(self, numel: int) -> int:
        return self.layout.nbytes(numel)

    def scales(self, payload: Tensor, numel: int) -> Tensor:
        """The scales in a payload [chunks, nbytes(numel)], as a view: fp32 [chunks, blocks]."""
        return self.layout.scales(payload, numel)

    def encode(self, values: Tensor, rows: int, cols: int) -> Tensor:
        return quantize(values, rows, cols, self.bits, self.block)

    def decode(self, payload: Tensor, out: Tensor, rows: int, cols: int) -> None:
        dequantize(payload, out, rows, cols, self.bits, self.block)

    def decode_sum(self, payload: Tensor, out: Tensor, rows: int, cols: int, scale: float) -> None:
        dequantize_sum(payload, out, rows, cols, self.bits, self.block, scale)

    def decode_sum_encode(self, payload: Tensor, numel: int, codec: Codec, scale: float) -> Tensor:
        if not isinstance(codec, Blockwise):
            return super().decode_sum_encode(payload, numel, codec, scale)
        return dequantize_sum_quantize(
            payload, numel, 1, payload.shape[1], self.bits, self.block, codec.bits, codec.block, scale
        )

    def encode_corrected(self, values: Tensor, rows: int, cols: int, errors: ErrorBuffer) -> Tensor:
        return quantize_corrected(values, errors.state, rows, cols, self.bits, self.block, errors.block, errors.beta)

    def decode_sum_encode_corrected(
        self, payload: Tensor, numel: int, codec: Codec, scale: float, errors: ErrorBuffer
    ) -> Tensor:
        if not isinstance(codec, Blockwise):
            return super().decode_sum_encode_corrected(payload, numel, codec, scale, errors)
        return dequantize_sum_quantize_corrected(
            payload,
            errors.state,
            numel,
            self.bits,
            self.block,
            codec.bits,
            codec.block,
            scale,
            errors.block,
            errors.beta,
        )


@dataclass(frozen=True)
class Int8(Blockwise):
    """8-bit symmetric blockwise integers in [-127, 127]; 1 + 4 / block bytes a value."""

    bits: ClassVar[int] = 8


@dataclass(frozen=True)
class Int4(Blockwise):
    """4-bit symmetric blockwise integers in [-7, 7]; 0.5 + 4 / block bytes a value."""

    block: int = 128
    bits: ClassVar[int] = 4


@dataclass(frozen=True)
class FullPrecision(Codec):
    """No codec: values travel as they are, in ``dtype``. What ``None`` stands for in a strategy."""

    dtype: torch.dtype

    def nbytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def encode(self, values: Tensor, rows: int, cols: int) -> Tensor:
        grid = values.to(self.dtype).view(rows, cols, -1).transpose(0, 1).contiguous()
        return grid.view(rows * cols, -1).view(torch.uint8)

    def decode(self, payload: Tensor, out: Tensor, rows: int, cols: int) -> None:
        grid = payload.view(self.dtype).view(rows, cols, -1)
        out.view(cols, rows, -1).copy_(grid.transpose(0, 1))

    def decode_sum(self, payload: Tensor, out: Tensor, rows: int, cols: int, scale: float) -> None:
        sums = payload.view(self.dtype).sum(dim=0, dtype=torch.float32).mul_(scale)
        out.view(cols, rows, -1).copy_(sums.view(rows, cols, -1).transpose(0, 1))
