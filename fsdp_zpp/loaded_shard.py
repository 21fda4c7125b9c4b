"""A secondary shard from a checkpoint, and whether it matches the current weights.

[Note: Weights of a checkpoint]
A secondary shard from a checkpoint (Int4Delta) is valid only for the weights that were saved with it. These may be
loaded before it or after it, and other weights may be loaded or written later, so the order of events proves nothing.
A fingerprint of this rank's weights, saved beside the shard, does: at the first gather, the ranks that gather from each
other exchange whether their fingerprints match. If all do, they continue from the saved shard; otherwise the weights
are sent whole.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LoadedShard:
    """This rank's row of a secondary shard from a checkpoint. See [Note: Weights of a checkpoint].

    Args:
        row: The row, uint8 [1, nbytes], on the CPU.
        fresh: Whether it encodes the weights saved with it; otherwise it is the base of their next delta.
        fingerprint: The fingerprint of those weights; None if unknown, in which case it matches nothing.
    """

    row: Tensor
    fresh: bool
    fingerprint: str | None

    def is_of(self, shard: Tensor, nbytes: int) -> bool:
        """Whether it was saved with these weights, by a codec whose payload has ``nbytes``. Waits for the device."""
        return self.row.shape == (1, nbytes) and self.fingerprint == fingerprint(shard)


def fingerprint(shard: Tensor) -> str:
    """A hash of the values, in which -0 and 0 are equal. Waits for the device."""
    # torch's state dict functions run an optimizer step to create its states, which may turn -0 into 0.
    values = (shard.detach() + 0.0).cpu().contiguous().view(torch.uint8)
    return f"{shard.dtype} {hashlib.blake2b(values.numpy().data, digest_size=16).hexdigest()}"
