# mypy: disable-error-code="no-untyped-def"
"""Part of the Triton kernels that quantizes one tile with error feedback, and updates its errors.

Errors can be updated in place because every thread reads its part of a block before any thread writes to that block:
all that is written depends, through the block's maximum, on all values that were read.
"""

import triton
import triton.language as tl

from .decoding import decode_sum
from .encoding import encode
from .tiles import target_chunk, tile_index


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
def encode_with_feedback(
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
