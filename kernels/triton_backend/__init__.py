"""The operations in Triton: one launch each, transposition and padding included, without temporaries.

The functions rely on the checks of ``_ops.py``. Each has a twin of the same name and signature in ``reference.py`` and
equals its results bit for bit.

``quantize_sum.py``, ``feedback.py``, ``delta.py`` and ``rows.py`` hold one family of kernels each, built from the parts
in ``tiles.py``; ``tiling.py`` cuts the work into programs and ``launch.py`` launches them. The builders of launches are
cached because they recur with the same sizes in every step.
"""

import functools

import torch
from torch import Tensor

from ..payload import ALIGNMENT, PayloadLayout
from .delta import add_delta_kernel, quantize_delta_kernel
from .feedback import quantize_with_feedback_kernel, sum_quantize_with_feedback_kernel
from .launch import Launch, launch_tiles
from .quantize_sum import quantize_kernel, sum_kernel, sum_quantize_kernel
from .rows import rows_kernel
from .tiling import (
    align,
    delta_tiling,
    eviction,
    feedback_tiling,
    group,
    quantize_tiling,
    sum_quantize_tiling,
    sum_tiling,
    zero,
)


def quantize(values: Tensor, rows: int, cols: int, layout: PayloadLayout) -> Tensor:
    """See ``kernels.quantize``."""
    numel = values.numel() // (rows * cols)
    payload = values.new_empty((rows * cols, layout.nbytes(numel)), dtype=torch.uint8)
    if numel:  # an empty chunk has no alignment and needs no launch
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
        # No values are read or written here, only codes, so a group is as many codes as a 16-byte access holds.
        GROUP=128 // layout.bits,
    )


def quantize_with_feedback(
    values: Tensor,
    errors: Tensor,
    rows: int,
    cols: int,
    layout: PayloadLayout,
    error_layout: PayloadLayout | None,
    beta: float,
) -> Tensor:
    """See ``kernels.quantize_with_feedback``."""
    numel = values.numel() // (rows * cols)
    payload = values.new_empty((rows * cols, layout.nbytes(numel)), dtype=torch.uint8)
    if numel:
        launch = _quantize_with_feedback(numel, rows, cols, layout, error_layout, values.dtype)
        # 1 - beta in fp64, as in the reference; from an fp32 beta, the kernel's could differ in the last bit.
        launch(values, payload, errors, factors=(beta, 1 - beta))
    return payload


@functools.cache
def _quantize_with_feedback(
    numel: int, rows: int, cols: int, layout: PayloadLayout, error_layout: PayloadLayout | None, dtype: torch.dtype
) -> Launch:
    return launch_tiles(
        quantize_with_feedback_kernel,
        feedback_tiling(layout, error_layout),
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


def dequantize_sum_quantize_with_feedback(
    payload: Tensor,
    errors: Tensor,
    numel: int,
    layout: PayloadLayout,
    out_layout: PayloadLayout,
    scale: float,
    error_layout: PayloadLayout | None,
    beta: float,
) -> Tensor:
    """See ``kernels.dequantize_sum_quantize_with_feedback``."""
    peers, rows = payload.shape[:2]
    out = payload.new_empty((rows, out_layout.nbytes(numel)))
    if numel:
        launch = _sum_quantize_with_feedback(peers, numel, rows, layout, out_layout, error_layout)
        launch(payload, out, errors, factors=(scale, beta, 1 - beta))
    return out


@functools.cache
def _sum_quantize_with_feedback(
    peers: int,
    numel: int,
    rows: int,
    layout: PayloadLayout,
    out_layout: PayloadLayout,
    error_layout: PayloadLayout | None,
) -> Launch:
    return launch_tiles(
        sum_quantize_with_feedback_kernel,
        feedback_tiling(layout, out_layout, error_layout),
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


def quantize_delta(values: Tensor, base: Tensor, base_layout: PayloadLayout, layout: PayloadLayout) -> Tensor:
    """See ``kernels.quantize_delta``."""
    chunks = base.shape[0]
    numel = values.numel() // chunks
    out = base.new_empty((chunks, layout.nbytes(numel)))
    if numel:
        _quantize_delta(chunks, numel, base_layout, layout, values.dtype)(values, base, out)
    return out


@functools.cache
def _quantize_delta(
    chunks: int, numel: int, base_layout: PayloadLayout, layout: PayloadLayout, dtype: torch.dtype
) -> Launch:
    return launch_tiles(
        quantize_delta_kernel,
        delta_tiling(base_layout, layout),
        numel,
        chunks,
        1,
        numel_units=numel // align(numel),
        base_zero=zero(base_layout.bits),
        ALIGN=align(numel),
        BASE_BITS=base_layout.bits,
        BASE_BLOCK=base_layout.block,
        BITS=layout.bits,
        BLOCK=layout.block,
    )


def add_delta(base: Tensor, delta: Tensor, numel: int, base_layout: PayloadLayout, layout: PayloadLayout) -> Tensor:
    """See ``kernels.add_delta``."""
    out = base.new_empty(base.shape)
    if numel:
        _add_delta(base.shape[0], numel, base_layout, layout)(base, delta, out)
    return out


@functools.cache
def _add_delta(chunks: int, numel: int, base_layout: PayloadLayout, layout: PayloadLayout) -> Launch:
    return launch_tiles(
        add_delta_kernel,
        delta_tiling(base_layout, layout),
        numel,
        chunks,
        1,
        numel=numel,
        base_zero=zero(base_layout.bits),
        zero=zero(layout.bits),
        BASE_BITS=base_layout.bits,
        BASE_BLOCK=base_layout.block,
        BITS=layout.bits,
        BLOCK=layout.block,
    )


def dequantize_rows(payload: Tensor, out: Tensor, layout: PayloadLayout) -> None:
    """See ``kernels.dequantize_rows``."""
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
