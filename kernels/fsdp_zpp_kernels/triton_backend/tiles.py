# mypy: disable-error-code="no-untyped-def"
"""Tiles of Triton kernels: which chunk a program reads and writes, and where its codes lie.

The grid is (tiles of a chunk, cols, rows), so that no program divides to find its place. A program reads chunk (r, c)
in row-major order and writes to its place in the transposed grid. Offsets are 64-bit up to the tile, since a tensor may
have more than 2**31 elements, and 32-bit inside the tile.

The kernels are bound by memory only as long as they spend few instructions on a value, which explains the form of the
rest. A thread holds groups of ``GROUP`` neighbouring values, one 16-byte access wide, and reads their codes and scale
itself; only the maximum over a block crosses threads. Codes are handled as 32-bit words (see ``payload.py``).
``MASKED`` marks the partial tile at the end of a chunk; all other tiles run without masks.

``decoding.py`` decodes a tile, and ``encoding.py`` quantizes and stores it.
"""

import triton
import triton.language as tl


@triton.jit
def source_chunk():
    """Return the index of the chunk or payload row that this program reads."""
    return (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)


@triton.jit
def target_chunk():
    """Return the index of the chunk or payload row that this program writes."""
    return (tl.program_id(1) * tl.num_programs(2) + tl.program_id(2)).to(tl.int64)


@triton.jit
def tile_index():
    """Return the index in its chunk of this program's tile."""
    return tl.program_id(0).to(tl.int64)


@triton.jit
def codes_words(numel, BITS: tl.constexpr):
    """Return ``PayloadLayout.scales_offset`` in words. It ends in ``* 4``, which shows Triton the 16-byte alignment."""
    return (numel * BITS + 127) // 128 * 4


@triton.jit
def row_words(row_units):
    """Return the length in words of a payload's row, tail included; ``row_units`` is in 16 bytes."""
    return tl.cast(row_units, tl.int64) * 4  # in this form, Triton sees the alignment


@triton.jit
def word_offsets(BITS: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Return the offsets of a tile's words: [TILE // GROUP, words a group, 1]."""
    # The last axis is for the codes of a word: every code is cut out of its word by broadcasting.
    WORDS: tl.constexpr = GROUP * BITS // 32
    return tl.arange(0, TILE // GROUP)[:, None, None] * WORDS + tl.arange(0, WORDS)[None, :, None]


@triton.jit
def word_ptrs(words_ptr, BITS: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Return pointers to a tile's words.

    Without the hint, Triton would access more than a group at once and exchange the surplus through shared memory.
    """
    return tl.max_contiguous(words_ptr + word_offsets(BITS, TILE, GROUP), [1, GROUP * BITS // 32, 1])
