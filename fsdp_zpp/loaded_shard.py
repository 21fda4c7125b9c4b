"""A secondary shard from a checkpoint, and whether it is of any use for the weights that there are now.

[Note: Weights of a checkpoint]
A secondary shard from a checkpoint (Int4Delta) is of use only if the weights are those that were saved with it. They
may be loaded before it or after, and others may be loaded or written after both, so events do not tell. A fingerprint
of this rank's weights, saved beside it, does: at the first gather, ranks that gather from each other tell each other
whether theirs fits, and go on with what was saved if all do. Else weights are sent whole.
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
        fresh: Whether it was made from the weights saved with it, or is what their difference is to be against.
        fingerprint: Of those weights; None if it is not known.
    """

    row: Tensor
    fresh: bool
    fingerprint: str | None

    def is_of(self, shard: Tensor, nbytes: int) -> bool:
        """Whether it was saved with ``shard``, and for a codec that makes ``nbytes`` of that. Waits for the device."""
        return self.row.shape == (1, nbytes) and self.fingerprint == fingerprint(shard)


def fingerprint(shard: Tensor) -> str:
    """Tells flat values of all others, but for the sign of zeros. Waits for the device."""
    # An optimizer that is made to have its states, as torch's state dicts do it, may turn -0 into 0.
    values = (shard.detach() + 0.0).cpu().contiguous().view(torch.uint8)
    return f"{shard.dtype} {hashlib.blake2b(values.numpy().data, digest_size=16).hexdigest()}"
