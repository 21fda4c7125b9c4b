# mypy: disable-error-code="no-untyped-def"
"""Kernels of deltas: one encodes values less what a payload decodes to, one adds a payload to another.

Each is a single pass: the decoded base is as large as the weights in fp32 and never goes through memory.
"""

import triton
import triton.language as tl

from .decoding import add_row, decode_sum
from .encoding import encode
from .quantize_sum import load_blocks
from .tiles import source_chunk, tile_index

_GROUP = tl.constexpr(16)  # int8 codes in a 16-byte access


@triton.jit
def _delta_tile(
    values_ptr,
    out_ptr,
    base_ptr,
    numel,
    base_row_units,
    row_units,
    base_zero,
    BASE_BITS: tl.constexpr,
    BASE_BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    values = load_blocks(values_ptr, numel, BLOCK, TILE, MASKED)
    row = source_chunk()
    change = add_row(
        values, base_ptr, numel, base_row_units, base_zero, row, -1.0, BASE_BITS, BASE_BLOCK, TILE, _GROUP, MASKED
    )
    encode(tl.reshape(change, [TILE // BLOCK, BLOCK]), out_ptr, numel, row_units, BITS, BLOCK, TILE, _GROUP, MASKED)


@triton.jit(do_not_specialize=["numel_units", "base_row_units", "row_units", "base_zero"])
def quantize_delta_kernel(
    values_ptr,
    out_ptr,
    base_ptr,
    numel_units,
    base_row_units,
    row_units,
    base_zero,
    ALIGN: tl.constexpr,
    BASE_BITS: tl.constexpr,
    BASE_BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Take a grid (tiles of a chunk, chunks, 1)."""
    numel = tl.cast(numel_units, tl.int64) * ALIGN
    if (tile_index() + 1) * TILE <= numel:
        _delta_tile(
            values_ptr,
            out_ptr,
            base_ptr,
            numel,
            base_row_units,
            row_units,
            base_zero,
            BASE_BITS,
            BASE_BLOCK,
            BITS,
            BLOCK,
            TILE,
            False,
        )
    else:
        _delta_tile(
            values_ptr,
            out_ptr,
            base_ptr,
            numel,
            base_row_units,
            row_units,
            base_zero,
            BASE_BITS,
            BASE_BLOCK,
            BITS,
            BLOCK,
            TILE,
            True,
        )


@triton.jit
def _add_tile(
    base_ptr,
    out_ptr,
    delta_ptr,
    numel,
    base_row_units,
    row_units,
    base_zero,
    zero,
    BASE_BITS: tl.constexpr,
    BASE_BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    row = source_chunk()
    base = decode_sum(
        base_ptr, numel, base_row_units, 1.0, base_zero, row, 1, BASE_BITS, BASE_BLOCK, TILE, _GROUP, MASKED
    )
    values = add_row(base, delta_ptr, numel, row_units, zero, row, 1.0, BITS, BLOCK, TILE, _GROUP, MASKED)
    values = tl.reshape(values, [TILE // BASE_BLOCK, BASE_BLOCK])
    encode(values, out_ptr, numel, base_row_units, BASE_BITS, BASE_BLOCK, TILE, _GROUP, MASKED)


@triton.jit(do_not_specialize=["numel", "base_row_units", "row_units", "base_zero", "zero"])
def add_delta_kernel(
    base_ptr,
    out_ptr,
    delta_ptr,
    numel,
    base_row_units,
    row_units,
    base_zero,
    zero,
    BASE_BITS: tl.constexpr,
    BASE_BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Take a grid (tiles of a chunk, chunks, 1)."""
    numel = tl.cast(numel, tl.int64)
    if (tile_index() + 1) * TILE <= numel:
        _add_tile(
            base_ptr,
            out_ptr,
            delta_ptr,
            numel,
            base_row_units,
            row_units,
            base_zero,
            zero,
            BASE_BITS,
            BASE_BLOCK,
            BITS,
            BLOCK,
            TILE,
            False,
        )
    else:
        _add_tile(
            base_ptr,
            out_ptr,
            delta_ptr,
            numel,
            base_row_units,
            row_units,
            base_zero,
            zero,
            BASE_BITS,
            BASE_BLOCK,
            BITS,
            BLOCK,
            TILE,
            True,
        )
