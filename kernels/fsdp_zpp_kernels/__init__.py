"""Blockwise quantization kernels for two-hop collectives: Triton on GPUs, PyTorch on CPU, the same bits from both.

``reference.py`` defines the bytes. One side of every operation is a ``rows x cols`` grid of chunks in row-major order,
the other side is the transposed grid: the hops of a two-hop collective leave chunks in (local, node) order where the
caller has (node, local), and a kernel that reads or writes through the transposition saves a copy.

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
