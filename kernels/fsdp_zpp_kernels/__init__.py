"""Blockwise quantization kernels for two-hop collectives: Triton on GPUs, PyTorch on CPU, the same bits from both.

``reference.py`` defines the bytes. Operations that take ``rows`` and ``cols`` read a grid of chunks in row-major order
and write the transposed grid. The hops of a two-hop collective handle chunks in (local, node) order, but the caller's
tensor has chunks in (node, local) order: a kernel that transposes while it reads or writes saves a copy.

The operations are ``torch.library`` ops, ``torch.ops.fsdp_zpp.*``, and trace under ``torch.compile``. They are not
differentiable. All arithmetic is fp32.
"""

from .ops import (
    add_delta,
    dequantize,
    dequantize_nf4_rows,
    dequantize_rows,
    dequantize_sum,
    dequantize_sum_quantize,
    dequantize_sum_quantize_with_feedback,
    quantize,
    quantize_delta,
    quantize_with_feedback,
)
from .reference import PayloadLayout

__all__ = [
    "PayloadLayout",
    "add_delta",
    "dequantize",
    "dequantize_nf4_rows",
    "dequantize_rows",
    "dequantize_sum",
    "dequantize_sum_quantize",
    "dequantize_sum_quantize_with_feedback",
    "quantize",
    "quantize_delta",
    "quantize_with_feedback",
]
