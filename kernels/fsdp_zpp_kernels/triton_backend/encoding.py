# mypy: disable-error-code="no-untyped-def"
"""Part of the Triton kernels that quantizes one tile and stores it in a payload."""

import triton
import triton.language as tl

from ..payload import MIN_SCALE, SCALE_MASK, SCALE_RAISE
from .tiles import codes_words, row_words, target_chunk, tile_index, word_offsets, word_ptrs

_MIN_SCALE = tl.constexpr(MIN_SCALE)
_SCALE_RAISE = tl.constexpr(SCALE_RAISE)
_SCALE_MASK = tl.constexpr(SCALE_MASK)
_ABS_MASK = tl.constexpr(0x7FFFFFFF)
_INF_BITS = tl.constexpr(0x7F800000)
_ONE_BITS = tl.constexpr(0x3F800000)
# 1.5 * 2**23. Adding it to |x| < 2**22 rounds x half to even and leaves the integer in the float's low bits. With 1.5
# in place of 1, sums with a negative x keep the exponent, in which neighbouring floats differ by 1.
_ROUNDER = tl.constexpr(12582912.0)
_ROUNDER_BITS = tl.constexpr(0x4B400000)


@triton.jit
def _larger(a, b):
    # By default the maximum of a number and a NaN is the number, and the block would pass for finite.
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _magnitude(values, BLOCK: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Return the bits of each block's largest magnitude, int32 [TILE // BLOCK]: of a NaN or an Inf if it holds one.

    A thread compares its own values as floats, at one instruction per value. Threads compare theirs as integers, at one
    instruction per warp. Magnitudes have the same order either way, with NaN above Inf.
    """
    values = tl.reshape(tl.abs(values), [TILE // BLOCK, BLOCK // GROUP, GROUP])
    # The mask clears a sign that a NaN may have, with which it would be the smallest integer.
    return tl.max(tl.reduce(values, 2, _larger).to(tl.int32, bitcast=True) & _ABS_MASK, axis=1)


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
):
    """Quantize this program's tile, fp32 [TILE // BLOCK, BLOCK], into the payload, padding included.

    Values past the end of the chunk must be 0: their codes are the padding of the codes.

    Returns:
        The rounding errors, values less what the payload decodes to, fp32 [TILE // BLOCK, BLOCK], and whether each
        block is finite, [TILE // BLOCK, 1]. Errors of a block that is not finite are meaningless. The compiler removes
        the computation of results that the caller ignores.
    """
    magnitude = _magnitude(values, BLOCK, TILE, GROUP)
    live = (magnitude > 0) & (magnitude < _INF_BITS)
    # All other blocks compute with 1, whose scale has a finite inverse; their scales and codes are replaced below.
    absmax = tl.where(live, magnitude, _ONE_BITS).to(tl.float32, bitcast=True)
    RECIPROCAL: tl.constexpr = (1 + _SCALE_RAISE) / ((1 << (BITS - 1)) - 1)
    scales = tl.maximum(absmax * RECIPROCAL, _MIN_SCALE).to(tl.int32, bitcast=True) & _SCALE_MASK
    scales = scales.to(tl.float32, bitcast=True)
    # Triton's `/` is approximate on GPUs; the reference's is rounded correctly.
    inverse = tl.math.div_rn(tl.full([TILE // BLOCK], 1.0, tl.float32), scales)
    scales = tl.where(live, scales, tl.where(magnitude == 0, 0.0, float("inf")))

    # One division per block and a product per value; a division per value would cost many instructions.
    steps = values * inverse[:, None]
    # Both summands are even, so that half still goes to the even code.
    rounder: tl.constexpr = _ROUNDER + (1 << (BITS - 1))
    rounded = steps + rounder
    # Fp32 additions are not reassociated, so adding and subtracting the rounder leaves the rounded code. Its product
    # with the scale is exact ([Note: Exact products] in payload.py), so one fma rounds as product and difference do.
    # The scale has the minus: with code 0, a value of -0 then stays -0, as in the reference. It is a product, since
    # Triton compiles -x as 0 - x, which is no -0 where the scale of zeros is 0.
    left_out = tl.fma(rounded - rounder, tl.broadcast_to((scales * -1.0)[:, None], values.shape), values)

    words = tl.where(live[:, None], _pack(rounded, BITS, BLOCK, TILE), 0)
    words = tl.reshape(words, [TILE // GROUP, GROUP * BITS // 32, 1])  # the shape of word_ptrs

    tile = tile_index()
    words_ptr += target_chunk() * row_words(row_units)
    words_ptrs = word_ptrs(words_ptr + tile * (TILE * BITS // 32), BITS, TILE, GROUP)
    scales_ptr = words_ptr.to(tl.pointer_type(tl.float32), bitcast=True) + codes_words(numel, BITS)
    block = tile * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    blocks = (numel + (BLOCK - 1)) // BLOCK
    if MASKED:
        words_left = codes_words(numel, BITS) - tile * (TILE * BITS // 32)
        tl.store(words_ptrs, words, mask=word_offsets(BITS, TILE, GROUP) < words_left)
        tl.store(scales_ptr + block, scales, mask=block < blocks)
    else:
        tl.store(words_ptrs, words)
        tl.store(scales_ptr + block, scales)
    # The program of the chunk's last tile zeroes what pads the scales to 16 bytes: ranks compare payloads by bytes.
    if (tile + 1) * TILE >= numel:
        pad = blocks + tl.arange(0, 4)
        tl.store(scales_ptr + pad, tl.zeros([4], tl.float32), mask=pad < (blocks + 3) // 4 * 4)
    return left_out, magnitude[:, None] < _INF_BITS


@triton.jit
def _pack(rounded, BITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Pack codes that were rounded by adding the rounder and an offset: int32 [TILE // BLOCK, words].

    The codes of a word are shifted to their places and added up. The offset keeps each of them positive, so that none
    borrows from its neighbour. The bits of all rounders come off in one subtraction, which saves a mask per code, and
    flipping the sign bits takes the offsets off again.

    Args:
        rounded: The codes plus ``_ROUNDER`` plus half the number of codes, fp32 [TILE // BLOCK, BLOCK].
    """
    PER_WORD: tl.constexpr = 32 // BITS
    OFFSET: tl.constexpr = 1 << (BITS - 1)
    EACH: tl.constexpr = 0xFFFFFFFF // ((1 << BITS) - 1)  # the lowest bit of each code: 0x11111111 or 0x01010101
    # Sums wrap around at 2**32, and so do these constants, written as int32.
    ROUNDERS: tl.constexpr = (_ROUNDER_BITS * EACH + 0x80000000) % 0x100000000 - 0x80000000
    OFFSETS: tl.constexpr = OFFSET * EACH - 0x100000000
    codes = tl.reshape(rounded.to(tl.int32, bitcast=True), [TILE // BLOCK, BLOCK // PER_WORD, PER_WORD])
    place = (tl.arange(0, PER_WORD) * BITS)[None, None, :]
    return (tl.sum(codes << place, axis=2) - ROUNDERS) ^ OFFSETS
