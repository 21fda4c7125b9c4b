"""Decodes stacks of matrices in mxfp4, as gpt-oss stores its experts.

A stack of shape [experts, in, out] is stored transposed, in two tensors:

- ``*_blocks``, uint8 [experts, out, in / 32, 16]: 32 neighbouring inputs are a block, two of them a byte;
- ``*_scales``, uint8 [experts, out, in / 32]: the exponent of each block, plus 127.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .fp4_codes import unpack_fp4


def decode_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode rows of matrices.

    Args:
        blocks: uint8 [..., rows, in / 32, 16].
        scales: uint8 [..., rows, in / 32].
        dtype: The dtype of the result. transformers multiplies in it; fp32 and bf16 hold the products exactly.

    Returns:
        The values, [..., rows, in].
    """
    exponents = scales.to(torch.int32) - 127
    return torch.ldexp(unpack_fp4(blocks, dtype), exponents.unsqueeze(-1)).flatten(-2)
