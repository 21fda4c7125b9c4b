"""Codes of 4 and 8 bits as GPTQ, AWQ and compressed-tensors pack them into int32 words, and what codes are worth."""

from __future__ import annotations

import torch
from torch import Tensor


def unpack_codes(words: Tensor, bits: int) -> Tensor:
    """Unpack codes along the last dimension, those in the lowest bits of a word first.

    Args:
        words: int32 [..., words].
        bits: 4 or 8.

    Returns:
        The unsigned codes, uint8 [..., words * 32 // bits].
    """
    flat = torch.empty(words.shape, dtype=words.dtype, device=words.device).copy_(words).view(-1)
    # Little-endian, as safetensors and the machines that torch runs on are.
    octets = flat.view(torch.uint8).view(*words.shape[:-1], 4 * words.shape[-1])
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def unpack_awq_codes(words: Tensor) -> Tensor:
    """Unpack AWQ's codes of 4 bits along the last dimension: int32 [..., words] to uint8 [..., words * 8].

    From its lowest bits on, a word holds the codes 0, 2, 4, 6, 1, 3, 5, 7 (autoawq's ``packing_utils.py``).
    """
    return unpack_codes(words, 4).unflatten(-1, (-1, 2, 4)).mT.flatten(-3)


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
