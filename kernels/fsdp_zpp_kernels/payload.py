"""Payload format: the layout of a chunk's quantized values in memory and on the wire.

A *chunk* is a run of contiguous values, one rank's shard. It is quantized in blocks of ``block`` values. No block spans
two chunks; the last block of a chunk may be partial. The payload of a chunk is one row of bytes::

    | codes, ``bits`` each | zeros to 16 | one fp32 scale a block | zeros to 16 | ``tail`` fp32 values |

An int8 code is one two's-complement byte. Two int4 codes share a byte: value ``2i`` is the low nibble, value ``2i + 1``
the high one. So code ``i`` of a little-endian word starts at bit ``i * bits``, whatever the width, and kernels can
handle both widths as 32-bit words. The padding is zero because ranks compare payloads byte by byte.

The tail is room for values that travel exactly. It belongs to the caller: the ops neither read nor write it, so in a
payload that an op returns it is uninitialized. An empty chunk has a tail like any other; its row is the tail alone.

Encoding takes ``scale = truncated(max(absmax * ((1 + SCALE_RAISE) / qmax), MIN_SCALE))`` and
``code = round_half_even(value * (1 / scale))``; decoding takes ``code * scale``. Each operation rounds to fp32. An
all-zero block has scale 0 and codes 0. A block that holds an Inf or a NaN has scale Inf and codes 0, so all of it
decodes to NaN (0 * Inf).

[Note: Exact products]
A scale is truncated to 16 significant bits and a code has at most 7, so ``code * scale`` needs 23 of fp32's 24 bits and
is exact. A sum over peers is then the same to the bit whether or not a processor fuses the multiplication into the
addition; the GPU kernels do. Truncation lowers a scale by less than one part in 2**15, which raises
``absmax * (1 / scale)`` above ``qmax`` by less than 0.004 and rounds back to ``qmax``, so codes need no clamping.
SCALE_RAISE compensates for earlier roundings, so that ``absmax = qmax * scale`` yields the same scale again: decoding
and encoding again reproduces the payload.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes. Rows and their scales start at multiples of this, the widest access of a GPU thread."""

TAIL_STEP = ALIGNMENT // 4
"""Tails have a multiple of this many fp32 values, so that no padding follows them."""

BITS = (4, 8)
# A thread reads up to 32 codes (16 bytes of int4) with one scale, so they must all belong to one block.
MIN_BLOCK = 32
# One program holds a whole block in registers, or the maximum over a block would take a second pass over memory.
MAX_BLOCK = 4096

MIN_SCALE = 2.0**-126
"""Smallest normal fp32. It keeps ``1 / scale`` finite for blocks of tiny values."""

SCALE_MASK = -0x100
"""Bits of an fp32 that a scale keeps, as an int32: 16 of 24 significant bits. See [Note: Exact products]."""

SCALE_RAISE = 2.0**-22
"""Exceeds the errors of rounding ``1 / qmax`` and of a product with it, 2**-24 each."""


@dataclass(frozen=True)
class PayloadLayout:
    """Layout of the codes, the scales and the tail in a chunk's payload.

    Args:
        bits: Width of a code, 4 or 8.
        block: Number of values that share a scale, a power of two from 32 to 4096.
        tail: Number of fp32 values at the end of each row, a multiple of 4.

    Raises:
        ValueError: If ``bits``, ``block`` or ``tail`` has any other value.
    """

    bits: int
    block: int
    tail: int = 0

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits is {self.bits!r}, but a code has 4 or 8 bits")
        # Powers of two alone, since Triton's ranges are: tiles then hold whole blocks of every layout.
        if not MIN_BLOCK <= self.block <= MAX_BLOCK or self.block & (self.block - 1):
            raise ValueError(
                f"block is {self.block!r}, but a block is a power of two from {MIN_BLOCK} to {MAX_BLOCK} values"
            )
        if self.tail < 0 or self.tail % TAIL_STEP:
            raise ValueError(
                f"tail is {self.tail!r}, but a row ends in a multiple of 4 fp32 values; round it up, and set the "
                "surplus to 0"
            )

    @property
    def qmax(self) -> int:
        """Return the largest code, 7 or 127. Codes are symmetric, so -8 and -128 never occur."""
        return (1 << (self.bits - 1)) - 1

    def blocks(self, numel: int) -> int:
        """Return the number of blocks, and of scales, in a chunk of ``numel`` values."""
        return (numel + self.block - 1) // self.block

    def codes_nbytes(self, numel: int) -> int:
        """Return the bytes of the codes of ``numel`` values, without padding."""
        return (numel * self.bits + 7) // 8

    def scales_offset(self, numel: int) -> int:
        """Return the offset of the scales in the row, in bytes."""
        return _align(self.codes_nbytes(numel))

    def codes(self, payload: Tensor, numel: int) -> Tensor:
        """Return a view of the codes in a payload of chunks of ``numel`` values: uint8 [chunks, codes_nbytes]."""
        return payload[:, : self.codes_nbytes(numel)]

    def scales(self, payload: Tensor, numel: int) -> Tensor:
        """Return a view of the scales in a payload of chunks of ``numel`` values: fp32 [chunks, blocks(numel)]."""
        start = self.scales_offset(numel)
        return payload[:, start : start + 4 * self.blocks(numel)].view(torch.float32)

    def tail_offset(self, numel: int) -> int:
        """Return the offset of the tail in the row, in bytes: a multiple of 16."""
        return self.scales_offset(numel) + _align(4 * self.blocks(numel))

    def tails(self, payload: Tensor, numel: int) -> Tensor:
        """Return a view of the tails in a payload [..., nbytes(numel)]: fp32 [..., tail]."""
        return payload[..., self.tail_offset(numel) :].view(torch.float32)

    def nbytes(self, numel: int) -> int:
        """Return the length of a row in bytes, a multiple of 16. The row of an empty chunk is its tail."""
        return self.tail_offset(numel) + 4 * self.tail


def _align(nbytes: int) -> int:
    return (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
