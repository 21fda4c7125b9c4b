"""Decodes weights of GPTQ checkpoints, as gptqmodel, auto_gptq and optimum write them.

A linear layer of ``in`` inputs and ``out`` outputs is stored transposed, with f = 32 / bits codes in a word:

- ``qweight``, int32 [in / f, out]: a word holds neighbouring inputs of one output;
- ``qzeros``, int32 [groups, out / f]: a word holds the zero points of neighbouring outputs;
- ``scales``, float [groups, out];
- ``g_idx``, int32 [in]: the group of each input, in any order if it was quantized with ``desc_act``.

Files of ``checkpoint_format`` ``gptq``, the first version, hold zero points minus one; ``gptq_v2`` holds them as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .packed_codes import scale_codes, unpack_codes

_ONES = {4: 0x11111111, 8: 0x01010101}


def decode_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None, bits: int, minus_one: bool
) -> Tensor:
    """Decode some of the outputs of a weight, or of each weight of a stack.

    Args:
        qweight: int32 [..., in / f, rows].
        qzeros: int32 [..., groups, rows / f].
        scales: Floats, [..., groups, rows].
        g_idx: Integers, [..., in]. None: groups are equally many neighbouring inputs.
        bits: 4 or 8.
        minus_one: Whether the zero points are stored minus one.

    Returns:
        The values, [..., rows, in], in the dtype of ``scales``.
    """
    if minus_one:
        # Whole words are added to, with carries, as gptqmodel does: it subtracts whole words when it writes, so that a
        # zero point of 0 borrows from its neighbour. int32 wraps around.
        qzeros = qzeros + torch.tensor(_ONES[bits], dtype=torch.int32, device=qzeros.device)
    codes = unpack_codes(qweight.mT, bits)
    zeros = unpack_codes(qzeros, bits)[..., : scales.shape[-1]].mT
    return scale_codes(codes, zeros, scales.mT, g_idx)
