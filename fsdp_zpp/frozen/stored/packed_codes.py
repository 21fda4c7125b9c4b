"""Codes of 4 and 8 bits as GPTQ, AWQ and compressed-tensors pack them into int32 words, and what codes are worth."""

from __future__ import annotations

import torch
from torch import Tensor

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ's eight neighbouring outputs lie in a word, counted from its lowest bits (autoawq's AWQ_REVERSE_ORDER)."""


def unpack_codes(words: Tensor, bits: int) -> Tensor:
    """Unpack codes along the last dimension, those in the lowest bits of a word first.

    Args:
        words: int32 [..., words].
        bits: 4 or 8.

    Returns:
        The unsigned codes, uint8 [..., words * 32 // bits].
    """
    octets = words.contiguous().view(torch.uint8)  # little-endian, as safetensors and all machines that torch runs on
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def unpack_awq_codes(words: Tensor) -> Tensor:
    """Unpack AWQ's codes of 4 bits along the last dimension: int32 [..., words] to uint8 [..., words * 8]."""
    codes = unpack_codes(words, 4).unflatten(-1, (-1, 8))
    return codes[..., torch.tensor(AWQ_ORDER, device=words.device)].flatten(-2)


def scale_codes(codes: Tensor, zeros: Tensor | int, scales: Tensor, group_of: Tensor | None) -> Tensor:
    """Return ``(codes - zeros) * scales``, rounded once, to the dtype of the scales.

    Differences of codes are integers up to 255, which fp16 and bf16 hold exactly, so that the libraries that own these
    formats, which compute in the dtype of the scales, get the same.

    Args:
        codes: uint8 [..., rows, columns].
        zeros: Unsigned zero points, uint8 [..., rows, groups], or one for all.
        scales: Floats, [..., rows, groups].
        group_of: The group of each column, integers [..., columns]. None: groups are equally many neighbouring columns.

    Returns:
        The values, [..., rows, columns], in the dtype of ``scales``.
    """
    integers = codes.to(torch.int16)
    if group_of is None:
        grouped = integers.unflatten(-1, (scales.shape[-1], -1))
        offset = zeros if isinstance(zeros, int) else zeros.unsqueeze(-1).to(torch.int16)
        return ((grouped - offset) * scales.unsqueeze(-1)).flatten(-2)
    index = group_of.long().unsqueeze(-2).expand(codes.shape)
    offset = zeros if isinstance(zeros, int) else zeros.to(torch.int16).gather(-1, index)
    return (integers - offset) * scales.gather(-1, index)
