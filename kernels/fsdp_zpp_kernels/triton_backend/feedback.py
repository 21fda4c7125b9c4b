# mypy: disable-error-code="no-untyped-def"
"""Triton kernels that quantize with error feedback: those of ``quantize_sum.py`` with one more load and store."""

import triton
import triton.language as tl

from .decoding import decode_sum
from .error_tiles import encode_with_feedback
from .quantize_sum import load_blocks
from .tiles import source_chunk, tile_index


@triton.jit
def _quantize_tile(
    values_ptr,
    words_ptr,
    errors_ptr,
    numel,
    row_units,
    error_row_units,
    beta,
    rest,
    zero,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ERROR_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):
    values = load_blocks(values_ptr, numel, BLOCK, TILE, MASKED)
    encode_with_feedback(
        values,
        words_ptr,
        errors_ptr,
        numel,
        row_units,
        error_row_units,
        beta,
        rest,
        zero,
        BITS,
        BLOCK,
        ERROR_BLOCK,
        TILE,
        GROUP,
        MASKED,
    )


@triton.jit(do_not_specialize=["numel_units", "row_units", "error_row_units", "zero"])
def quantize_with_feedback_kernel(
    values_ptr,
    words_ptr,
    errors_ptr,
    beta,
    rest,
    numel_units,
    row_units,
    error_row_units,
    zero,
    ALIGN: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ERROR_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    numel = tl.cast(numel_units, tl.int64) * ALIGN
    if (tile_index() + 1) * TILE <= numel:
        _quantize_tile(
            values_ptr,
            words_ptr,
            errors_ptr,
            numel,
            row_units,
            error_row_units,
            beta,
            rest,
            zero,
            BITS,
            BLOCK,
            ERROR_BLOCK,
            TILE,
            GROUP,
            False,
        )
    else:
        _quantize_tile(
            values_ptr,
            words_ptr,
            errors_ptr,
            numel,
            row_units,
            error_row_units,
            beta,
            rest,
            zero,
            BITS,
            BLOCK,
            ERROR_BLOCK,
            TILE,
            GROUP,
            True,
        )


@triton.jit
def _sum_quantize_tile(
    words_ptr,
    out_ptr,
    errors_ptr,
    numel,
    row_units,
    out_row_units,
    error_row_units,
    scale,
    beta,
    rest,
    zero,
    error_zero,
    PEERS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OUT_BITS: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    ERROR_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    total = decode_sum(words_ptr, numel, row_units, scale, zero, source_chunk(), PEERS, BITS, BLOCK, TILE, 16, MASKED)
    total = tl.reshape(total, [TILE // OUT_BLOCK, OUT_BLOCK])
    encode_with_feedback(
        total,
        out_ptr,
        errors_ptr,
        numel,
        out_row_units,
        error_row_units,
        beta,
        rest,
        error_zero,
        OUT_BITS,
        OUT_BLOCK,
        ERROR_BLOCK,
        TILE,
        16,
        MASKED,
    )


@triton.jit(do_not_specialize=["numel", "row_units", "out_row_units", "error_row_units", "zero", "error_zero"])
def sum_quantize_with_feedback_kernel(
    words_ptr,
    out_ptr,
    errors_ptr,
    scale,
    beta,
    rest,
    numel,
    row_units,
    out_row_units,
    error_row_units,
    zero,
    error_zero,
    PEERS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OUT_BITS: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    ERROR_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    numel = tl.cast(numel, tl.int64)
    if (tile_index() + 1) * TILE <= numel:
        _sum_quantize_tile(
            words_ptr,
            out_ptr,
            errors_ptr,
            numel,
            row_units,
            out_row_units,
            error_row_units,
            scale,
            beta,
            rest,
            zero,
            error_zero,
            PEERS,
            BITS,
            BLOCK,
            OUT_BITS,
            OUT_BLOCK,
            ERROR_BLOCK,
            TILE,
            False,
        )
    else:
        _sum_quantize_tile(
            words_ptr,
            out_ptr,
            errors_ptr,
            numel,
            row_units,
            out_row_units,
            error_row_units,
            scale,
            beta,
            rest,
            zero,
            error_zero,
            PEERS,
            BITS,
            BLOCK,
            OUT_BITS,
            OUT_BLOCK,
            ERROR_BLOCK,
            TILE,
            True,
        )
