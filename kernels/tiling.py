"""How the work is cut: values of a thread, threads of a program, and what of the sizes kernels are told.

The figures are from measurements on an H200 (``benchmarks/kernels.py``). A program of one warp finds the maximum over a
block without shared memory, and none of its threads waits for those of another; more values a thread spread the cost of
finding the place, and of a block's scale, thin; fewer leave registers for more programs at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .payload import PayloadLayout

WARP = 32
_CACHE_NBYTES = 2**26  # more than the second-level cache of an H200 holds


class Tiling(NamedTuple):
    """What a program works on: values, whole blocks of all layouts at hand, and with how many warps."""

    tile: int
    num_warps: int


def tiling(per_thread: int, threads: int, *layouts: PayloadLayout | None) -> Tiling:
    """Programs of ``threads`` or more, so many that ``per_thread`` values of each make up a block of every layout."""
    tile = max(per_thread * threads, *(layout.block for layout in layouts if layout is not None))
    return Tiling(tile, tile // per_thread // WARP)


def quantize_tiling(layout: PayloadLayout) -> Tiling:
    """For a quantization: a thread has four 16-byte loads of 16-bit values in flight."""
    return tiling(32, 2 * WARP, layout)


def sum_tiling(peers: int, layout: PayloadLayout) -> Tiling:
    """For a sum over peers: all of them are loaded from at once, 64 bytes a thread if they are not many."""
    return tiling(32 if peers * layout.bits <= 16 else 16, WARP, layout)


def sum_quantize_tiling(layout: PayloadLayout, out_layout: PayloadLayout) -> Tiling:
    """For a sum over peers that is quantized again."""
    return tiling(64 if layout.bits == 4 else 16, WARP, layout, out_layout)


def corrected_tiling(*layouts: PayloadLayout | None) -> Tiling:
    """For what feeds errors back: they are loaded besides the values."""
    return tiling(16, 4 * WARP, *layouts)


def difference_tiling(*layouts: PayloadLayout) -> Tiling:
    """For differences and what adds them up."""
    return tiling(32, 4 * WARP, *layouts)


def align(numel: int) -> int:
    """The largest power of two that divides ``numel``, up to the 8 values of a 16-byte access.

    With ``numel`` in units of it, kernels know which accesses are aligned, and are compiled in four variants at most.
    """
    return min(numel & -numel, 8)


def group(dtype: torch.dtype, layout: PayloadLayout) -> int:
    """Neighbouring values of one thread: a 16-byte access, unless threads would share a word of codes."""
    return max(16 // dtype.itemsize, 32 // layout.bits)


def zero(bits: int) -> int:
    """See ``tiles.decode_sum``."""
    return 0x4B000000 + (1 << (bits - 1))


def eviction(nbytes: int) -> str:
    """What the cache is to do with an output: let go first of one that it can't hold until somebody reads it."""
    return "evict_first" if nbytes > _CACHE_NBYTES else ""
