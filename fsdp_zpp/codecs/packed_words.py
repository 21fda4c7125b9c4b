"""Words of 14, 16 or 20 bits, packed into bytes without gaps, the first word in the lowest bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_TOGETHER = {14: 4, 16: 1, 20: 2}
"""How many words are packed at once, by their width: so many that they fill whole bytes, at most 8."""


def packed_nbytes(count: int, width: int) -> int:
    """Return the number of bytes that ``count`` words of ``width`` bits take."""
    together = _TOGETHER[width]
    return -(-count // together) * together * width // 8


def pack_words(words: Tensor, width: int) -> Tensor:
    """Return flat int64 ``words``, of ``width`` bits each, packed into uint8."""
    together = _TOGETHER[width]
    groups = F.pad(words, (0, -words.numel() % together)).view(-1, together)
    starts = torch.arange(0, together * width, width, device=words.device)
    return (groups << starts).sum(dim=1).view(torch.uint8).view(-1, 8)[:, : together * width // 8].reshape(-1)


def unpack_words(packed: Tensor, count: int, width: int) -> Tensor:
    """Return ``count`` words from each row of bytes ``packed``: int64 [rows, count]."""
    together = _TOGETHER[width]
    nbytes = together * width // 8
    groups = F.pad(packed.reshape(-1, nbytes), (0, 8 - nbytes)).view(torch.int64)
    starts = torch.arange(0, together * width, width, device=packed.device)
    return (groups >> starts & ((1 << width) - 1)).view(len(packed), -1)[:, :count]
