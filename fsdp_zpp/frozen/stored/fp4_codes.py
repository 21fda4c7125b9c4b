"""Values of 4-bit floats (e2m1), two in a byte, as mxfp4 and nvfp4 have them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the lower three bits of a code; the fourth is the sign (OCP Microscaling Formats, section 5.3.3)."""


def unpack_fp4(octets: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpack values along the last dimension, those in the lower bits of a byte first.

    Args:
        octets: uint8 [..., bytes].
        dtype: The dtype of the result; every floating dtype of 16 bits or more holds these values exactly.

    Returns:
        The values, [..., bytes * 2].
    """
    codes = torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)
    return _values(dtype, octets.device)[codes.int()]


@functools.cache
def _values(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the values of all codes; they are copied to a device once."""
    with torch.inference_mode(False):
        return torch.tensor(E2M1 + tuple(-value for value in E2M1), dtype=dtype, device=device)
