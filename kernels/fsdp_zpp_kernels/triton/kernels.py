"""Triton kernels: encoding, sums, deltas, error feedback and NF4."""

import triton
import triton.language as tl

from .tiles import (
    add_row,
    codes_words,
    decode_sum,
    encode,
    encode_with_feedback,
    load_row,
    source_chunk,
    target_chunk,
    tile_index,
    word_ptrs,
)

# ---- quantize sum
#
# Kernels that quantize, sum, and do both; their grids are (tiles of a chunk, cols, rows).
#
# A kernel that reads or writes values takes ``numel`` in units of ``ALIGN`` values, which shows Triton how chunks are
# aligned, and all take the length of payloads' rows in units of 16 bytes. No integer is specialized, or Triton would
# compile further variants for sizes that happen to be 1 or multiples of 16. Sizes are widened to 64 bits before they
# are multiplied.

# mypy: disable-error-code="no-untyped-def"


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


# ---- rows
#
# Kernel that decodes rows of a payload that lie apart.

# mypy: disable-error-code="no-untyped-def"


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


# ---- nf4
#
# Kernel that decodes rows of NF4 codes, which lie apart.

# mypy: disable-error-code="no-untyped-def"


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


# ---- delta
#
# Kernels of deltas: one encodes values less what a payload decodes to, one adds a payload to another.
#
# Each is a single pass: the decoded base is as large as the weights in fp32 and never goes through memory.

# mypy: disable-error-code="no-untyped-def"


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


# ---- feedback
#
# Triton kernels that quantize with error feedback: those above with one more load and store.

# mypy: disable-error-code="no-untyped-def"


@triton.jit
def _quantize_feedback_tile(
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
        _quantize_feedback_tile(
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
        _quantize_feedback_tile(
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
def _sum_feedback_tile(
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
        _sum_feedback_tile(
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
        _sum_feedback_tile(
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
