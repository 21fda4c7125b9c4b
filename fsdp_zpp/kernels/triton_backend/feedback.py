# mypy: disable-error-code="no-untyped-def"
"""Triton kernels that quantize with error feedback: those of ``quantize_sum.py`` with one more load and store.

Errors can be updated in place because every thread reads its part of a block before any thread writes to that block:
all that is written depends, through the block's maximum, on all values that were read.
"""

import triton
import triton.language as tl

from .quantize_sum import load_blocks
from .tiles import decode_sum, encode, source_chunk, target_chunk, tile_index


@triton.jit
def _load_errors(
    errors_ptr,
    numel,
    row_units,
    zero,
    BLOCK: tl.constexpr,
    ERROR_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load the tile of the errors, fp32 [TILE // BLOCK, BLOCK]. Errors are in the order of the payload's rows."""
    if ERROR_BLOCK == 0:
        start = tile_index() * TILE
        offsets = tl.arange(0, TILE // BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        errors_ptr += target_chunk() * numel + start
        if MASKED:
            return tl.load(errors_ptr + offsets, mask=offsets < numel - start, other=0.0)
        else:
            return tl.load(errors_ptr + offsets)
    else:
        errors = decode_sum(
            errors_ptr, numel, row_units, 1.0, zero, target_chunk(), 1, 8, ERROR_BLOCK, TILE, GROUP, MASKED
        )
        return tl.reshape(errors, [TILE // BLOCK, BLOCK])


@triton.jit
def _store_errors(
    errors,
    errors_ptr,
    numel,
    row_units,
    BLOCK: tl.constexpr,
    ERROR_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):
    if ERROR_BLOCK == 0:
        start = tile_index() * TILE
        offsets = tl.arange(0, TILE // BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        errors_ptr += target_chunk() * numel + start
        if MASKED:
            tl.store(errors_ptr + offsets, errors, mask=offsets < numel - start)
        else:
            tl.store(errors_ptr + offsets, errors)
    else:
        errors = tl.reshape(errors, [TILE // ERROR_BLOCK, ERROR_BLOCK])
        encode(errors, errors_ptr, numel, row_units, 8, ERROR_BLOCK, TILE, GROUP, MASKED)


@triton.jit
def _encode_with_feedback(
    values,
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
    """Quantize values plus errors into the payload, and update the errors. ``rest`` is 1 - ``beta``.

    Errors are read and written in the groups of the values. In other groups they would go through shared memory twice.
    """
    errors = _load_errors(errors_ptr, numel, error_row_units, zero, BLOCK, ERROR_BLOCK, TILE, GROUP, MASKED)
    left_out, finite = encode(values + errors, words_ptr, numel, row_units, BITS, BLOCK, TILE, GROUP, MASKED)
    # A block that is not finite keeps its errors: NaN in them would never leave again.
    errors = tl.where(finite, beta * errors + rest * left_out, errors)
    _store_errors(errors, errors_ptr, numel, error_row_units, BLOCK, ERROR_BLOCK, TILE, GROUP, MASKED)


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
    _encode_with_feedback(
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
    _encode_with_feedback(
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
