# mypy: disable-error-code="no-untyped-def"
"""Kernel that decodes rows of a payload that lie apart."""

import triton
import triton.language as tl

from .decoding import load_row
from .quantize_sum import store_groups
from .tiles import source_chunk, tile_index


@triton.jit
def _rows_tile(
    words_ptr,
    out_ptr,
    numel,
    zero,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):
    codes, scales = load_row(words_ptr, numel, zero, BITS, BLOCK, TILE, GROUP, MASKED)
    values = tl.reshape(codes * scales, [TILE // GROUP, GROUP])
    # No eviction, whatever the size: the caller reads the rows next.
    store_groups(values, out_ptr, numel, TILE, GROUP, MASKED, "")


@triton.jit(do_not_specialize=["numel_units", "stride_units", "zero"])
def rows_kernel(
    words_ptr,
    out_ptr,
    numel_units,
    stride_units,
    zero,
    ALIGN: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Take a grid (tiles of a chunk, 1, chunks); rows start ``stride_units`` times 16 bytes (4 words) apart."""
    numel = tl.cast(numel_units, tl.int64) * ALIGN
    words_ptr += source_chunk() * (tl.cast(stride_units, tl.int64) * 4)
    if (tile_index() + 1) * TILE <= numel:
        _rows_tile(words_ptr, out_ptr, numel, zero, BITS, BLOCK, TILE, GROUP, False)
    else:
        _rows_tile(words_ptr, out_ptr, numel, zero, BITS, BLOCK, TILE, GROUP, True)
