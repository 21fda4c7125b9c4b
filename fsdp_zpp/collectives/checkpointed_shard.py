"""A secondary shard from a checkpoint, and whether it matches the current weights.

[Note: Weights of a checkpoint]
A secondary shard from a checkpoint (Int4Delta) is valid only for the weights that were saved with it. The weights may
be loaded before the shard or after it, and other weights may be loaded or written later, so the order of events proves
nothing. A fingerprint of this rank's weights, saved beside the shard, does: at the first gather, the ranks that gather
from each other exchange whether their fingerprints match. If all do, they continue from the saved shard; otherwise the
weights are sent whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from .fingerprint import fingerprint
from .hops import Hop


class CheckpointedShardState(TypedDict):
    """A :class:`CheckpointedShard` as a dict; the row is None if there was nothing to be saved."""

    row: Tensor | None
    fresh: bool
    fingerprint: str | None


@dataclass(frozen=True)
class CheckpointedShard:
    """This rank's row of a secondary shard from a checkpoint. See [Note: Weights of a checkpoint].

    Args:
        row: The row, uint8 [1, nbytes], on the CPU.
        fresh: Whether it encodes the weights saved with it; otherwise it is the base of their next delta.
        fingerprint: The fingerprint of those weights; None if unknown, in which case it matches nothing.
    """

    row: Tensor
    fresh: bool
    fingerprint: str | None

    @classmethod
    def from_payload(cls, row: Tensor, fresh: bool, weights: Tensor | None) -> CheckpointedShard:
        """Return the record to save for a ``row``; ``weights`` are None if they can't be read. Waits for the device."""
        return cls(row.cpu().clone(), fresh, None if weights is None else fingerprint(weights))

    def state_dict(self) -> CheckpointedShardState:
        """Return the record as a dict, which :meth:`from_state_dict` reads."""
        return {"row": self.row.clone(), "fresh": self.fresh, "fingerprint": self.fingerprint}

    @classmethod
    def from_state_dict(cls, state: CheckpointedShardState) -> CheckpointedShard | None:
        """Return the record that :meth:`state_dict` was called on; None if there was none."""
        row = state["row"]
        return None if row is None else cls(row.cpu(), state["fresh"], state.get("fingerprint"))

    def is_of(self, shard: Tensor, nbytes: int) -> bool:
        """Return whether it was saved with the weights ``shard``, as a row of ``nbytes``. Waits for the device."""
        return self.row.shape == (1, nbytes) and self.fingerprint == fingerprint(shard)

    def all_gather_if_matching(self, hop: Hop, shard: Tensor, nbytes: int, label: str) -> Tensor | None:
        """Gather the rows of all ranks of ``hop``, uint8 [ranks, nbytes]; None unless each is of its rank's weights.

        Collective.

        Args:
            hop: The inter-node hop.
            shard: This rank's weights.
            nbytes: Bytes of a payload.
            label: Names the unit in profiles.
        """
        matches = torch.tensor([[self.is_of(shard, nbytes)]], dtype=torch.uint8)
        rows = hop.all_gather(torch.cat((self.row, matches), dim=1).to(shard.device), label)
        return rows[:, :-1].contiguous() if rows[:, -1].all() else None


NOTHING: CheckpointedShardState = {"row": None, "fresh": False, "fingerprint": None}
"""State dict where there is nothing to be saved."""
