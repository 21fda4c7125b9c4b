# mypy: disable-error-code="no-untyped-def"
"""Kernel that decodes rows of NF4 codes, which lie apart."""

import triton
import triton.language as tl

from .quantize_sum import store_groups
from .tiles import codes_words, source_chunk, tile_index, word_ptrs


@triton.jit
def _nf4_tile(
    words_ptr,
    out_ptr,
    levels_ptr,
    numel,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):
    start = tile_index() * TILE
    scales_ptr = words_ptr.to(tl.pointer_type(tl.float32), bitcast=True) + codes_words(numel, 4) + start // BLOCK
    words_ptrs = word_ptrs(words_ptr + start // 8, 4, TILE, GROUP)
    block = tl.arange(0, TILE // BLOCK)[:, None]
    if MASKED:
        left = numel - start
        words = tl.load(words_ptrs, mask=tl.arange(0, TILE // GROUP)[:, None, None] * GROUP < left, other=0)
        scales = tl.load(scales_ptr + block, mask=block * BLOCK < left, other=0.0)
    else:
        words = tl.load(words_ptrs)
        scales = tl.load(scales_ptr + block)
    scales = tl.reshape(tl.broadcast_to(scales, [TILE // BLOCK, BLOCK // GROUP]), [TILE // GROUP, 1, 1])
    # The first value of each byte is its high nibble.
    codes = (words >> ((tl.arange(0, 8)[None, None, :] ^ 1) * 4)) & 15
    # All levels lie in one cache line, so a load takes less time than the selections that choose among 16 constants.
    values = tl.load(levels_ptr + codes) * scales
    # No eviction, whatever the size: the caller reads the rows next.
    store_groups(tl.reshape(values, [TILE // GROUP, GROUP]), out_ptr, numel, TILE, GROUP, MASKED, "")


@triton.jit(do_not_specialize=["numel_units", "stride_units"])
def nf4_rows_kernel(
    words_ptr,
    out_ptr,
    levels_ptr,
    numel_units,
    stride_units,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Take a grid (tiles of a chunk, 1, chunks); rows start ``stride_units`` times 16 bytes (4 words) apart."""
    numel = tl.cast(numel_units, tl.int64) * ALIGN
    words_ptr += source_chunk() * (tl.cast(stride_units, tl.int64) * 4)
    if (tile_index() + 1) * TILE <= numel:
        _nf4_tile(words_ptr, out_ptr, levels_ptr, numel, BLOCK, TILE, GROUP, False)
    else:
        _nf4_tile(words_ptr, out_ptr, levels_ptr, numel, BLOCK, TILE, GROUP, True)
