"""Tilings: values per thread, threads per program, and the facts about sizes that kernels are compiled for.

The figures come from measurements on an H200 (``benchmarks/kernels/run.py``). A program of one warp finds the maximum
over a block without shared memory, and its threads never wait for another warp. More values per thread spread the cost
of computing addresses and of a block's scale over more values; fewer leave registers for more programs at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..payload import PayloadLayout

WARP = 32
_CACHE_NBYTES = 2**26  # more than an H200's second-level cache holds


class Tiling(NamedTuple):
    """Way to cut a kernel's work into programs.

    Attributes:
        tile: The values that one program works on, whole blocks of all its layouts.
        num_warps: Warps of a program.
        max_registers: Registers that a thread may have at most; None leaves it to the compiler.
    """

    tile: int
    num_warps: int
    max_registers: int | None = None


def tiling(per_thread: int, threads: int, *layouts: PayloadLayout | None, max_registers: int | None = None) -> Tiling:
    """Cut into programs of ``threads`` threads, or of more if the largest block takes more at ``per_thread`` values."""
    # All of these are powers of two, so the larger number is a multiple of the smaller: whole blocks, whole warps.
    tile = max(per_thread * threads, *(layout.block for layout in layouts if layout is not None))
    return Tiling(tile, tile // per_thread // WARP, max_registers)


def quantize_tiling(layout: PayloadLayout) -> Tiling:
    """Cut quantization. 32 values are four 16-byte loads of 16-bit values in flight per thread."""
    return tiling(32, 2 * WARP, layout)


def sum_tiling(peers: int, layout: PayloadLayout) -> Tiling:
    """Cut a sum over peers. Loads from all peers are in flight at once, up to 64 bytes per thread for few peers."""
    return tiling(32 if peers * layout.bits <= 16 else 16, WARP, layout)


def sum_quantize_tiling(peers: int, layout: PayloadLayout, out_layout: PayloadLayout) -> Tiling:
    """Cut a sum over peers that is quantized again."""
    if layout.bits == out_layout.bits == 8:
        return tiling(16, WARP, layout, out_layout)  # a 16-byte access
    few, many = (4, 8) if layout.bits == 4 else (0, 4)
    if few < peers <= many:
        # The compiler would start all loads at once, with so many registers that too few programs run beside another.
        return tiling(32, WARP, layout, out_layout, max_registers=64)
    # 64 int4 codes are two 16-byte accesses and 16 int8 codes are one; see GROUP in ``dequantize_sum_quantize``.
    return tiling(64 if layout.bits == 4 else 16, WARP, layout, out_layout)


def feedback_tiling(layout: PayloadLayout, error_layout: PayloadLayout | None) -> Tiling:
    """Cut quantization with error feedback."""
    # Left to itself, the compiler takes so many registers for int4 and coded errors that too few programs run at once.
    max_registers = 96 if layout.bits == 4 and error_layout is not None else None
    return tiling(32, WARP, layout, error_layout, max_registers=max_registers)


def sum_feedback_tiling(layout: PayloadLayout, out_layout: PayloadLayout, error_layout: PayloadLayout | None) -> Tiling:
    """Cut a sum over peers that is quantized again, with error feedback."""
    layouts = (layout, out_layout, error_layout)
    if error_layout is None:
        return tiling(16, WARP, *layouts, max_registers=64)
    return tiling(32, 2 * WARP, *layouts, max_registers=80)


def delta_tiling(*layouts: PayloadLayout) -> Tiling:
    """Cut the encoding of a delta, and its addition to the base."""
    return tiling(32, WARP, *layouts)


def align(numel: int) -> int:
    """Return the largest power of two that divides ``numel``, up to the 8 values of a 16-byte access.

    Kernels take ``numel`` in this unit. They then know which accesses are aligned, and are compiled in at most four
    variants, not for each size.
    """
    return min(numel & -numel, 8) or 8  # the lowest bit set; every power divides 0


def group(dtype: torch.dtype, layout: PayloadLayout) -> int:
    """Return how many neighbouring values a thread holds: a 16-byte access, or a word of codes if that is more.

    With fewer, several threads would have to write one word.
    """
    return max(16 // dtype.itemsize, 32 // layout.bits)


def zero(bits: int) -> int:
    """Return the bits of the float that code 0 decodes to, 2**23 plus the code's offset; see ``decode_sum``."""
    return 0x4B000000 + (1 << (bits - 1))


def eviction(nbytes: int) -> str:
    """Return the cache policy for an output of ``nbytes``."""
    # An output that exceeds the cache is gone before anybody reads it, so it must not push out what is still needed.
    return "evict_first" if nbytes > _CACHE_NBYTES else ""
