"""Tiles of Triton kernels: how a program reads, encodes, decodes and writes its part of a payload."""

import triton
import triton.language as tl

from fsdp_zpp_kernels.reference import MAX_SCALE, MIN_SCALE, RMS_SCALES, SCALE_MASK, SCALE_RAISE, SQUARED_STEPS

# mypy: disable-error-code="no-untyped-def"

# ---- tiles
#
# Tiles of Triton kernels: which chunk a program reads and writes, and where its codes lie.
#
# The grid is (tiles of a chunk, cols, rows), so that no program divides to find its place. A program reads chunk (r, c)
# in row-major order and writes to chunk (c, r) of the result. The offset of a tile is 64-bit, since a tensor may
# have more than 2**31 elements; offsets inside a tile are 32-bit.
#
# The kernels are bound by memory only as long as they spend few instructions on a value, so they save instructions. A
# thread holds groups of ``GROUP`` neighbouring values, one 16-byte access wide, and reads their codes and scale itself;
# threads only exchange the maximum over a block. Codes are handled as 32-bit words (see ``reference.py``).
# In kernels that encode deltas, the ``PARTS`` groups of a thread lie 8 groups apart in one run. So they mostly share a
# block, and a thread computes one scale, not one for each group. Elsewhere, PARTS is 1 and a warp's groups adjoin.
# ``MASKED`` marks the partial tile at the end of a chunk; all other tiles run without masks.


@triton.jit
def source_chunk():
    return (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)


@triton.jit
def target_chunk():
    return (tl.program_id(1) * tl.num_programs(2) + tl.program_id(2)).to(tl.int64)


@triton.jit
def tile_index():
    return tl.program_id(0).to(tl.int64)


@triton.jit
def codes_words(numel, BITS: tl.constexpr):
    # PayloadLayout.scales_offset in words. The `* 4` at the end shows Triton the 16-byte alignment.
    if BITS == 3:
        return ((numel + 31) // 32 * 3 + 3) // 4 * 4
    else:
        return (numel * BITS + 127) // 128 * 4


@triton.jit
def row_words(row_units):
    # The number of words in a row, tail included; a unit is 16 bytes. In this form, Triton sees the alignment.
    return tl.cast(row_units, tl.int64) * 4


@triton.jit
def load_inside(ptrs, inside, MASKED: tl.constexpr):
    """Load what is ``inside``, and 0 elsewhere; without ``MASKED``, all is inside."""
    return tl.load(ptrs, mask=inside, other=0) if MASKED else tl.load(ptrs)


@triton.jit
def store_inside(ptrs, values, inside, MASKED: tl.constexpr, EVICTION: tl.constexpr):
    if MASKED:
        tl.store(ptrs, values, mask=inside, eviction_policy=EVICTION)
    else:
        tl.store(ptrs, values, eviction_policy=EVICTION)


@triton.jit
def load_blocks(values_ptr, chunk, numel, BLOCK: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
    """Load this program's tile of a chunk, fp32 [TILE // BLOCK, BLOCK]; 0 past the chunk's end, as ``encode`` needs."""
    start = tile_index() * TILE
    values_ptr += chunk * numel + start
    offsets = tl.arange(0, TILE // BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    return load_inside(values_ptr + offsets, offsets < numel - start, MASKED).to(tl.float32)


@triton.jit
def store_groups(
    values, out_ptr, numel, TILE: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr, EVICTION: tl.constexpr
):
    """Store this program's tile, fp32 in any shape, rounded once to the output's dtype."""
    start = tile_index() * TILE
    out_ptr += target_chunk() * numel + start
    offsets = tl.arange(0, TILE // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.reshape(values, [TILE // GROUP, GROUP]).to(out_ptr.dtype.element_ty)
    store_inside(out_ptr + offsets, values, offsets < numel - start, MASKED, EVICTION)


@triton.jit
def word_offsets(BITS: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr):
    """Return the offsets of a tile's words: [TILE // GROUP, words a group, 1], or those of ``spread``."""
    if PARTS > 1:
        return spread(tl.int32, 32 // BITS, TILE, GROUP, PARTS)
    else:
        WORDS: tl.constexpr = GROUP * BITS // 32
        return tl.arange(0, TILE // GROUP)[:, None, None] * WORDS + tl.arange(0, WORDS)[None, :, None]


@triton.jit
def spread(DTYPE: tl.constexpr, PER: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr):
    """Return the offsets of a tile's elements, of ``PER`` values each: [accesses, elements an access]."""
    # Triton deals the first axis out to threads in turn, and which axis comes next depends on its version. So one axis
    # counts, from fast to slow, neighbouring groups, runs, a thread's groups in a run, and the accesses of a group.
    SIZE: tl.constexpr = GROUP // PER
    WIDEST: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    WIDTH: tl.constexpr = WIDEST if WIDEST < SIZE else SIZE
    RUNS: tl.constexpr = TILE // (8 * PARTS * GROUP)
    slot = tl.arange(0, TILE // PER // WIDTH)
    group = slot // 8 % RUNS * (8 * PARTS) + slot // (8 * RUNS) % PARTS * 8 + slot % 8
    start = group * SIZE + slot // (8 * RUNS * PARTS) * WIDTH
    return start[:, None] + tl.arange(0, WIDTH)[None, :]


@triton.jit
def group_ptrs(ptr, offsets):
    # Without this hint, Triton would access more than a group at once, and exchange the surplus via shared memory.
    return tl.max_contiguous(ptr + offsets, [1, offsets.shape[1], 1][: len(offsets.shape)])


@triton.jit
def like_offsets(tile, offsets, TILE: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr):
    if PARTS > 1:
        WIDTH: tl.constexpr = offsets.shape[1]
        tile = tl.reshape(tile, [TILE // (8 * PARTS * GROUP), PARTS, 8, tile.numel * GROUP // TILE // WIDTH, WIDTH])
        tile = tl.permute(tile, [3, 1, 0, 2, 4])
    return tl.reshape(tile, offsets.shape)


@triton.jit
def in_groups(tile, TILE: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr):
    """Return a tile that was read at offsets as above in order: [groups, elements a group, 1]."""
    # The last axis is for the codes of a word: broadcasting copies a word to each of its codes.
    SIZE: tl.constexpr = tile.numel * GROUP // TILE
    if PARTS > 1:
        WIDTH: tl.constexpr = tile.shape[1]
        tile = tl.reshape(tile, [SIZE // WIDTH, PARTS, TILE // (8 * PARTS * GROUP), 8, WIDTH])
        tile = tl.permute(tile, [2, 1, 3, 0, 4])
    return tl.reshape(tile, [TILE // GROUP, SIZE, 1])


@triton.jit
def int3_offsets(BIT: tl.constexpr, TILE: tl.constexpr):
    """Return the offsets of a tile's words of int3 codes from bit ``BIT`` on, 0 or 2: [TILE // 32, words, 1]."""
    return tl.arange(0, TILE // 32)[:, None, None] * 3 + BIT + tl.arange(0, 2 - BIT // 2)[None, :, None]


# ---- encoding
#
# This part of the Triton kernels quantizes one tile and stores it in a payload.


_MIN_SCALE = tl.constexpr(MIN_SCALE)
_MAX_SCALE = tl.constexpr(MAX_SCALE)
_SCALE_RAISE = tl.constexpr(SCALE_RAISE)
_SCALE_MASK = tl.constexpr(SCALE_MASK)
_RMS_SCALE_2 = tl.constexpr(RMS_SCALES[2])
_RMS_SCALE_3 = tl.constexpr(RMS_SCALES[3])
_SQUARED_STEPS = tl.constexpr(SQUARED_STEPS)
_ABS_MASK = tl.constexpr(0x7FFFFFFF)
_INF_BITS = tl.constexpr(0x7F800000)
_ONE_BITS = tl.constexpr(0x3F800000)
# 1.5 * 2**23. Adding it to |x| < 2**22 rounds x half to even and leaves the integer in the float's low bits. The
# factor 1.5 keeps sums with a negative x at the same exponent, where neighbouring floats differ by 1.
_ROUNDER = tl.constexpr(12582912.0)
_ROUNDER_BITS = tl.constexpr(0x4B400000)


@triton.jit
def _larger(a, b):
    # By default the maximum of a number and a NaN is the number, which would make the block look finite.
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _magnitude(values, BLOCK: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Return the bits of each block's largest magnitude, int32 [TILE // BLOCK]; NaN counts as the largest, then Inf."""
    # Each thread first reduces its own values as floats, at one instruction per value. The results of a warp's threads
    # are reduced as integers, at one instruction per warp. Floats and integers sort magnitudes alike, NaN above Inf.
    values = tl.reshape(tl.abs(values), [TILE // BLOCK, BLOCK // GROUP, GROUP])
    # The mask clears the sign of a negative NaN, which would otherwise be a negative integer.
    return tl.max(tl.reduce(values, 2, _larger).to(tl.int32, bitcast=True) & _ABS_MASK, axis=1)


@triton.jit
def _rms_scales(
    values,
    absmax,
    numel,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return the scales of [Note: Levels without a zero] in reference.py, not yet truncated: fp32 [TILE // BLOCK]."""
    unit = tl.maximum(absmax * (1 / _SQUARED_STEPS), _MIN_SCALE)
    inverse = tl.math.div_rn(tl.full([TILE // BLOCK], 1.0, tl.float32), unit)
    steps = tl.fma(tl.abs(values), tl.broadcast_to(inverse[:, None], values.shape), _ROUNDER)
    steps = tl.reshape(steps.to(tl.int32, bitcast=True), [TILE // BLOCK, BLOCK // GROUP, GROUP])
    # The bits of the rounder, a multiple of 2 ** 22, may stay: they only change bits 23 and up of a square.
    squares = tl.sum(tl.sum(steps * steps, axis=2) & 0x7FFFFF, axis=1).to(tl.float32)
    if MASKED:
        starts = tile_index() * TILE + tl.arange(0, TILE // BLOCK) * BLOCK
        counts = tl.maximum(tl.minimum(numel - starts, BLOCK), 1).to(tl.float32)
        squares = tl.math.div_rn(squares, counts)
    else:
        squares = squares * (1 / BLOCK)
    FACTOR: tl.constexpr = _RMS_SCALE_2 if BITS == 2 else _RMS_SCALE_3
    return tl.minimum(tl.math.sqrt_rn(squares) * unit * FACTOR, _MAX_SCALE)


@triton.jit
def encode(
    values,
    words_ptr,
    numel,
    row_units,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
    PARTS: tl.constexpr = 1,
):
    """Quantize this program's tile, fp32 [TILE // BLOCK, BLOCK], into the payload, padding included.

    Values past the end of the chunk must be 0: their codes are the padding.

    Returns:
        The rounding errors (values minus decoded codes), fp32 [TILE // BLOCK, BLOCK], and whether each block is finite,
        [TILE // BLOCK, 1]. Errors of a block that is not finite are meaningless.
    """
    magnitude = _magnitude(values, BLOCK, TILE, GROUP)
    live = (magnitude > 0) & (magnitude < _INF_BITS)
    # Zero blocks and blocks that are not finite compute with an absmax of 1, so that the inverse of their scale is
    # finite; their scales and codes are replaced below.
    absmax = tl.where(live, magnitude, _ONE_BITS).to(tl.float32, bitcast=True)
    CLIPS: tl.constexpr = BITS < 4
    if CLIPS:
        scales = _rms_scales(values, absmax, numel, BITS, BLOCK, TILE, GROUP, MASKED)
    else:
        RECIPROCAL: tl.constexpr = (1 + _SCALE_RAISE) / ((1 << (BITS - 1)) - 1)
        scales = absmax * RECIPROCAL
    scales = (tl.maximum(scales, _MIN_SCALE).to(tl.int32, bitcast=True) & _SCALE_MASK).to(tl.float32, bitcast=True)
    # Triton's `/` is approximate on GPUs; the reference's is rounded correctly.
    inverse = tl.math.div_rn(tl.full([TILE // BLOCK], 0.5 if CLIPS else 1.0, tl.float32), scales)
    scales = tl.where(live, scales, tl.where(magnitude == 0, 0.0, float("nan" if CLIPS else "inf")))

    # One division per block and one product per value: a division per value would cost many instructions.
    steps = values * inverse[:, None]
    if CLIPS:
        HIGHEST: tl.constexpr = (1 << (BITS - 1)) - 1
        steps = tl.minimum(tl.maximum(steps - 0.5, -1.0 - HIGHEST), 1.0 * HIGHEST)
    rounder = _rounders(BITS, BLOCK)
    rounded = steps + rounder
    # Fp32 additions are not reassociated, so adding and subtracting the rounder leaves the rounded code. The product of
    # code and scale is exact ([Note: Exact products] in reference.py), so an fma gives the bits of a separate
    # product and difference. The scale is negated, not the code: with code 0, a value of -0 then stays -0, as in the
    # reference. An all-zero block has scale 0: * -1.0 makes it -0, but Triton's -x is 0 - x and would leave it at 0.
    codes = rounded - rounder
    if CLIPS:
        codes = codes + codes + 1.0  # a level, see [Note: Levels without a zero] in reference.py
    left_out = tl.fma(codes, tl.broadcast_to((scales * -1.0)[:, None], values.shape), values)
    if CLIPS and MASKED:
        offsets = tl.arange(0, TILE // BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        left_out = tl.where(offsets < numel - tile_index() * TILE, left_out, 0.0)

    tile = tile_index()
    words_ptr += target_chunk() * row_words(row_units)
    start = tile * (TILE * BITS // 32)
    words_left = codes_words(numel, BITS) - start
    # Codes of a zero block are 0 already. With a mask, not a condition, the instruction that removes the offsets also
    # clears the codes of a block that is not finite.
    finite = ((magnitude - _INF_BITS) >> 31)[:, None]
    _store_codes(rounded, finite, words_ptr + start, words_left, BITS, BLOCK, TILE, GROUP, MASKED, PARTS)
    scales_ptr = words_ptr.to(tl.pointer_type(tl.float32), bitcast=True) + codes_words(numel, BITS)
    block = tile * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    blocks = (numel + (BLOCK - 1)) // BLOCK
    store_inside(scales_ptr + block, scales, block < blocks, MASKED, "")
    # The program of the chunk's last tile zeroes the scales' padding, since ranks compare payloads byte by byte.
    if (tile + 1) * TILE >= numel:
        pad = blocks + tl.arange(0, 4)
        tl.store(scales_ptr + pad, tl.zeros([4], tl.float32), mask=pad < (blocks + 3) // 4 * 4)
    # If the caller ignores these results, the compiler removes their computation.
    return left_out, magnitude[:, None] < _INF_BITS


@triton.jit
def _store_codes(
    rounded,
    kept,
    words_ptr,
    left,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Pack codes plus ``_rounders``, mask them, and store them where the row has ``left`` words for codes."""
    if BITS == 3:
        for BIT in tl.static_range(0, 4, 2):
            words = _pack_int3(rounded, BIT, BLOCK, TILE) & kept
            offsets = int3_offsets(BIT, TILE)
            store_inside(words_ptr + offsets, tl.reshape(words, offsets.shape), offsets < left, MASKED, "")
    else:
        words = _pack(rounded, BITS, BLOCK, TILE) & kept
        offsets = word_offsets(BITS, TILE, GROUP, PARTS)
        words = like_offsets(words, offsets, TILE, GROUP, PARTS)
        store_inside(group_ptrs(words_ptr, offsets), words, offsets < left, MASKED, "")


@triton.jit
def _pack_int3(rounded, BIT: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Pack the lower two bits of int3 codes, or their sign if ``BIT`` is 2; arguments and result as of ``_pack``."""
    WIDTH: tl.constexpr = 2 - BIT // 2
    codes = tl.reshape(rounded.to(tl.int32, bitcast=True), [TILE // BLOCK, BLOCK * WIDTH // 32, 32 // WIDTH])
    place = (tl.arange(0, 32 // WIDTH) * WIDTH)[None, None, :]
    # The offset 4 leaves the lower bits as they are and flips the sign bit.
    return tl.sum(((codes >> BIT) & ((1 << WIDTH) - 1)) << place, axis=2) ^ (BIT // -2)


@triton.jit
def _rounders(BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the summands that round a block's codes, fp32 [1, BLOCK]."""
    # An offset keeps each code positive, so that none borrows from its neighbour when ``_pack`` adds up a word. The sum
    # also has the bits of all rounders, ``EXCESS``. It is a multiple of 2 ** 22, so the code at bit 16 can make up for
    # it, which saves a mask per code. All summands are even, so ties still round to the even code. Int3 has masks.
    EACH: tl.constexpr = 0xFFFFFFFF // ((1 << BITS) - 1)  # the lowest bit of each code: 0x11111111 in int4
    EXCESS: tl.constexpr = 0 if BITS == 3 else _ROUNDER_BITS * EACH % 0x100000000
    OFFSET: tl.constexpr = _ROUNDER + (1 << (BITS - 1))
    at = tl.arange(0, BLOCK) * BITS % 32
    return tl.where(at == 16, OFFSET - EXCESS // 0x10000, OFFSET)[None, :]


@triton.jit
def _pack(rounded, BITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Pack codes plus ``_rounders``, fp32 [TILE // BLOCK, BLOCK]: int32 [TILE // BLOCK, words]."""
    # The codes of a word are shifted to their places and added up, and flipping their sign bits removes the offsets.
    PER_WORD: tl.constexpr = 32 // BITS
    OFFSETS: tl.constexpr = (0xFFFFFFFF // ((1 << BITS) - 1) << (BITS - 1)) - 0x100000000  # as an int32
    codes = tl.reshape(rounded.to(tl.int32, bitcast=True), [TILE // BLOCK, BLOCK // PER_WORD, PER_WORD])
    place = (tl.arange(0, PER_WORD) * BITS)[None, None, :]
    return tl.sum(codes << place, axis=2) ^ OFFSETS


# ---- decoding
#
# These parts of the Triton kernels decode one tile of a payload, and sum it over peers.


@triton.jit
def load_words(
    words_ptr,
    scales_ptr,
    left,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
    PARTS: tl.constexpr = 1,
):
    """Load the tile whose first word and scale are at the pointers; the chunk has ``left`` values from there on.

    Returns:
        The words, int32 [TILE // GROUP, words a group, 1], and the scale of each group, fp32 [TILE // GROUP, 1, 1].
    """
    offsets = word_offsets(BITS, TILE, GROUP, PARTS)
    # Masking whole groups suffices: a group that starts inside the chunk ends inside its padded codes.
    words = load_inside(group_ptrs(words_ptr, offsets), offsets // (GROUP * BITS // 32) * GROUP < left, MASKED)
    return in_groups(words, TILE, GROUP, PARTS), _load_scales(scales_ptr, left, BLOCK, TILE, GROUP, MASKED)


@triton.jit
def _load_scales(scales_ptr, left, BLOCK: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr):
    # One pointer per block saves instructions: the scales of a thread's groups are then a constant distance apart.
    block = tl.arange(0, TILE // BLOCK)[:, None]
    scales = load_inside(scales_ptr + block, block * BLOCK < left, MASKED)
    return tl.reshape(tl.broadcast_to(scales, [TILE // BLOCK, BLOCK // GROUP]), [TILE // GROUP, 1, 1])


@triton.jit
def _load_int3(words_ptr, left, TILE: tl.constexpr, MASKED: tl.constexpr):
    inside = tl.arange(0, TILE // 32)[:, None, None] * 32 < left
    low = load_inside(words_ptr + int3_offsets(0, TILE), inside, MASKED)
    signs = load_inside(words_ptr + int3_offsets(2, TILE), inside, MASKED)
    word, code = tl.arange(0, 2)[None, :, None], tl.arange(0, 16)[None, None, :]
    # Bits of the float 2**23 + 2 * (code + 4), as in ``_load_codes``: ``low`` is lifted by a bit in halves of a word.
    upper = code // 8
    lifted = ((low << (1 - upper)) >> (upper * 15)) >> (code % 8 * 2)
    biased = ((lifted & 6) | (((signs >> (word * 16 + code)) & 1) << 3)) ^ 0x4B000008
    levels = biased.to(tl.float32, bitcast=True) - 8388615.0  # 2**23 + 7
    if MASKED:
        offsets = (tl.arange(0, TILE // 32)[:, None, None] * 2 + word) * 16 + code
        levels = tl.where(offsets < left, levels, 0.0)
    return levels


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
    PARTS: tl.constexpr = 1,
):
    """Load a tile as ``load_words`` does; return its codes, fp32 [TILE // GROUP, words, codes a word], and scales.

    Int3 codes come in groups of 32, whatever ``GROUP`` is, as fp32 [TILE // 32, 2, 16].
    """
    if BITS == 3:
        return _load_int3(words_ptr, left, TILE, MASKED), _load_scales(scales_ptr, left, BLOCK, TILE, 32, MASKED)
    else:
        # Half the codes of a word become floats in place, the other half after one shift of the word. A code is masked
        # into the mantissa of a float whose exponent gives the code's lowest bit the weight 1. Flipping the code's sign
        # bit replaces two's complement by an offset: code 0 becomes the float ``zeros``, and subtracting ``zeros``
        # leaves the code. This takes fewer instructions than extracting each code and converting it from int.
        words, scales = load_words(words_ptr, scales_ptr, left, BITS, BLOCK, TILE, GROUP, MASKED, PARTS)
        HALF: tl.constexpr = 16 // BITS
        OFFSET: tl.constexpr = 1 << (BITS - 1)
        # The upper half of a word is shifted right by 16 - LIFT bits, so its codes start at bit LIFT. With codes at bit
        # 0, ptxas would turn the shift by 16 into two instructions. A mantissa has 23 bits: room for 16 above the lift.
        LIFT: tl.constexpr = 4 if BITS == 4 else 1
        code = tl.arange(0, 2 * HALF)[None, None, :]
        upper = code // HALF
        # In int2, the lowest bit of a code weighs 2 and the bit below it 1, so codes of the lower half are lifted, too.
        LOWER: tl.constexpr = 1 if BITS == 2 else 0
        position = code % HALF * BITS + LOWER + upper * (LIFT - LOWER)
        # This moves the offset in ``zero`` up by ``position`` bits and lowers the exponent to match, so its weight
        # stays.
        zeros = zero + ((OFFSET << position) - OFFSET - ((position - LOWER) << 23))
        # The words are signed, so the shift fills in copies of the sign bit, which the mask drops.
        mask = ((1 << BITS) - 1) << position
        biased = (((words << (LOWER * (1 - upper))) >> (upper * (16 - LIFT))) & mask) ^ zeros
        if BITS == 2:
            zeros -= 1 << (position - 1)  # less 1, so that the difference is 2 * code + 1
        codes = biased.to(tl.float32, bitcast=True) - zeros.to(tl.float32, bitcast=True)
        if BITS == 2 and MASKED:
            # No int2 code decodes to the 0 that ``encode`` needs past the end of the chunk.
            word = tl.reshape(tl.arange(0, TILE // 16), [TILE // GROUP, GROUP // 16, 1])
            codes = tl.where(word * 16 + code < left, codes, 0.0)
        return codes, scales


@triton.jit
def tile_ptrs(row_ptr, numel, BITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
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
    PARTS: tl.constexpr = 1,
):
    """Load this program's tile of the payload row at ``row_ptr``; ``zero`` and the results as in ``_load_codes``."""
    words_ptr, scales_ptr = tile_ptrs(row_ptr, numel, BITS, BLOCK, TILE)
    left = numel - tile_index() * TILE
    return _load_codes(words_ptr, scales_ptr, left, zero, BITS, BLOCK, TILE, GROUP, MASKED, PARTS)


@triton.jit
def in_register(zero, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Return ``zero`` for each group, [TILE // GROUP, 1, 1], which has the same effect in ``_load_codes``."""
    # ptxas copies what all threads share to a register for each use, but keeps there what may differ between threads.
    # The sum is positive, so nothing is added, but no compiler knows that. Sums over peers have no registers to spare.
    lane = tl.broadcast_to(tl.arange(0, 8)[None, :], [TILE // GROUP // 8, 8])
    return tl.reshape(zero + ((zero + lane) >> 31), [TILE // GROUP, 1, 1])


@triton.jit
def add_row(
    values,
    row_ptr,
    numel,
    zero,
    sign,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Return ``values``, a tile in any shape, plus ``sign`` (1 or -1) times the row, in the shape of ``decode_sum``."""
    codes, scales = load_row(row_ptr, numel, zero, BITS, BLOCK, TILE, GROUP, MASKED, PARTS)
    # The product of code and scale is exact with either sign, so one fma serves, as in ``decode_sum``.
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
    """Decode this program's tile of row ``row`` of all peers' payloads; return ``scale`` times the sum, in peer order.

    Returns:
        fp32 [TILE // GROUP, words a group, codes a word].
    """
    # ``zero`` has the bits of 2**23 plus the code's offset: code 0 in the lowest bits of a word becomes this float.
    # It is a kernel argument because with a constant, ptxas takes two instructions, not one, to mask a code and insert
    # it, and int4 sums over 8 peers are close to the limit of the instruction rate already.
    stride = row_words(row_units)
    # A peer's payload has as many rows as the grid has chunks; the peers follow one another.
    peer_words = tl.num_programs(1) * tl.num_programs(2) * stride
    words_ptr, scales_ptr = tile_ptrs(words_ptr + row * stride, numel, BITS, BLOCK, TILE)
    left = numel - tile_index() * TILE
    codes, scales = _load_codes(words_ptr, scales_ptr, left, zero, BITS, BLOCK, TILE, GROUP, MASKED)
    total = codes * scales
    if PEERS <= 8:
        # Unrolled, so that loads from all peers are in flight at once.
        for _ in tl.static_range(1, PEERS):
            words_ptr += peer_words
            scales_ptr += peer_words
            codes, scales = _load_codes(words_ptr, scales_ptr, left, zero, BITS, BLOCK, TILE, GROUP, MASKED)
            # The product is exact ([Note: Exact products] in reference.py), so an fma has the bits of product and sum.
            total = tl.fma(codes, scales, total)
    else:
        for _ in range(1, PEERS):
            words_ptr += peer_words
            scales_ptr += peer_words
            codes, scales = _load_codes(words_ptr, scales_ptr, left, zero, BITS, BLOCK, TILE, GROUP, MASKED)
            total = tl.fma(codes, scales, total)
    return total * scale


# ---- error tiles
#
# This part of the Triton kernels quantizes one tile with error feedback, and updates the tile's errors.
#
# Errors can be updated in place: a written value depends, through the block's maximum, on all values of the block, so
# all threads read their parts of a block before any thread writes to it.


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
        return load_blocks(errors_ptr, target_chunk(), numel, BLOCK, TILE, MASKED)
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
        store_groups(errors, errors_ptr, numel, TILE, BLOCK, MASKED, "")
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
    """Quantize values plus errors into the payload, and update the errors. ``rest`` is 1 - ``beta``."""
    # Errors are read and written in the groups of the values: other groups would go through shared memory twice.
    errors = _load_errors(errors_ptr, numel, error_row_units, zero, BLOCK, ERROR_BLOCK, TILE, GROUP, MASKED)
    left_out, finite = encode(values + errors, words_ptr, numel, row_units, BITS, BLOCK, TILE, GROUP, MASKED)
    # A block that is not finite keeps its errors: NaN in them would never leave again.
    errors = tl.where(finite, beta * errors + rest * left_out, errors)
    _store_errors(errors, errors_ptr, numel, error_row_units, BLOCK, ERROR_BLOCK, TILE, GROUP, MASKED)
