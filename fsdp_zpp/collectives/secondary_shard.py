"""The secondary shard of a unit's weights: what the inter-node hop leaves on a rank.

Weights are encoded once, from the full-precision shard, and gathered between nodes among ranks of the same local index;
what that leaves on a rank, uint8 [nodes, nbytes], is the *secondary shard*. The intra-node hop gathers it inside the
node. Kept, still encoded, the secondary shard is ZeRO++'s hpZ: later gathers start at the intra-node hop and send
nothing between nodes. All ranks, the owner too, decode the same bytes, so they compute with the same weights bit for
bit.

    empty --encode()--> in flight --receive()--> fresh, at a version of the weights --mark_stale()--> stale
                            ^                                                                           |
                            +---------- encode(): whole, or the change against a base if there is one --+

[Note: Staleness]
A kept secondary shard is stale once the weights have changed. Ranks that disagree on that would enter different
collectives and hang, so staleness is told by events that all ranks share (``mark_stale``), never by looking at the
shard: a rank whose shard is all padding sees no write. Looking at the shard serves as a check only: if the caller's
``version`` of the shard differs from the one that was encoded, something wrote to the weights without an event, and the
gather raises rather than compute with old weights. That error is local: ranks that saw no write wait for this one until
their process group's timeout.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fsdp_zpp.codecs.base import Codec, FullPrecision
from fsdp_zpp.codecs.delta import Int4Delta

from .checkpointed_shard import NOTHING, CheckpointedShard
from .hops import Hop, all_gather_together, labelled
from .streams import SideStream, keep_until_read, record_event, wait_for

logger = logging.getLogger("fsdp_zpp")


class StaleSecondaryError(RuntimeError):
    """The weights were written to in a way that no event announced."""


class ShardSource(Protocol):
    """Where a unit's weights can be read before FSDP asks for their gather; FSDP's own record of a unit."""

    def can_be_read(self) -> bool:
        """Whether they can be read now, and will not change before their gather."""

    def write_back(self) -> None:
        """Have the shard contain what its parameters were replaced by, in the stream that gathers."""

    def full_precision_shard(self) -> Tensor:
        """This rank's values, flat, on the device to gather on."""

    def shard_version(self) -> Hashable:
        """A value that changes with every write to the shard that torch counts, and when it is moved or replaced."""


@dataclass(frozen=True)
class _InFlight:
    """What :meth:`SecondaryShard.encode` has encoded and :meth:`SecondaryShard.receive` will complete."""

    codec: Codec
    version: Hashable
    delta_base: Tensor | None
    numel: int


class SecondaryShard:
    """What the inter-node hop of one unit leaves on this rank. See the top of this file.

    Args:
        hop: The inter-node hop; None on one node, where this rank's payload is all there is.
        own_node: This rank's node, and so its row.
        codec: Encodes the weights; None if the dtype of each gather's output decides.
        keep: Whether to keep it from one gather to the next, until the weights change.
        label: Names the unit in profiles and errors.

    Attributes:
        group: The ranks of the hop.
        source: Where the weights can be read; None if they can't. FSDP may replace it.
        side_stream: The stream in which it is made, if not in the one that reads it.
        next_codec: What will encode the weights for the next gather, if that is known by now.
        stale: Whether the weights have changed since they were encoded.
        unread: Whether it has not been read since it was made.
    """

    def __init__(self, hop: Hop | None, own_node: int, codec: Codec | None, keep: bool, label: str) -> None:
        self.hop, self.codec, self.label = hop, codec, label
        self.group = None if hop is None else hop.group
        # On one node there is no hop to save, so keeping what it leaves is of no use.
        self.keep = keep and hop is not None
        self.source: ShardSource | None = None
        self.side_stream: SideStream | None = None
        self.stale, self.unread = True, False
        self._own_node = own_node
        self._payload: Tensor | None = None
        self._in_flight: _InFlight | None = None
        self._delta_base: Tensor | None = None
        self._checkpointed: CheckpointedShard | None = None
        self._last_codec: Codec | None = None
        self.next_codec = codec
        self._version: Hashable = None
        self._ready: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes that it takes now."""
        return 0 if self._payload is None else self._payload.nbytes

    @property
    def sends_deltas(self) -> bool:
        """Whether changes of the weights go between nodes by themselves."""
        return isinstance(self.codec, Int4Delta) and self.keep

    def is_fresh(self, codec: Codec) -> bool:
        """Whether it holds the weights as ``codec`` encodes them."""
        return self._payload is not None and not self.stale and self._last_codec == codec

    # ---- from stale to fresh

    @torch.no_grad()
    def encode(self, shard: Tensor, codec: Codec, version: Hashable) -> Tensor | None:
        """Encode the weights for the inter-node hop, in the current stream. Collective after a checkpoint was loaded.

        Args:
            shard: This rank's full-precision values, flat [numel].
            codec: What encodes them.
            version: The version of ``shard``.

        Returns:
            This rank's payload, uint8 [1, nbytes], to be gathered for :meth:`receive`; None if nothing needs to be
            sent, and the secondary shard is fresh.
        """
        base, is_current = self._take_base(shard, codec)
        if is_current:
            assert base is not None
            self._hold(base, codec, version)
            return None
        if base is not None and isinstance(codec, Int4Delta):
            payload = codec.encode_delta(base, self._own_node, shard)
        else:
            base, payload = None, codec.encode(shard, 1, 1)
        self._in_flight = _InFlight(codec, version, base, shard.numel())
        if self.hop is None:
            self.receive(payload)
            return None
        return payload

    def receive(self, gathered: Tensor) -> None:
        """Take what the ranks of all nodes have sent, uint8 [nodes, nbytes], in the stream that gathered it."""
        sent, self._in_flight = self._in_flight, None
        assert sent is not None
        if sent.delta_base is not None:
            assert isinstance(sent.codec, Int4Delta)
            gathered = sent.codec.apply_delta(sent.delta_base, gathered, sent.numel)
        self._hold(gathered, sent.codec, sent.version)

    def refresh(self, shard: Tensor, codec: Codec, version: Hashable) -> None:
        """Encode and gather the weights by themselves; arguments as of :meth:`encode`. Collective."""
        with labelled("refresh", self.label):
            payload = self.encode(shard, codec, version)
            if payload is not None:
                send_together([(self, payload)])

    def _hold(self, payload: Tensor, codec: Codec, version: Hashable) -> None:
        # Parameters of several dtypes go as bytes, which are not to be had from the full-precision shard.
        bytes_only = isinstance(codec, FullPrecision) and not codec.dtype.is_floating_point
        self.next_codec = None if bytes_only else codec
        self._payload, self._last_codec, self._version = payload, codec, version
        self.stale, self.unread = False, True
        self._ready = record_event(payload) if self.side_stream is not None and payload.is_cuda else None

    def _take_base(self, shard: Tensor, codec: Codec) -> tuple[Tensor | None, bool]:
        """An older secondary shard to send a delta against, if there is one, and whether it holds these very values."""
        base, checkpointed = self._delta_base, self._checkpointed
        self._delta_base = self._checkpointed = None
        if base is not None and base.is_cuda:
            keep_until_read(base)  # it was made in the stream of an earlier gather, and this is its last use
        if checkpointed is None or self.hop is None or not self.sends_deltas:
            return base, False
        base = checkpointed.all_gather_if_matching(self.hop, shard, codec.nbytes(shard.numel()), self.label)
        return base, base is not None and checkpointed.fresh

    # ---- while it is fresh

    def read(self) -> Tensor:
        """The shards of all ranks with this local index, encoded: uint8 [nodes, nbytes], for the current stream."""
        payload, self.unread = self._payload, False
        assert payload is not None
        if self._ready is not None and self.side_stream is not None:
            wait_for(self._ready, payload.device)
            self.side_stream.read_by_current()
        if not self.keep:
            self._payload = None
            if payload.is_cuda:
                keep_until_read(payload)
        return payload

    def check_version(self, version: Hashable) -> None:
        """Raise if the weights are not in the version that was sent last. See [Note: Staleness].

        Raises:
            StaleSecondaryError: If they are in another one, with no event in between.
        """
        if not self.stale and self._version != version:
            raise StaleSecondaryError(
                f"the weights of {self.label} were changed outside of an optimizer step, load_state_dict or "
                "summon_full_params(writeback=True), or in a forward that had begun to send them, so what other ranks "
                "have of them is out of date; after such a change, call fsdp_zpp.invalidate(model) on every rank"
            )

    def rebase_version(self, before: Hashable, after: Hashable) -> None:
        """Declare that the change of version from ``before`` to ``after`` was no change of the values."""
        if not self.stale and self._version == before:
            self._version = after

    def mark_stale(self, *, by_step: bool = False) -> None:
        """Declare that the weights have changed; to be called on all ranks. See [Note: Staleness].

        Args:
            by_step: Whether they have changed by a step only, and so by little: the next gather may send a delta.
        """
        if not by_step or not self.sends_deltas:
            self._delta_base = None
        elif self._payload is not None:  # else nothing was sent since the last change: receivers hold the same base
            self._delta_base = self._payload
        self._payload, self.stale = None, True
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s: secondary shard stale", self.label)

    # ---- in checkpoints

    def reset(self) -> None:
        """Send the weights whole when they are gathered next."""
        self._checkpointed = None
        self.mark_stale()

    def state_dict(self) -> dict[str, Any]:
        """This rank's row of what deltas are against, and a fingerprint of the weights as they are now; on the CPU."""
        if self._checkpointed is not None:
            return self._checkpointed.state_dict()
        held = self._payload if self._payload is not None else self._delta_base
        if held is None:
            return dict(NOTHING)
        if self._ready is not None:
            self._ready.synchronize()
        # Only now: before the first forward there is no shard to be read.
        readable = self.source is not None and self.source.can_be_read()
        weights = self.source.full_precision_shard() if readable and self.source is not None else None
        row = held[self._own_node : self._own_node + 1]
        return CheckpointedShard.from_payload(row, self._payload is not None, weights).state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what :meth:`state_dict` gave, be the weights loaded before or after."""
        self.reset()
        self._checkpointed = CheckpointedShard.from_state_dict(state)


def send_together(encoded: Sequence[tuple[SecondaryShard, Tensor]]) -> None:
    """Gather the payloads of shards whose inter-node hops are over the same ranks, if any, in one collective."""
    if not encoded:
        return
    shards = [shard for shard, _ in encoded]
    hops = [shard.hop for shard in shards if shard.hop is not None]
    label = shards[0].label if len(shards) == 1 else f"{shards[0].label} to {shards[-1].label}"
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s: inter-node gather launched", label)
    if len(shards) == 1:
        shards[0].receive(hops[0].all_gather(encoded[0][1], label))
        return
    gathered = all_gather_together(hops, [payload for _, payload in encoded], label)
    for shard, part in zip(shards, gathered, strict=True):
        shard.receive(part)
