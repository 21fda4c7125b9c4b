"""Words of any even width, up to 20 bits, as bytes, the first in the lowest bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_TOGETHER = {14: 4, 16: 1, 20: 2}
"""How many words of a width make whole bytes, at most 8 of them."""


def packed_nbytes(count: int, width: int) -> int:
    """Return the bytes of ``count`` words of ``width`` bits."""
    together = _TOGETHER[width]
    return -(-count // together) * together * width // 8


def pack_words(words: Tensor, width: int) -> Tensor:
    """Return the bytes of words, int64 and flat."""
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
