"""The payload format: how the quantized values of one chunk lie in memory and on the wire.

A *chunk* is a run of contiguous values, one rank's shard. It is quantized in blocks of ``block`` values that never
straddle a chunk; the last one may be partial. Its payload is one row of bytes::

    | codes, ``bits`` each | zeros to 16 | one fp32 scale a block | zeros to 16 |

An int8 code is one two's-complement byte. Two int4 codes share a byte: value ``2i`` is the low nibble, value ``2i + 1``
the high one. So code ``i`` of a little-endian word sits at bit ``i * bits``, whatever the width.
The padding is zero because ranks compare payloads byte by byte.

The numbers: ``scale = truncated(max(absmax * ((1 + SCALE_RAISE) / qmax), MIN_SCALE))``,
``code = round_half_even(value * (1 / scale))``, and back ``code * scale``, each operation rounded to fp32. An all-zero
block has scale 0 and codes 0. A block that holds an Inf or a NaN has scale Inf and codes 0, so that all of it decodes
to NaN.

Scales are truncated to 16 significant bits, so that ``code * scale`` is exact in fp32: a sum over peers comes out the
same to the bit whether a processor fuses products into it or not, and GPUs fuse. Truncation takes a scale down by less
than one part in 2**15 and so ``absmax * (1 / scale)`` past ``qmax`` by less than 0.004, which rounds back to it: codes
need no clamping. SCALE_RAISE makes up for the roundings before, so that ``absmax = qmax * scale`` finds its scale
again: what was decoded is quantized to what it was decoded from.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes. Rows and their scales start on multiples of this: the widest access of a GPU thread."""

BITS = (4, 8)
MIN_BLOCK = 32
MAX_BLOCK = 4096

MIN_SCALE = 2.0**-126
"""The smallest normal fp32: keeps ``1 / scale`` finite for blocks of tiny values."""

SCALE_MASK = -0x100
"""The bits of an fp32 that a scale has, as an int32: the lowest 8 are 0."""

SCALE_RAISE = 2.0**-22
"""More than the roundings of ``1 / qmax`` and of a product with it, which are 2**-24 each."""


@dataclass(frozen=True)
class PayloadLayout:
    """Where the codes and the scales of a chunk's payload are.

    Args:
        bits: width of a code, 4 or 8.
        block: values that share a scale, a power of two from 32 to 4096.

    Raises:
        ValueError: ``bits`` or ``block`` is none of the above.
    """

    bits: int
    block: int

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits is {self.bits!r}, but a code has 4 or 8 bits")
        if not MIN_BLOCK <= self.block <= MAX_BLOCK or self.block & (self.block - 1):
            raise ValueError(
                f"block is {self.block!r}, but a block is a power of two from {MIN_BLOCK} to {MAX_BLOCK} values"
            )

    @property
    def qmax(self) -> int:
        """The largest code: 7 or 127. Codes are symmetric, so -8 and -128 are never written."""
        return (1 << (self.bits - 1)) - 1

    def blocks(self, numel: int) -> int:
        """The number of blocks, and so of scales, of a chunk of ``numel`` values."""
        return (numel + self.block - 1) // self.block

    def codes_nbytes(self, numel: int) -> int:
        """The bytes that the codes of ``numel`` values take, without padding."""
        return (numel * self.bits + 7) // 8

    def scales_offset(self, numel: int) -> int:
        """The byte of the row at which the scales start."""
        return _align(self.codes_nbytes(numel))

    def codes(self, payload: Tensor, numel: int) -> Tensor:
        """The codes in a payload of chunks of ``numel`` values, as a view: uint8 [chunks, codes_nbytes(numel)]."""
        return payload[:, : self.codes_nbytes(numel)]

    def scales(self, payload: Tensor, numel: int) -> Tensor:
        """The scales in a payload of chunks of ``numel`` values, as a view: fp32 [chunks, blocks(numel)]."""
        start = self.scales_offset(numel)
        return payload[:, start : start + 4 * self.blocks(numel)].view(torch.float32)

    def nbytes(self, numel: int) -> int:
        """The length of the row in bytes: 0 for an empty chunk, otherwise a multiple of 16."""
        return self.scales_offset(numel) + _align(4 * self.blocks(numel))


def _align(nbytes: int) -> int:
    return (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
