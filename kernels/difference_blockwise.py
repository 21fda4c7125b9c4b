# mypy: disable-error-code="no-untyped-def"
"""The Triton side of ``difference.py``: one launch each, whose results equal the reference's bit for bit."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, launch_tiles
from .payload import PayloadLayout
from .programs import load_blocks
from .tiles import decode_sum, encode, source_chunk, tile_index
from .tiling import align, difference_tiling, zero

_GROUP = tl.constexpr(16)  # int8 codes in a 16-byte access


@triton.jit
def _difference_tile(
    values_ptr,
    held_ptr,
    out_ptr,
    numel,
    held_zero,
    HELD_BITS: tl.constexpr,
    HELD_BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    values = load_blocks(values_ptr, numel, BLOCK, TILE, MASKED)
    held = decode_sum(held_ptr, numel, 1.0, held_zero, source_chunk(), 1, HELD_BITS, HELD_BLOCK, TILE, _GROUP, MASKED)
    encode(values - tl.reshape(held, [TILE // BLOCK, BLOCK]), out_ptr, numel, BITS, BLOCK, TILE, _GROUP, MASKED)


@triton.jit(do_not_specialize=["numel_units", "held_zero"])
def difference_kernel(
    values_ptr,
    held_ptr,
    out_ptr,
    numel_units,
    held_zero,
    ALIGN: tl.constexpr,
    HELD_BITS: tl.constexpr,
    HELD_BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """The grid is (tiles of a chunk, chunks, 1)."""
    numel = tl.cast(numel_units, tl.int64) * ALIGN
    if (tile_index() + 1) * TILE <= numel:
        _difference_tile(
            values_ptr, held_ptr, out_ptr, numel, held_zero, HELD_BITS, HELD_BLOCK, BITS, BLOCK, TILE, False
        )
    else:
        _difference_tile(
            values_ptr, held_ptr, out_ptr, numel, held_zero, HELD_BITS, HELD_BLOCK, BITS, BLOCK, TILE, True
        )


@triton.jit
def _add_tile(
    held_ptr,
    difference_ptr,
    out_ptr,
    numel,
    held_zero,
    zero,
    HELD_BITS: tl.constexpr,
    HELD_BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    row = source_chunk()
    held = decode_sum(held_ptr, numel, 1.0, held_zero, row, 1, HELD_BITS, HELD_BLOCK, TILE, _GROUP, MASKED)
    change = decode_sum(difference_ptr, numel, 1.0, zero, row, 1, BITS, BLOCK, TILE, _GROUP, MASKED)
    # Either is [groups, words, codes of a word], which differ with the bits.
    values = tl.reshape(held, [TILE // HELD_BLOCK, HELD_BLOCK]) + tl.reshape(change, [TILE // HELD_BLOCK, HELD_BLOCK])
    encode(values, out_ptr, numel, HELD_BITS, HELD_BLOCK, TILE, _GROUP, MASKED)


@triton.jit(do_not_specialize=["numel", "held_zero", "zero"])
def add_kernel(
    held_ptr,
    difference_ptr,
    out_ptr,
    numel,
    held_zero,
    zero,
    HELD_BITS: tl.constexpr,
    HELD_BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """The grid is (tiles of a chunk, chunks, 1)."""
    numel = tl.cast(numel, tl.int64)
    if (tile_index() + 1) * TILE <= numel:
        _add_tile(
            held_ptr, difference_ptr, out_ptr, numel, held_zero, zero, HELD_BITS, HELD_BLOCK, BITS, BLOCK, TILE, False
        )
    else:
        _add_tile(
            held_ptr, difference_ptr, out_ptr, numel, held_zero, zero, HELD_BITS, HELD_BLOCK, BITS, BLOCK, TILE, True
        )


def quantize_difference(values: Tensor, held: Tensor, held_layout: PayloadLayout, layout: PayloadLayout) -> Tensor:
    """See ``difference.quantize_difference``."""
    chunks = held.shape[0]
    numel = values.numel() // chunks
    out = held.new_empty((chunks, layout.nbytes(numel)))
    if numel:
        _difference(chunks, numel, held_layout, layout, values.dtype)(values, held, out)
    return out


@functools.cache
def _difference(
    chunks: int, numel: int, held_layout: PayloadLayout, layout: PayloadLayout, dtype: torch.dtype
) -> Launch:
    return launch_tiles(
        difference_kernel,
        difference_tiling(held_layout, layout),
        numel,
        chunks,
        1,
        numel_units=numel // align(numel),
        held_zero=zero(held_layout.bits),
        ALIGN=align(numel),
        HELD_BITS=held_layout.bits,
        HELD_BLOCK=held_layout.block,
        BITS=layout.bits,
        BLOCK=layout.block,
    )


def add_difference(
    held: Tensor, difference: Tensor, numel: int, held_layout: PayloadLayout, layout: PayloadLayout
) -> Tensor:
    """See ``difference.add_difference``."""
    out = held.new_empty(held.shape)
    if numel:
        _add(held.shape[0], numel, held_layout, layout)(held, difference, out)
    return out


@functools.cache
def _add(chunks: int, numel: int, held_layout: PayloadLayout, layout: PayloadLayout) -> Launch:
    return launch_tiles(
        add_kernel,
        difference_tiling(held_layout, layout),
        numel,
        chunks,
        1,
        numel=numel,
        held_zero=zero(held_layout.bits),
        zero=zero(layout.bits),
        HELD_BITS=held_layout.bits,
        HELD_BLOCK=held_layout.block,
        BITS=layout.bits,
        BLOCK=layout.block,
    )
