"""Changes of weights in 4 bits, added to a copy of the weights in their own dtype.

A receiver holds a copy ``B`` of the weights ``W``, in bf16 for example. It is sent ``W - B`` in blocks of ``Int4`` and
adds what it decodes. The sender adds the same to its own copy of ``B``, so that its next change includes what this one
has rounded away (SDP4Bit's qWD, arXiv 2410.15526, section 3.1, with a base that is not encoded). Both take ``B`` to
fp32, add ``code * scale``, which is exact there (kernels/payload.py, [Note: Exact products]), and round once to the
dtype of ``B``: the same bits on every device.

The flat values go in chunks of ``CHUNK``, each of which is one row of the codec's payload, the last one shorter. Chunks
do not depend on each other, so that ranks encode different ones, and what they send is the same for any number of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .blockwise import Int4

CHUNK = 1 << 14
"""Values of a chunk: a multiple of every block, and small enough that ranks get equally much."""

_MOST_AT_ONCE = 1 << 10
"""Chunks that are handled at once: they take four bytes a value as fp32, 64 MiB."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes whose changes can be encoded."""


def changes_nbytes(numel: int, codec: Int4) -> int:
    """Return the bytes of the changes of ``numel`` values."""
    chunks, rest = divmod(numel, CHUNK)
    return chunks * codec.nbytes(CHUNK) + codec.nbytes(rest)


def encode_changes(weights: Tensor, base: Tensor, codec: Int4) -> Tensor:
    """Encode what :func:`add_changes` is to add to ``base``.

    Args:
        weights: Flat, contiguous [numel], bf16, fp16 or fp32.
        base: The same of what receivers hold.
        codec: The codec of the changes.

    Returns:
        uint8 [changes_nbytes(numel)].
    """
    payload = torch.empty(changes_nbytes(len(weights), codec), dtype=torch.uint8, device=weights.device)
    for values, row_bytes, rows in _pieces(len(weights), codec):
        changes = weights[values].float() - base[values].float()
        payload[row_bytes] = codec.encode(changes, 1, rows).view(-1)
    return payload


def add_changes(base: Tensor, payload: Tensor, codec: Int4) -> None:
    """Add to ``base``, flat [numel] and contiguous, in place, what :func:`encode_changes` has returned."""
    for values, row_bytes, rows in _pieces(len(base), codec):
        changes = torch.empty(values.stop - values.start, dtype=torch.float32, device=base.device)
        codec.decode(payload[row_bytes].view(rows, -1), changes, rows, 1)
        base[values] = changes.add_(base[values])  # fp32, rounded once


def largest_scale(payload: Tensor, numel: int, codec: Int4) -> float:
    """Return the largest scale of encoded changes: 0 if nothing has changed, not finite if a change is not.

    It waits for the device.
    """
    largest = [
        codec.scales(payload[row_bytes].view(rows, -1), (values.stop - values.start) // rows).max()
        for values, row_bytes, rows in _pieces(numel, codec)
    ]
    return torch.stack(largest).max().item() if largest else 0.0


def _pieces(numel: int, codec: Int4) -> list[tuple[slice, slice, int]]:
    """Return slices of values and of the bytes of their rows, and the number of rows, few enough to handle at once."""
    row, full = codec.nbytes(CHUNK), numel // CHUNK
    pieces = []
    for first in range(0, full, _MOST_AT_ONCE):
        last = min(first + _MOST_AT_ONCE, full)
        pieces.append((slice(first * CHUNK, last * CHUNK), slice(first * row, last * row), last - first))
    if numel % CHUNK:
        pieces.append((slice(full * CHUNK, numel), slice(full * row, changes_nbytes(numel, codec)), 1))
    return pieces
