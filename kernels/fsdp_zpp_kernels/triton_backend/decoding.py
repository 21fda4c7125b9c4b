# mypy: disable-error-code="no-untyped-def"
"""Parts of the Triton kernels that decode one tile of a payload, and sum it over peers."""

import triton
import triton.language as tl

from .tiles import codes_words, row_words, tile_index, word_ptrs


@triton.jit
def _load_codes(
    words_ptr,
    scales_ptr,
    left,
    zero,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load the tile whose first word and scale the pointers point to; ``left`` values of the chunk start there.

    Half the codes of a word become floats where they are, the other half after one shift of the word. A code is masked
    into the mantissa of a float whose exponent gives the code's lowest bit the weight 1. Flipping the code's sign bit
    turns two's complement into an offset, so code 0 becomes ``zeros``, and subtracting that leaves the code. That takes
    fewer instructions than extracting each code and converting it from int.

    Returns:
        The codes, fp32 [TILE // GROUP, words a group, codes a word], and their scales, fp32 [TILE // GROUP, 1, 1].
    """
    words_ptrs = word_ptrs(words_ptr, BITS, TILE, GROUP)
    # One pointer per block: the scales of a thread's groups are then a constant distance apart.
    block = tl.arange(0, TILE // BLOCK)[:, None]
    if MASKED:
        # Masking whole groups suffices: a group that starts inside the chunk ends inside its padded codes.
        words = tl.load(words_ptrs, mask=tl.arange(0, TILE // GROUP)[:, None, None] * GROUP < left, other=0)
        scales = tl.load(scales_ptr + block, mask=block * BLOCK < left, other=0.0)
    else:
        words = tl.load(words_ptrs)
        scales = tl.load(scales_ptr + block)
    scales = tl.reshape(tl.broadcast_to(scales, [TILE // BLOCK, BLOCK // GROUP]), [TILE // GROUP, 1, 1])

    HALF: tl.constexpr = 16 // BITS
    OFFSET: tl.constexpr = 1 << (BITS - 1)
    # The upper half is shifted by less than 16 bits and so stays this far above bit 0. For codes at bit 0, ptxas would
    # replace a shift by 16 by two instructions. Mantissas have 23 bits: room for 16 above the lift.
    LIFT: tl.constexpr = 4 if BITS == 4 else 1
    code = tl.arange(0, 2 * HALF)[None, None, :]
    position = code % HALF * BITS + code // HALF * LIFT
    # ``zero`` with the offset moved up by ``position`` bits and the exponent lowered by as much, to weigh it the same.
    zeros = zero + ((OFFSET << position) - OFFSET - (position << 23))
    # The words are signed, so the shift fills in copies of the sign bit, which the mask drops.
    mask = ((1 << BITS) - 1) << position
    biased = ((words >> (code // HALF * (16 - LIFT))) & mask) ^ zeros
    return biased.to(tl.float32, bitcast=True) - zeros.to(tl.float32, bitcast=True), scales


@triton.jit
def _tile_ptrs(row_ptr, numel, BITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return pointers to the first word and scale of this program's tile of the payload row at ``row_ptr``."""
    scales_ptr = row_ptr.to(tl.pointer_type(tl.float32), bitcast=True) + codes_words(numel, BITS)
    return row_ptr + tile_index() * (TILE * BITS // 32), scales_ptr + tile_index() * (TILE // BLOCK)


@triton.jit
def load_row(
    row_ptr,
    numel,
    zero,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load this program's tile of the payload row at ``row_ptr``; ``zero`` and the results as in ``_load_codes``."""
    words_ptr, scales_ptr = _tile_ptrs(row_ptr, numel, BITS, BLOCK, TILE)
    return _load_codes(words_ptr, scales_ptr, numel - tile_index() * TILE, zero, BITS, BLOCK, TILE, GROUP, MASKED)


@triton.jit
def add_row(
    values,
    words_ptr,
    numel,
    row_units,
    zero,
    row,
    sign,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Decode row ``row``, and add ``sign`` (1 or -1) times its values to ``values``, this program's tile in any shape.

    Returns:
        fp32 [TILE // GROUP, words a group, codes a word].
    """
    row_ptr = words_ptr + row * row_words(row_units)
    codes, scales = load_row(row_ptr, numel, zero, BITS, BLOCK, TILE, GROUP, MASKED)
    # The product is exact, as in ``decode_sum``, and so is that with a sign.
    return tl.fma(codes, sign * scales, tl.reshape(values, codes.shape))


@triton.jit
def decode_sum(
    words_ptr,
    numel,
    row_units,
    scale,
    zero,
    row,
    PEERS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Decode this program's tile of row ``row`` of every peer's payload; return ``scale`` times the sum, in peer order.

    ``zero`` holds the bits of the float that code 0 in the lowest bits of a word decodes to: 2**23 plus the code's
    offset. It is a kernel argument because with a constant, ptxas takes two instructions, not one, to mask a code and
    insert it, and int4 sums over 8 peers are close to the limit of the instruction rate already.

    Returns:
        fp32 [TILE // GROUP, words a group, codes a word].
    """
    stride = row_words(row_units)
    # A peer's payload has as many rows as the grid has chunks; the peers follow one another.
    peer_words = tl.num_programs(1) * tl.num_programs(2) * stride
    words_ptr, scales_ptr = _tile_ptrs(words_ptr + row * stride, numel, BITS, BLOCK, TILE)
    left = numel - tile_index() * TILE
    codes, scales = _load_codes(words_ptr, scales_ptr, left, zero, BITS, BLOCK, TILE, GROUP, MASKED)
    total = codes * scales
    if PEERS <= 8:
        # Unrolled, so that loads from all peers are in flight at once.
        for _ in tl.static_range(1, PEERS):
            words_ptr += peer_words
            scales_ptr += peer_words
            codes, scales = _load_codes(words_ptr, scales_ptr, left, zero, BITS, BLOCK, TILE, GROUP, MASKED)
            # The product is exact ([Note: Exact products] in payload.py), so one fma rounds as product and sum do.
            total = tl.fma(codes, scales, total)
    else:
        for _ in range(1, PEERS):
            words_ptr += peer_words
            scales_ptr += peer_words
            codes, scales = _load_codes(words_ptr, scales_ptr, left, zero, BITS, BLOCK, TILE, GROUP, MASKED)
            total = tl.fma(codes, scales, total)
    return total * scale
