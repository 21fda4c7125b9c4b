"""Triton kernels: encoding, sums, deltas, error feedback and NF4."""

import triton
import triton.language as tl

from .tiles import (
    add_row,
    decode_sum,
    encode,
    encode_with_feedback,
    group_ptrs,
    in_groups,
    in_register,
    load_blocks,
    load_inside,
    load_row,
    load_words,
    row_words,
    source_chunk,
    spread,
    store_groups,
    tile_index,
    tile_ptrs,
)

# ---- quantize sum
#
# Kernels that quantize, sum, and do both; their grids are (tiles of a chunk, cols, rows).
#
# A kernel that reads or writes values, not only payloads, takes ``numel`` in units of ``ALIGN`` values, so Triton knows
# how chunks are aligned. All kernels take the length of payload rows in units of 16 bytes. No integer is specialized:
# Triton would compile more variants, for 1 and for multiples of 16. Sizes become 64-bit before they are multiplied.
#
# [Note: Masks]
# Only a chunk's last tile needs masks. So the body of a kernel is compiled twice, with and without masks (``MASKED``),
# and a program runs the version that suits its tile.

# mypy: disable-error-code="no-untyped-def"


@triton.jit
def suits_tile(MASKED: tl.constexpr, numel, TILE: tl.constexpr):
    end = (tile_index() + 1) * TILE
    return end > numel if MASKED else end <= numel


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
    for MASKED in tl.static_range(2):  # [Note: Masks]
        if suits_tile(MASKED, numel, TILE):
            values = load_blocks(values_ptr, source_chunk(), numel, BLOCK, TILE, MASKED)
            encode(values, words_ptr, numel, row_units, BITS, BLOCK, TILE, GROUP, MASKED)


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
    row = source_chunk()
    for MASKED in tl.static_range(2):  # [Note: Masks]
        if suits_tile(MASKED, numel, TILE):
            total = decode_sum(words_ptr, numel, row_units, scale, zero, row, PEERS, BITS, BLOCK, TILE, GROUP, MASKED)
            store_groups(total, out_ptr, numel, TILE, GROUP, MASKED, EVICTION)


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
    row = source_chunk()
    for MASKED in tl.static_range(2):  # [Note: Masks]
        if suits_tile(MASKED, numel, TILE):
            total = decode_sum(words_ptr, numel, row_units, scale, zero, row, PEERS, BITS, BLOCK, TILE, GROUP, MASKED)
            # Past the end of the chunk, padding and masks make all codes and sums 0, as ``encode`` needs it.
            total = tl.reshape(total, [TILE // OUT_BLOCK, OUT_BLOCK])
            encode(total, out_ptr, numel, out_row_units, OUT_BITS, OUT_BLOCK, TILE, GROUP, MASKED)


# ---- rows
#
# Kernels that decode payload rows, adjacent or apart. Their grids are (tiles of a chunk, 1, chunks), and rows
# start ``stride_units`` times 16 bytes (4 words) apart. The output is never evicted first: the caller reads it next.


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
    numel = tl.cast(numel_units, tl.int64) * ALIGN
    words_ptr += source_chunk() * row_words(stride_units)
    for MASKED in tl.static_range(2):  # [Note: Masks]
        if suits_tile(MASKED, numel, TILE):
            codes, scales = load_row(words_ptr, numel, zero, BITS, BLOCK, TILE, GROUP, MASKED)
            store_groups(codes * scales, out_ptr, numel, TILE, GROUP, MASKED, "")


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
    numel = tl.cast(numel_units, tl.int64) * ALIGN
    words_ptr += source_chunk() * row_words(stride_units)
    for MASKED in tl.static_range(2):  # [Note: Masks]
        if suits_tile(MASKED, numel, TILE):
            tile_ptr, scales_ptr = tile_ptrs(words_ptr, numel, 4, BLOCK, TILE)
            left = numel - tile_index() * TILE
            words, scales = load_words(tile_ptr, scales_ptr, left, 4, BLOCK, TILE, GROUP, MASKED)
            # The first value of each byte is its high nibble.
            codes = (words >> ((tl.arange(0, 8)[None, None, :] ^ 1) * 4)) & 15
            # All levels lie in one cache line, so loading one is faster than selecting it among 16 constants.
            store_groups(tl.load(levels_ptr + codes) * scales, out_ptr, numel, TILE, GROUP, MASKED, "")


# ---- delta
#
# Kernels of deltas: one encodes values minus a decoded base, the other adds a delta's payload to a base's. Their grids
# are (tiles of a chunk, chunks, 1).
#
# Each is a single pass, so the decoded base, as large as the weights in fp32, is never in memory.


@triton.jit
def load_spread(values_ptr, numel, TILE: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, MASKED: tl.constexpr):
    """Load this program's tile, fp32 [TILE // GROUP, GROUP, 1]; 0 past the end of the chunk, as ``encode`` needs it."""
    start = tile_index() * TILE
    offsets = spread(values_ptr.dtype.element_ty, 1, TILE, GROUP, PARTS)
    values_ptrs = group_ptrs(values_ptr + source_chunk() * numel + start, offsets)
    values = load_inside(values_ptrs, offsets < numel - start, MASKED)
    if values.dtype == tl.bfloat16:  # Triton's conversion takes two instructions for every other value
        values = (values.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return in_groups(values.to(tl.float32), TILE, GROUP, PARTS)


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
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
):
    numel = tl.cast(numel_units, tl.int64) * ALIGN
    base_ptr += source_chunk() * row_words(base_row_units)
    zero = in_register(base_zero, TILE, GROUP)
    for MASKED in tl.static_range(2):  # [Note: Masks]
        if suits_tile(MASKED, numel, TILE):
            values = load_spread(values_ptr, numel, TILE, GROUP, PARTS, MASKED)
            change = add_row(values, base_ptr, numel, zero, -1.0, BASE_BITS, BASE_BLOCK, TILE, GROUP, MASKED, PARTS)
            change = tl.reshape(change, [TILE // BLOCK, BLOCK])
            encode(change, out_ptr, numel, row_units, BITS, BLOCK, TILE, GROUP, MASKED, PARTS)


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
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
):
    numel = tl.cast(numel, tl.int64)
    base_ptr += source_chunk() * row_words(base_row_units)
    delta_ptr += source_chunk() * row_words(row_units)
    base_zero, zero = in_register(base_zero, TILE, GROUP), in_register(zero, TILE, GROUP)
    for MASKED in tl.static_range(2):  # [Note: Masks]
        if suits_tile(MASKED, numel, TILE):
            codes, scales = load_row(base_ptr, numel, base_zero, BASE_BITS, BASE_BLOCK, TILE, GROUP, MASKED, PARTS)
            values = add_row(codes * scales, delta_ptr, numel, zero, 1.0, BITS, BLOCK, TILE, GROUP, MASKED, PARTS)
            values = tl.reshape(values, [TILE // BASE_BLOCK, BASE_BLOCK])
            encode(values, out_ptr, numel, base_row_units, BASE_BITS, BASE_BLOCK, TILE, GROUP, MASKED, PARTS)


# ---- feedback
#
# Kernels that quantize with error feedback: they also load and store the errors.


@triton.jit(do_not_specialize=["numel_units", "row_units", "error_row_units", "error_zero"])
def quantize_with_feedback_kernel(
    values_ptr,
    words_ptr,
    errors_ptr,
    beta,
    rest,
    numel_units,
    row_units,
    error_row_units,
    error_zero,
    ALIGN: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ERROR_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    numel = tl.cast(numel_units, tl.int64) * ALIGN
    for MASKED in tl.static_range(2):  # [Note: Masks]
        if suits_tile(MASKED, numel, TILE):
            values = load_blocks(values_ptr, source_chunk(), numel, BLOCK, TILE, MASKED)
            encode_with_feedback(
                values,
                words_ptr,
                errors_ptr,
                numel,
                row_units,
                error_row_units,
                beta,
                rest,
                error_zero,
                BITS,
                BLOCK,
                ERROR_BLOCK,
                TILE,
                GROUP,
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
    row = source_chunk()
    for MASKED in tl.static_range(2):  # [Note: Masks]
        if suits_tile(MASKED, numel, TILE):
            total = decode_sum(words_ptr, numel, row_units, scale, zero, row, PEERS, BITS, BLOCK, TILE, 16, MASKED)
            encode_with_feedback(
                tl.reshape(total, [TILE // OUT_BLOCK, OUT_BLOCK]),
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
