"""The operations in Triton: one launch each, transposition and padding included, no temporaries.

Arguments are taken as checked by ``ops.py``. Each function has a twin of the same signature in ``reference.py``, whose
results it equals bit for bit. For that, kernels are compiled without contracting ``a * b + c``: the product would go
unrounded.
"""

import functools

import torch
from torch import Tensor

from .feedback import quantize_corrected_kernel, sum_quantize_corrected_kernel
from .launch import Launch, launch_tiles
from .payload import PayloadLayout
from .programs import quantize_kernel, sum_kernel, sum_quantize_kernel
from .tiling import align, corrected_tiling, eviction, group, quantize_tiling, sum_quantize_tiling, sum_tiling, zero


def quantize(values: Tensor, rows: int, cols: int, layout: PayloadLayout) -> Tensor:
    """See ``kernels.quantize``."""
    numel = values.numel() // (rows * cols)
    payload = values.new_empty((rows * cols, layout.nbytes(numel)), dtype=torch.uint8)
    if numel:
        _quantize(numel, rows, cols, layout, values.dtype)(values, payload)
    return payload


@functools.cache
def _quantize(numel: int, rows: int, cols: int, layout: PayloadLayout, dtype: torch.dtype) -> Launch:
    return launch_tiles(
        quantize_kernel,
        quantize_tiling(layout),
        numel,
        cols,
        rows,
        numel_units=numel // align(numel),
        ALIGN=align(numel),
        BITS=layout.bits,
        BLOCK=layout.block,
        GROUP=group(dtype, layout),
    )


def dequantize_sum(payload: Tensor, out: Tensor, rows: int, cols: int, layout: PayloadLayout, scale: float) -> None:
    """See ``kernels.dequantize_sum``."""
    numel = out.numel() // (rows * cols)
    if numel:
        _sum(payload.shape[0], numel, rows, cols, layout, out.dtype)(payload, out, factors=(scale,))


@functools.cache
def _sum(peers: int, numel: int, rows: int, cols: int, layout: PayloadLayout, dtype: torch.dtype) -> Launch:
    return launch_tiles(
        sum_kernel,
        sum_tiling(peers, layout),
        numel,
        cols,
        rows,
        numel_units=numel // align(numel),
        zero=zero(layout.bits),
        ALIGN=align(numel),
        PEERS=peers,
        BITS=layout.bits,
        BLOCK=layout.block,
        GROUP=group(dtype, layout),
        EVICTION=eviction(rows * cols * numel * dtype.itemsize),
    )


def dequantize_sum_quantize(
    payload: Tensor,
    numel: int,
    rows: int,
    cols: int,
    layout: PayloadLayout,
    out_layout: PayloadLayout,
    scale: float,
) -> Tensor:
    """See ``kernels.dequantize_sum_quantize``."""
    out = payload.new_empty((rows * cols, out_layout.nbytes(numel)))
    if numel:
        _sum_quantize(payload.shape[0], numel, rows, cols, layout, out_layout)(payload, out, factors=(scale,))
    return out


@functools.cache
def _sum_quantize(
    peers: int, numel: int, rows: int, cols: int, layout: PayloadLayout, out_layout: PayloadLayout
) -> Launch:
    return launch_tiles(
        sum_quantize_kernel,
        sum_quantize_tiling(layout, out_layout),
        numel,
        cols,
        rows,
        numel=numel,
        zero=zero(layout.bits),
        PEERS=peers,
        BITS=layout.bits,
        BLOCK=layout.block,
        OUT_BITS=out_layout.bits,
        OUT_BLOCK=out_layout.block,
        GROUP=128 // layout.bits,  # codes of a peer in a 16-byte access
    )


def quantize_corrected(
    values: Tensor,
    errors: Tensor,
    rows: int,
    cols: int,
    layout: PayloadLayout,
    error_layout: PayloadLayout | None,
    beta: float,
) -> Tensor:
    """See ``kernels.quantize_corrected``."""
    numel = values.numel() // (rows * cols)
    payload = values.new_empty((rows * cols, layout.nbytes(numel)), dtype=torch.uint8)
    if numel:
        launch = _quantize_corrected(numel, rows, cols, layout, error_layout, values.dtype)
        launch(values, payload, errors, factors=(beta, 1 - beta))
    return payload


@functools.cache
def _quantize_corrected(
    numel: int, rows: int, cols: int, layout: PayloadLayout, error_layout: PayloadLayout | None, dtype: torch.dtype
) -> Launch:
    return launch_tiles(
        quantize_corrected_kernel,
        corrected_tiling(layout, error_layout),
        numel,
        cols,
        rows,
        numel_units=numel // align(numel),
        zero=zero(8),
        ALIGN=align(numel),
        BITS=layout.bits,
        BLOCK=layout.block,
        ERROR_BLOCK=error_layout.block if error_layout else 0,
        GROUP=group(dtype, layout),
    )


def dequantize_sum_quantize_corrected(
    payload: Tensor,
    errors: Tensor,
    numel: int,
    layout: PayloadLayout,
    out_layout: PayloadLayout,
    scale: float,
    error_layout: PayloadLayout | None,
    beta: float,
) -> Tensor:
    """See ``kernels.dequantize_sum_quantize_corrected``."""
    peers, rows = payload.shape[:2]
    out = payload.new_empty((rows, out_layout.nbytes(numel)))
    if numel:
        launch = _sum_quantize_corrected(peers, numel, rows, layout, out_layout, error_layout)
        launch(payload, out, errors, factors=(scale, beta, 1 - beta))
    return out


@functools.cache
def _sum_quantize_corrected(
    peers: int,
    numel: int,
    rows: int,
    layout: PayloadLayout,
    out_layout: PayloadLayout,
    error_layout: PayloadLayout | None,
) -> Launch:
    return launch_tiles(
        sum_quantize_corrected_kernel,
        corrected_tiling(layout, out_layout, error_layout),
        numel,
        rows,
        1,
        numel=numel,
        zero=zero(layout.bits),
        error_zero=zero(8),
        PEERS=peers,
        BITS=layout.bits,
        BLOCK=layout.block,
        OUT_BITS=out_layout.bits,
        OUT_BLOCK=out_layout.block,
        ERROR_BLOCK=error_layout.block if error_layout else 0,
    )
