"""The operations in Triton: one launch each, transposition and padding included, no temporaries.

Arguments are taken as checked by ``ops.py``. Each function has a twin of the same signature in ``reference.py``, whose
results it equals bit for bit. For that, kernels are compiled without contracting ``a * b + c``: the product would go
unrounded.
"""

import torch
import triton
from torch import Tensor

from .feedback import quantize_corrected_kernel, sum_quantize_corrected_kernel
from .launch import align, corrected_tiling, eviction, group, quantize_tiling, sum_quantize_tiling, sum_tiling, zero
from .payload import PayloadLayout
from .programs import quantize_kernel, sum_kernel, sum_quantize_kernel


def quantize(values: Tensor, rows: int, cols: int, layout: PayloadLayout) -> Tensor:
    """See ``kernels.quantize``."""
    numel = values.numel() // (rows * cols)
    payload = values.new_empty((rows * cols, layout.nbytes(numel)), dtype=torch.uint8)
    if numel == 0:
        return payload
    tiling = quantize_tiling(layout)
    with torch.cuda.device_of(values):
        quantize_kernel[triton.cdiv(numel, tiling.tile), cols, rows](
            values,
            payload.view(torch.int32),
            numel // align(numel),
            ALIGN=align(numel),
            BITS=layout.bits,
            BLOCK=layout.block,
            TILE=tiling.tile,
            GROUP=group(values, layout),
            num_warps=tiling.num_warps,
            enable_fp_fusion=False,
        )
    return payload


def dequantize_sum(payload: Tensor, out: Tensor, rows: int, cols: int, layout: PayloadLayout, scale: float) -> None:
    """See ``kernels.dequantize_sum``."""
    numel = out.numel() // (rows * cols)
    if numel == 0:
        return
    peers = payload.shape[0]
    tiling = sum_tiling(peers, layout)
    with torch.cuda.device_of(payload):
        sum_kernel[triton.cdiv(numel, tiling.tile), cols, rows](
            payload.view(torch.int32),
            out,
            numel // align(numel),
            scale,
            zero(layout.bits),
            ALIGN=align(numel),
            PEERS=peers,
            BITS=layout.bits,
            BLOCK=layout.block,
            TILE=tiling.tile,
            GROUP=group(out, layout),
            EVICTION=eviction(out),
            num_warps=tiling.num_warps,
            enable_fp_fusion=False,
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
    if numel == 0:
        return out
    tiling = sum_quantize_tiling(layout, out_layout)
    with torch.cuda.device_of(payload):
        sum_quantize_kernel[triton.cdiv(numel, tiling.tile), cols, rows](
            payload.view(torch.int32),
            out.view(torch.int32),
            numel,
            scale,
            zero(layout.bits),
            PEERS=payload.shape[0],
            BITS=layout.bits,
            BLOCK=layout.block,
            OUT_BITS=out_layout.bits,
            OUT_BLOCK=out_layout.block,
            TILE=tiling.tile,
            GROUP=128 // layout.bits,  # codes of a peer in a 16-byte access
            num_warps=tiling.num_warps,
            enable_fp_fusion=False,
        )
    return out


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
    if numel == 0:
        return payload
    tiling = corrected_tiling(layout, error_layout)
    with torch.cuda.device_of(values):
        quantize_corrected_kernel[triton.cdiv(numel, tiling.tile), cols, rows](
            values,
            payload.view(torch.int32),
            errors.view(torch.int32) if error_layout else errors,
            numel // align(numel),
            beta,
            1 - beta,
            zero(8),
            ALIGN=align(numel),
            BITS=layout.bits,
            BLOCK=layout.block,
            ERROR_BLOCK=error_layout.block if error_layout else 0,
            TILE=tiling.tile,
            GROUP=group(values, layout),
            num_warps=tiling.num_warps,
            enable_fp_fusion=False,
        )
    return payload


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
    rows = payload.shape[1]
    out = payload.new_empty((rows, out_layout.nbytes(numel)))
    if numel == 0:
        return out
    tiling = corrected_tiling(layout, out_layout, error_layout)
    with torch.cuda.device_of(payload):
        sum_quantize_corrected_kernel[triton.cdiv(numel, tiling.tile), rows, 1](
            payload.view(torch.int32),
            out.view(torch.int32),
            errors.view(torch.int32) if error_layout else errors,
            numel,
            scale,
            beta,
            1 - beta,
            zero(layout.bits),
            zero(8),
            PEERS=payload.shape[0],
            BITS=layout.bits,
            BLOCK=layout.block,
            OUT_BITS=out_layout.bits,
            OUT_BLOCK=out_layout.block,
            ERROR_BLOCK=error_layout.block if error_layout else 0,
            TILE=tiling.tile,
            num_warps=tiling.num_warps,
            enable_fp_fusion=False,
        )
    return out
