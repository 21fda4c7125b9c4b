# mypy: disable-error-code="no-untyped-def"
"""The Triton side of ``strided.py``: one launch, whose results equal the reference's bit for bit."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, launch_tiles
from .payload import ALIGNMENT, PayloadLayout
from .programs import store_groups
from .tiles import _codes_words, _load_codes, source_chunk, tile_index
from .tiling import align, group, sum_tiling, zero


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
    tile = tile_index()
    scales_ptr = words_ptr.to(tl.pointer_type(tl.float32), bitcast=True) + _codes_words(numel, BITS)
    scales_ptr += tile * (TILE // BLOCK)
    words_ptr += tile * (TILE * BITS // 32)
    codes, scales = _load_codes(words_ptr, scales_ptr, numel - tile * TILE, zero, BITS, BLOCK, TILE, GROUP, MASKED)
    values = tl.reshape(codes * scales, [TILE // GROUP, GROUP])
    store_groups(values, out_ptr, numel, TILE, GROUP, MASKED, "")  # who asked for the rows reads them next


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
    """The grid is (tiles of a chunk, 1, chunks); rows start ``stride_units`` times 16 bytes apart."""
    numel = tl.cast(numel_units, tl.int64) * ALIGN
    words_ptr += source_chunk() * (tl.cast(stride_units, tl.int64) * 4)
    if (tile_index() + 1) * TILE <= numel:
        _rows_tile(words_ptr, out_ptr, numel, zero, BITS, BLOCK, TILE, GROUP, False)
    else:
        _rows_tile(words_ptr, out_ptr, numel, zero, BITS, BLOCK, TILE, GROUP, True)


def decode_rows(payload: Tensor, out: Tensor, layout: PayloadLayout) -> None:
    """See ``strided.dequantize_rows``; arguments are taken as checked."""
    chunks = payload.shape[0]
    numel = out.numel() // chunks
    if numel:
        _rows(chunks, numel, payload.stride(0), layout, out.dtype)(payload, out)


@functools.cache
def _rows(chunks: int, numel: int, stride: int, layout: PayloadLayout, dtype: torch.dtype) -> Launch:
    return launch_tiles(
        rows_kernel,
        sum_tiling(1, layout),
        numel,
        1,
        chunks,
        numel_units=numel // align(numel),
        stride_units=stride // ALIGNMENT,
        zero=zero(layout.bits),
        ALIGN=align(numel),
        BITS=layout.bits,
        BLOCK=layout.block,
        GROUP=group(dtype, layout),
    )
