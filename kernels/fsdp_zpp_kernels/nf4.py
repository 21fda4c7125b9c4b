"""NF4's levels: what its 4-bit codes stand for, as fractions of a block's scale.

A payload of NF4 codes has the layout of int4 codes and holds whole blocks. It differs in what a code means, and in the
order of the two codes of a byte: value ``2i`` is the high nibble, value ``2i + 1`` the low one, as in bitsandbytes.
Decoding takes ``level * scale`` in fp32 and rounds once, to the dtype of the output. The scale of a block that is not
finite is NaN, so all of it decodes to NaN.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The level of each code: fp32 values, ascending. They are those of QLoRA (arXiv 2305.14314, appendix E)."""


@functools.cache  # a process has few devices
def levels_on(device: torch.device) -> Tensor:
    """Return the levels on ``device``, fp32 [16].

    The first call for a GPU copies them there, for which the CPU waits, and which no CUDA graph can capture: make it
    before a forward.
    """
    with torch.inference_mode(False):
        return torch.tensor(LEVELS, dtype=torch.float32, device=device)
