"""The operations in Triton: one launch each, transposition and padding included, no temporaries.

Arguments are taken as checked by ``ops.py``. Each function has a twin of the same signature in ``reference.py``, whose
results it equals bit for bit. For that, kernels are compiled without contracting ``a * b + c``: the product would go
unrounded.
"""

import torch
import triton
from torch import Tensor

from .feedback import quantize_corrected_kernel, sum_quantize_corrected_kernel
from .payload import PayloadLayout
from .programs import quantize_kernel, sum_kernel, sum_quantize_kernel

# Values a thread takes. 32 spread the cost of finding the place, and of a block's scale, thin and put four 16-byte
# loads of bf16 in flight. A sum has a load in flight for every peer anyhow; with 16 it stays at about 64 registers for
# 8 peers on sm_90.
_PER_THREAD = 32
_PER_THREAD_SUM = 16
_MIN_THREADS = 128


def quantize(values: Tensor, rows: int, cols: int, layout: PayloadLayout) -> Tensor:
    """See ``kernels.quantize``."""
    numel = values.numel() // (rows * cols)
    payload = values.new_empty((rows * cols, layout.nbytes(numel)), dtype=torch.uint8)
    if numel == 0:
        return payload
    tile = max(_PER_THREAD * _MIN_THREADS, layout.block)
    with torch.cuda.device_of(values):
        quantize_kernel[triton.cdiv(numel, tile), cols, rows](
            values,
            payload.view(torch.int32),
            numel // _align(numel),
            ALIGN=_align(numel),
            BITS=layout.bits,
            BLOCK=layout.block,
            TILE=tile,
            GROUP=_group(values, layout),
            num_warps=tile // _PER_THREAD // 32,
            enable_fp_fusion=False,
        )
    return payload


def dequantize_sum(payload: Tensor, out: Tensor, rows: int, cols: int, layout: PayloadLayout, scale: float) -> None:
    """See ``kernels.dequantize_sum``."""
    numel = out.numel() // (rows * cols)
    if numel == 0:
        return
    peers = payload.shape[0]
    per_thread = _PER_THREAD if peers == 1 else _PER_THREAD_SUM
    tile = max(per_thread * _MIN_THREADS, layout.block)
    with torch.cuda.device_of(payload):
        sum_kernel[triton.cdiv(numel, tile), cols, rows](
            payload.view(torch.int32),
            out,
            numel // _align(numel),
            scale,
            _zero(layout.bits),
            ALIGN=_align(numel),
            PEERS=peers,
            BITS=layout.bits,
            BLOCK=layout.block,
            TILE=tile,
            GROUP=_group(out, layout),
            num_warps=tile // per_thread // 32,
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
    tile = max(_PER_THREAD * _MIN_THREADS, layout.block, out_layout.block)
    with torch.cuda.device_of(payload):
        sum_quantize_kernel[triton.cdiv(numel, tile), cols, rows](
            payload.view(torch.int32),
            out.view(torch.int32),
            numel,
            scale,
            _zero(layout.bits),
            PEERS=payload.shape[0],
            BITS=layout.bits,
            BLOCK=layout.block,
            OUT_BITS=out_layout.bits,
            OUT_BLOCK=out_layout.block,
            TILE=tile,
            GROUP=128 // layout.bits,  # codes of a peer in a 16-byte access
            num_warps=tile // _PER_THREAD // 32,
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
    tile = max(_PER_THREAD_SUM * _MIN_THREADS, layout.block, error_layout.block if error_layout else 0)
    with torch.cuda.device_of(values):
        quantize_corrected_kernel[triton.cdiv(numel, tile), cols, rows](
            values,
            payload.view(torch.int32),
            errors.view(torch.int32) if error_layout else errors,
            numel // _align(numel),
            beta,
            1 - beta,
            _zero(8),
            ALIGN=_align(numel),
            BITS=layout.bits,
            BLOCK=layout.block,
            ERROR_BLOCK=error_layout.block if error_layout else 0,
            TILE=tile,
            GROUP=_group(values, layout),
            num_warps=tile // _PER_THREAD_SUM // 32,
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
    error_block = error_layout.block if error_layout else 0
    tile = max(_PER_THREAD_SUM * _MIN_THREADS, layout.block, out_layout.block, error_block)
    with torch.cuda.device_of(payload):
        sum_quantize_corrected_kernel[triton.cdiv(numel, tile), rows, 1](
            payload.view(torch.int32),
            out.view(torch.int32),
            errors.view(torch.int32) if error_layout else errors,
            numel,
            scale,
            beta,
            1 - beta,
            _zero(layout.bits),
            _zero(8),
            PEERS=payload.shape[0],
            BITS=layout.bits,
            BLOCK=layout.block,
            OUT_BITS=out_layout.bits,
            OUT_BLOCK=out_layout.block,
            ERROR_BLOCK=error_block,
            TILE=tile,
            num_warps=tile // _PER_THREAD_SUM // 32,
            enable_fp_fusion=False,
        )
    return out


def _align(numel: int) -> int:
    """The largest power of two that divides ``numel``, up to the 8 values of a 16-byte access.

    With ``numel`` in units of it, kernels know which accesses are aligned, and are compiled in four variants at most.
    """
    return min(numel & -numel, 8)


def _group(values: Tensor, layout: PayloadLayout) -> int:
    """Neighbouring values of one thread: a 16-byte access, unless threads would share a word of codes."""
    return max(16 // values.element_size(), 32 // layout.bits)


def _zero(bits: int) -> int:
    """See ``tiles.decode_sum``."""
    return 0x4B000000 + (1 << (bits - 1))
