"""Operations in Triton: one launch each, transposition and padding included, without temporaries.

The functions rely on the checks of ``_ops.py`` and prepare a call. Each has a twin of the same name and signature in
``reference.py`` and equals its results bit for bit.

``quantize_sum.py``, ``feedback.py``, ``delta.py``, ``rows.py`` and ``nf4.py`` hold one family of kernels each, built
from the parts in ``tiles.py``, ``decoding.py``, ``encoding.py`` and ``error_tiles.py``; ``tiling.py`` cuts the work
into programs and ``launch.py`` launches them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..nf4 import levels_on
from ..payload import ALIGNMENT, PayloadLayout
from .delta import add_delta_kernel, quantize_delta_kernel
from .feedback import quantize_with_feedback_kernel, sum_quantize_with_feedback_kernel
from .launch import launch_tiles
from .nf4 import nf4_rows_kernel
from .quantize_sum import quantize_kernel, sum_kernel, sum_quantize_kernel
from .rows import rows_kernel
from .tiling import (
    align,
    delta_tiling,
    eviction,
    feedback_tiling,
    group,
    quantize_tiling,
    sum_feedback_tiling,
    sum_quantize_tiling,
    sum_tiling,
    zero,
)


def quantize(numel: int, rows: int, cols: int, layout: PayloadLayout, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """See ``fsdp_zpp_kernels.quantize``."""
    return launch_tiles(
        quantize_kernel,
        quantize_tiling(layout),
        numel,
        cols,
        rows,
        payload=layout,
        numel_units=numel // align(numel),
        row_units=layout.nbytes(numel) // ALIGNMENT,
        ALIGN=align(numel),
        BITS=layout.bits,
        BLOCK=layout.block,
        GROUP=group(dtype, layout),
    )


def dequantize_sum(
    peers: int, numel: int, rows: int, cols: int, layout: PayloadLayout, dtype: torch.dtype
) -> Callable[[Tensor, Tensor, float], None]:
    """See ``fsdp_zpp_kernels.dequantize_sum``."""
    return launch_tiles(
        sum_kernel,
        sum_tiling(peers, layout),
        numel,
        cols,
        rows,
        numel_units=numel // align(numel),
        row_units=layout.nbytes(numel) // ALIGNMENT,
        zero=zero(layout.bits),
        ALIGN=align(numel),
        PEERS=peers,
        BITS=layout.bits,
        BLOCK=layout.block,
        GROUP=group(dtype, layout),
        EVICTION=eviction(rows * cols * numel * dtype.itemsize),
    )


def dequantize_sum_quantize(
    peers: int, numel: int, rows: int, cols: int, layout: PayloadLayout, out_layout: PayloadLayout
) -> Callable[[Tensor, float], Tensor]:
    """See ``fsdp_zpp_kernels.dequantize_sum_quantize``."""
    return launch_tiles(
        sum_quantize_kernel,
        sum_quantize_tiling(peers, layout, out_layout),
        numel,
        cols,
        rows,
        payload=out_layout,
        numel=numel,
        row_units=layout.nbytes(numel) // ALIGNMENT,
        out_row_units=out_layout.nbytes(numel) // ALIGNMENT,
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
    numel: int, rows: int, cols: int, layout: PayloadLayout, error_layout: PayloadLayout | None, dtype: torch.dtype
) -> Callable[[Tensor, Tensor, float], Tensor]:
    """See ``fsdp_zpp_kernels.quantize_with_feedback``."""
    launch = launch_tiles(
        quantize_with_feedback_kernel,
        feedback_tiling(layout, error_layout),
        numel,
        cols,
        rows,
        payload=layout,
        numel_units=numel // align(numel),
        row_units=layout.nbytes(numel) // ALIGNMENT,
        error_row_units=error_layout.nbytes(numel) // ALIGNMENT if error_layout else 0,
        zero=zero(8),
        ALIGN=align(numel),
        BITS=layout.bits,
        BLOCK=layout.block,
        ERROR_BLOCK=error_layout.block if error_layout else 0,
        GROUP=group(dtype, layout),
    )
    # 1 - beta in fp64, as in the reference; from an fp32 beta, the kernel's could differ in the last bit.
    return lambda values, errors, beta: launch(values, errors, beta, 1 - beta)


def dequantize_sum_quantize_with_feedback(
    peers: int,
    numel: int,
    chunks: int,
    layout: PayloadLayout,
    out_layout: PayloadLayout,
    error_layout: PayloadLayout | None,
) -> Callable[[Tensor, Tensor, float, float], Tensor]:
    """See ``fsdp_zpp_kernels.dequantize_sum_quantize_with_feedback``."""
    launch = launch_tiles(
        sum_quantize_with_feedback_kernel,
        sum_feedback_tiling(layout, out_layout, error_layout),
        numel,
        chunks,
        1,
        payload=out_layout,
        numel=numel,
        row_units=layout.nbytes(numel) // ALIGNMENT,
        out_row_units=out_layout.nbytes(numel) // ALIGNMENT,
        error_row_units=error_layout.nbytes(numel) // ALIGNMENT if error_layout else 0,
        zero=zero(layout.bits),
        error_zero=zero(8),
        PEERS=peers,
        BITS=layout.bits,
        BLOCK=layout.block,
        OUT_BITS=out_layout.bits,
        OUT_BLOCK=out_layout.block,
        ERROR_BLOCK=error_layout.block if error_layout else 0,
    )
    return lambda payload, errors, scale, beta: launch(payload, errors, scale, beta, 1 - beta)


def quantize_delta(
    chunks: int, numel: int, base_layout: PayloadLayout, layout: PayloadLayout, dtype: torch.dtype
) -> Callable[[Tensor, Tensor], Tensor]:
    """See ``fsdp_zpp_kernels.quantize_delta``."""
    return launch_tiles(
        quantize_delta_kernel,
        delta_tiling(base_layout, layout),
        numel,
        chunks,
        1,
        payload=layout,
        numel_units=numel // align(numel),
        base_row_units=base_layout.nbytes(numel) // ALIGNMENT,
        row_units=layout.nbytes(numel) // ALIGNMENT,
        base_zero=zero(base_layout.bits),
        ALIGN=align(numel),
        BASE_BITS=base_layout.bits,
        BASE_BLOCK=base_layout.block,
        BITS=layout.bits,
        BLOCK=layout.block,
    )


def add_delta(
    chunks: int, numel: int, base_layout: PayloadLayout, layout: PayloadLayout
) -> Callable[[Tensor, Tensor], Tensor]:
    """See ``fsdp_zpp_kernels.add_delta``."""
    return launch_tiles(
        add_delta_kernel,
        delta_tiling(base_layout, layout),
        numel,
        chunks,
        1,
        payload=base_layout,
        numel=numel,
        base_row_units=base_layout.nbytes(numel) // ALIGNMENT,
        row_units=layout.nbytes(numel) // ALIGNMENT,
        base_zero=zero(base_layout.bits),
        zero=zero(layout.bits),
        BASE_BITS=base_layout.bits,
        BASE_BLOCK=base_layout.block,
        BITS=layout.bits,
        BLOCK=layout.block,
    )


def dequantize_rows(
    chunks: int, numel: int, stride: int, layout: PayloadLayout, dtype: torch.dtype
) -> Callable[[Tensor, Tensor], None]:
    """See ``fsdp_zpp_kernels.dequantize_rows``."""
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


def dequantize_nf4_rows(
    chunks: int, numel: int, stride: int, layout: PayloadLayout, dtype: torch.dtype
) -> Callable[[Tensor, Tensor], None]:
    """See ``fsdp_zpp_kernels.dequantize_nf4_rows``."""
    launch = launch_tiles(
        nf4_rows_kernel,
        sum_tiling(1, layout),
        numel,
        1,
        chunks,
        numel_units=numel // align(numel),
        stride_units=stride // ALIGNMENT,
        ALIGN=align(numel),
        BLOCK=layout.block,
        GROUP=group(dtype, layout),
    )
    return lambda payload, out: launch(payload, out, levels_on(payload.device))
