# mypy: disable-error-code="no-untyped-def"
"""Kernels that quantize, sum, and do both; their grids are (tiles of a chunk, cols, rows).

A kernel that reads or writes values takes ``numel`` in units of ``ALIGN`` values, which shows Triton how chunks are
aligned, and all take the length of payloads' rows in units of 16 bytes. No integer is specialized, or Triton would
compile further variants for sizes that happen to be 1 or multiples of 16. Sizes are widened to 64 bits before they are
multiplied.
"""

import triton
import triton.language as tl

from .decoding import decode_sum
from .encoding import encode
from .tiles import source_chunk, target_chunk, tile_index


@triton.jit
def load_blocks(values_ptr, numel, BLOCK: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
    """Load this program's tile, fp32 [TILE // BLOCK, BLOCK]; past the end of the chunk 0, as ``encode`` needs it."""
    start = tile_index() * TILE
    values_ptr += source_chunk() * numel + start
    offsets = tl.arange(0, TILE // BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if MASKED:
        values = tl.load(values_ptr + offsets, mask=offsets < numel - start, other=0.0)
    else:
        values = tl.load(values_ptr + offsets)
    return values.to(tl.float32)


@triton.jit
def store_groups(
    values,
    out_ptr,
    numel,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """Store this program's tile, fp32 [TILE // GROUP, GROUP], in the output's dtype: the only rounding to it."""
    start = tile_index() * TILE
    out_ptr += target_chunk() * numel + start
    offsets = tl.arange(0, TILE // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = values.to(out_ptr.dtype.element_ty)
    if MASKED:
        tl.store(out_ptr + offsets, values, mask=offsets < numel - start, eviction_policy=EVICTION)
    else:
        tl.store(out_ptr + offsets, values, eviction_policy=EVICTION)


@triton.jit
def _quantize_tile(
    values_ptr,
    words_ptr,
    numel,
    row_units,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):
    values = load_blocks(values_ptr, numel, BLOCK, TILE, MASKED)
    encode(values, words_ptr, numel, row_units, BITS, BLOCK, TILE, GROUP, MASKED)


@triton.jit(do_not_specialize=["numel_units", "row_units"])
def quantize_kernel(
    values_ptr,
    words_ptr,
    numel_units,
    row_units,
    ALIGN: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    numel = tl.cast(numel_units, tl.int64) * ALIGN
    if (tile_index() + 1) * TILE <= numel:
        _quantize_tile(values_ptr, words_ptr, numel, row_units, BITS, BLOCK, TILE, GROUP, False)
    else:
        _quantize_tile(values_ptr, words_ptr, numel, row_units, BITS, BLOCK, TILE, GROUP, True)


@triton.jit
def _sum_tile(
    words_ptr,
    out_ptr,
    numel,
    row_units,
    scale,
    zero,
    PEERS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    EVICTION: tl.constexpr,
    MASKED: tl.constexpr,
):
    total = decode_sum(
        words_ptr, numel, row_units, scale, zero, source_chunk(), PEERS, BITS, BLOCK, TILE, GROUP, MASKED
    )
    store_groups(tl.reshape(total, [TILE // GROUP, GROUP]), out_ptr, numel, TILE, GROUP, MASKED, EVICTION)


@triton.jit(do_not_specialize=["numel_units", "row_units", "zero"])
def sum_kernel(
    words_ptr,
    out_ptr,
    scale,
    numel_units,
    row_units,
    zero,
    ALIGN: tl.constexpr,
    PEERS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    EVICTION: tl.constexpr,
):
    numel = tl.cast(numel_units, tl.int64) * ALIGN
    if (tile_index() + 1) * TILE <= numel:
        _sum_tile(words_ptr, out_ptr, numel, row_units, scale, zero, PEERS, BITS, BLOCK, TILE, GROUP, EVICTION, False)
    else:
        _sum_tile(words_ptr, out_ptr, numel, row_units, scale, zero, PEERS, BITS, BLOCK, TILE, GROUP, EVICTION, True)


@triton.jit
def _sum_quantize_tile(
    words_ptr,
    out_ptr,
    numel,
    row_units,
    out_row_units,
    scale,
    zero,
    PEERS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OUT_BITS: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):
    total = decode_sum(
        words_ptr, numel, row_units, scale, zero, source_chunk(), PEERS, BITS, BLOCK, TILE, GROUP, MASKED
    )
    # Past the end of the chunk all codes are 0, padded or masked, and so are the sums, as ``encode`` needs it.
    total = tl.reshape(total, [TILE // OUT_BLOCK, OUT_BLOCK])
    encode(total, out_ptr, numel, out_row_units, OUT_BITS, OUT_BLOCK, TILE, GROUP, MASKED)


@triton.jit(do_not_specialize=["numel", "row_units", "out_row_units", "zero"])
def sum_quantize_kernel(
    words_ptr,
    out_ptr,
    scale,
    numel,
    row_units,
    out_row_units,
    zero,
    PEERS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OUT_BITS: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    numel = tl.cast(numel, tl.int64)
    if (tile_index() + 1) * TILE <= numel:
        _sum_quantize_tile(
            words_ptr,
            out_ptr,
            numel,
            row_units,
            out_row_units,
            scale,
            zero,
            PEERS,
            BITS,
            BLOCK,
            OUT_BITS,
            OUT_BLOCK,
            TILE,
            GROUP,
            False,
        )
    else:
        _sum_quantize_tile(
            words_ptr,
            out_ptr,
            numel,
            row_units,
            out_row_units,
            scale,
            zero,
            PEERS,
            BITS,
            BLOCK,
            OUT_BITS,
            OUT_BLOCK,
            TILE,
            GROUP,
            True,
        )
