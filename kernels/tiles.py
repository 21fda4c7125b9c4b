# mypy: disable-error-code="no-untyped-def"
"""What the Triton kernels do with a tile: decode it and sum it over peers, or quantize it and store it.

The grid is (tiles of a chunk, cols, rows), so that no program divides to find its place. A program reads from chunk
(r, c) in row-major order and writes to its place in the transposed grid. Offsets are 64-bit up to the tile.

The kernels are bound by memory only while they spend few instructions on a value, hence the shape of the rest. A thread
holds groups of ``GROUP`` neighbouring values, one 16-byte access wide, and reads their codes and scale itself; only the
maximum over a block crosses threads. Codes are handled as 32-bit words (see ``payload.py``). ``MASKED`` marks the
partial tile at the end of a chunk: all others run without masks.
"""

import triton
import triton.language as tl

from .payload import MIN_SCALE, SCALE_MASK, SCALE_RAISE

_MIN_SCALE = tl.constexpr(MIN_SCALE)
_SCALE_RAISE = tl.constexpr(SCALE_RAISE)
_SCALE_MASK = tl.constexpr(SCALE_MASK)
_ABS_MASK = tl.constexpr(0x7FFFFFFF)
_INF_BITS = tl.constexpr(0x7F800000)
_ONE_BITS = tl.constexpr(0x3F800000)
# 1.5 * 2**23. To add it to |x| < 2**22 rounds x half to even and leaves the integer in the float's low bits.
_ROUNDER = tl.constexpr(12582912.0)
_ROUNDER_BITS = tl.constexpr(0x4B400000)


@triton.jit
def source_chunk():
    """The index of the chunk or payload row that this program reads."""
    return (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)


@triton.jit
def target_chunk():
    """The index of the chunk or payload row that this program writes."""
    return (tl.program_id(1) * tl.num_programs(2) + tl.program_id(2)).to(tl.int64)


@triton.jit
def tile_index():
    """The index in its chunk of this program's tile."""
    return tl.program_id(0).to(tl.int64)


@triton.jit
def _codes_words(numel, BITS: tl.constexpr):
    """``PayloadLayout.scales_offset`` in words, written so as to show alignment."""
    return (numel * BITS + 127) // 128 * 4


@triton.jit
def _row_words(numel, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """``PayloadLayout.nbytes`` in words, likewise."""
    return _codes_words(numel, BITS) + (numel + (4 * BLOCK - 1)) // (4 * BLOCK) * 4


@triton.jit
def _word_offsets(BITS: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr):
    """The offsets of a tile's words: [TILE // GROUP, words a group, 1]."""
    WORDS: tl.constexpr = GROUP * BITS // 32
    return tl.arange(0, TILE // GROUP)[:, None, None] * WORDS + tl.arange(0, WORDS)[None, :, None]


@triton.jit
def _word_ptrs(words_ptr, BITS: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Pointers to a tile's words.

    Without the hint Triton would access more than a group at once, and pay for that with a trip through shared memory.
    """
    return tl.max_contiguous(words_ptr + _word_offsets(BITS, TILE, GROUP), [1, GROUP * BITS // 32, 1])


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
    """The tile whose first word and scale are pointed to: codes, fp32 [TILE // GROUP, words a group, codes a word], and
    what they are to be multiplied with.

    Half the codes of a word are made floats where they stand, the other half after one shift of the word. The exponent
    of ``zeros`` gives their lowest bit the weight 1, and flipping their sign bit turns two's complement into an offset,
    so code 0 makes ``zeros`` itself. The shift is not one by 16 bits because ptxas would replace it by two instructions
    for the codes that come to lie lowest.
    """
    words_ptrs = _word_ptrs(words_ptr, BITS, TILE, GROUP)
    # One pointer a block, so that the scales of a thread's groups are a constant apart.
    block = tl.arange(0, TILE // BLOCK)[:, None]
    if MASKED:
        # A group that starts inside the chunk ends inside its padded codes.
        words = tl.load(words_ptrs, mask=tl.arange(0, TILE // GROUP)[:, None, None] * GROUP < left, other=0)
        scales = tl.load(scales_ptr + block, mask=block * BLOCK < left, other=0.0)
    else:
        words = tl.load(words_ptrs)
        scales = tl.load(scales_ptr + block)
    scales = tl.reshape(tl.broadcast_to(scales, [TILE // BLOCK, BLOCK // GROUP]), [TILE // GROUP, 1, 1])

    HALF: tl.constexpr = 16 // BITS
    OFFSET: tl.constexpr = 1 << (BITS - 1)
    LIFT: tl.constexpr = 4 if BITS == 4 else 1
    code = tl.arange(0, 2 * HALF)[None, None, :]
    position = code % HALF * BITS + code // HALF * LIFT
    zeros = zero + ((OFFSET << position) - OFFSET - (position << 23))
    mask = ((1 << BITS) - 1) << position
    biased = ((words >> (code // HALF * (16 - LIFT))) & mask) ^ zeros
    return biased.to(tl.float32, bitcast=True) - zeros.to(tl.float32, bitcast=True), scales


@triton.jit
def decode_sum(
    words_ptr,
    numel,
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
    """Decode this program's tile of a row of every peer's payload; return ``scale`` times the sum in their order.

    ``zero`` is the float, as int, that a code 0 in a word's lowest bits makes: 2**23 plus the sign bit. It is a kernel
    argument because with a constant ptxas takes two instructions, not one, to mask a code and insert it, and int4 sums
    over 8 peers come close to the instruction rate as it is.
    """
    tile = tile_index()
    row_words = _row_words(numel, BITS, BLOCK)
    peer_words = tl.num_programs(1) * tl.num_programs(2) * row_words
    words_ptr += row * row_words
    scales_ptr = (
        words_ptr.to(tl.pointer_type(tl.float32), bitcast=True) + _codes_words(numel, BITS) + tile * (TILE // BLOCK)
    )
    words_ptr += tile * (TILE * BITS // 32)
    left = numel - tile * TILE
    codes, scales = _load_codes(words_ptr, scales_ptr, left, zero, BITS, BLOCK, TILE, GROUP, MASKED)
    total = codes * scales
    if PEERS <= 8:
        # Unrolled, so that the loads of all peers are in flight at once.
        for _ in tl.static_range(1, PEERS):
            words_ptr += peer_words
            scales_ptr += peer_words
            codes, scales = _load_codes(words_ptr, scales_ptr, left, zero, BITS, BLOCK, TILE, GROUP, MASKED)
            # The product is exact (payload.py), so this rounds as a product and a sum do.
            total = tl.fma(codes, scales, total)
    else:
        for _ in range(1, PEERS):
            words_ptr += peer_words
            scales_ptr += peer_words
            codes, scales = _load_codes(words_ptr, scales_ptr, left, zero, BITS, BLOCK, TILE, GROUP, MASKED)
            total = tl.fma(codes, scales, total)
    return total * scale


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _magnitude(values, BLOCK: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr):
    """The bits of the largest magnitude of each block: of an Inf or a NaN if it holds one.

    As floats among a thread's values, where that takes one instruction a value. As integers between threads, where one
    instruction does it for a warp: magnitudes order alike as either, with NaN above Inf.
    """
    values = tl.reshape(tl.abs(values), [TILE // BLOCK, BLOCK // GROUP, GROUP])
    return tl.max(tl.reduce(values, 2, _larger).to(tl.int32, bitcast=True) & _ABS_MASK, axis=1)


@triton.jit
def encode(
    values,
    words_ptr,
    numel,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Quantize this program's tile, fp32 [TILE // BLOCK, BLOCK], into the payload, padding included.

    Values past the end of the chunk must be 0: their codes are the padding of the codes.

    Returns:
        What the payload leaves out of the values, and whether a value's block is finite; without that there is no
        telling. Who ignores them does not pay for them.
    """
    magnitude = _magnitude(values, BLOCK, TILE, GROUP)
    live = (magnitude > 0) & (magnitude < _INF_BITS)
    absmax = tl.where(live, magnitude, _ONE_BITS).to(tl.float32, bitcast=True)
    RECIPROCAL: tl.constexpr = (1 + _SCALE_RAISE) / ((1 << (BITS - 1)) - 1)
    scales = tl.maximum(absmax * RECIPROCAL, _MIN_SCALE).to(tl.int32, bitcast=True) & _SCALE_MASK
    scales = scales.to(tl.float32, bitcast=True)
    inverse = tl.math.div_rn(tl.full([TILE // BLOCK], 1.0, tl.float32), scales)
    scales = tl.where(live, scales, tl.where(magnitude == 0, 0.0, float("inf")))

    steps = values * inverse[:, None]
    left_out = values - ((steps + _ROUNDER) - _ROUNDER) * scales[:, None]

    words = tl.where(live[:, None], _pack(steps, BITS, BLOCK, TILE), 0)
    words = tl.reshape(words, [TILE // GROUP, GROUP * BITS // 32, 1])

    tile = tile_index()
    words_ptr += target_chunk() * _row_words(numel, BITS, BLOCK)
    words_ptrs = _word_ptrs(words_ptr + tile * (TILE * BITS // 32), BITS, TILE, GROUP)
    scales_ptr = words_ptr.to(tl.pointer_type(tl.float32), bitcast=True) + _codes_words(numel, BITS)
    block = tile * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    blocks = (numel + (BLOCK - 1)) // BLOCK
    if MASKED:
        words_left = _codes_words(numel, BITS) - tile * (TILE * BITS // 32)
        tl.store(words_ptrs, words, mask=_word_offsets(BITS, TILE, GROUP) < words_left)
        tl.store(scales_ptr + block, scales, mask=block < blocks)
    else:
        tl.store(words_ptrs, words)
        tl.store(scales_ptr + block, scales)
    if (tile + 1) * TILE >= numel:
        pad = blocks + tl.arange(0, 4)
        tl.store(scales_ptr + pad, tl.zeros([4], tl.float32), mask=pad < (blocks + 3) // 4 * 4)
    return left_out, magnitude[:, None] < _INF_BITS


@triton.jit
def _pack(steps, BITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Round fp32 [TILE // BLOCK, BLOCK], all within a code's range, and pack it: int32 [TILE // BLOCK, words].

    Codes are added up, each shifted to its place, with an offset that keeps them positive, so that none borrows from
    its neighbour. What the rounder's own bits added is taken off, and the offset's bits are flipped back.
    """
    PER_WORD: tl.constexpr = 32 // BITS
    OFFSET: tl.constexpr = 1 << (BITS - 1)
    EACH: tl.constexpr = 0xFFFFFFFF // ((1 << BITS) - 1)
    ROUNDERS: tl.constexpr = (_ROUNDER_BITS * EACH + 0x80000000) % 0x100000000 - 0x80000000
    OFFSETS: tl.constexpr = OFFSET * EACH - 0x100000000
    codes = (steps + (_ROUNDER + OFFSET)).to(tl.int32, bitcast=True)
    codes = tl.reshape(codes, [TILE // BLOCK, BLOCK // PER_WORD, PER_WORD])
    place = (tl.arange(0, PER_WORD) * BITS)[None, None, :]
    return (tl.sum(codes << place, axis=2) - ROUNDERS) ^ OFFSETS
