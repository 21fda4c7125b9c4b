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
    # Both codes of a byte at once: one look-up takes half the time of two.
    return torch.nn.functional.embedding(octets.int(), _pairs(dtype, octets.device)).flatten(-2)


@functools.cache  # there are few dtypes and devices
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the two values of each byte, [256, 2]; they are copied to a device once."""
    with torch.inference_mode(False):
        values = torch.tensor(E2M1 + tuple(-value for value in E2M1), dtype=dtype)
        octets = torch.arange(256)
        return torch.stack((values[octets & 15], values[octets >> 4]), dim=1).to(device)
