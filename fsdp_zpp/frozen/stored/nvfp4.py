"""Decodes weights of compressed-tensors' format ``nvfp4-pack-quantized``.

- ``weight_packed``, uint8 [out, in / 2]: two neighbouring inputs a byte;
- ``weight_scale``, float8_e4m3fn [out, in / 16];
- ``weight_global_scale``, fp32 [1]: what the scales were multiplied by.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .fp4_codes import unpack_fp4


def decode_nvfp4(packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """Decode rows of a weight, or of each weight of a stack.

    Args:
        packed: uint8 [..., rows, in / 2].
        scale: float8_e4m3fn [..., rows, in / 16].
        global_scale: fp32 [..., 1].

    Returns:
        The values, fp32 [..., rows, in].
    """
    scales = scale.float() / global_scale.float().unsqueeze(-1)
    values = unpack_fp4(packed, torch.float32)
    return (values.unflatten(-1, (scale.shape[-1], -1)) * scales.unsqueeze(-1)).flatten(-2)
