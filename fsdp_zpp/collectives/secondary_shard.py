"""Secondary shard of a unit's weights: what the inter-node hop leaves on a rank.

Weights are encoded once, from the full-precision shard, and the inter-node hop gathers them among ranks of the same
local index; its result on a rank, uint8 [nodes, nbytes], is the *secondary shard*, which the intra-node hop gathers.
Kept, still encoded, the secondary shard is ZeRO++'s hpZ: later gathers start at the intra-node hop. All ranks, the
owner too, decode the same bytes, so they compute with the same weights bit for bit.

    empty --hold()--> fresh, at a version of the weights --mark_stale()--> stale, perhaps with a base for a delta
                        ^                                                    |
                        +-------------------------- hold() ------------------+

inter_node_gather.py makes what it holds, for several units at once.

[Note: Staleness]
A kept secondary shard is stale once the weights have changed. Ranks that disagree on that would enter different
collectives and hang, so staleness is told by events that all ranks share (``mark_stale``), never by looking at the
shard: a rank whose shard is all padding sees no write. Looking at the shard serves as a check only: if the caller's
``version`` of the shard differs from the one that was encoded, something wrote to the weights without an event, and the
gather raises rather than compute with old weights. That error is local: ranks that saw no write wait for this one until
their process group's timeout. Ranks cannot agree on it in a gather either: between changes they may use different
units, and the host would have to wait to learn what others saw. Under FSDP_ZPP_CHECK it does wait, before each forward
of a model, where all ranks meet; see runtime/model_setup.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.codecs.delta import Int4Delta
from fsdp_zpp.codecs.exact_tail import exact_tail

from .checkpointed_shard import NOTHING, CheckpointedShard, CheckpointedShardState
from .exact_places import ExactPlaces
from .flat_layout import FlatLayout
from .hops import Hop
from .streams import SideStream, keep_until_read, record_event, wait_for

logger = logging.getLogger("fsdp_zpp")


class StaleSecondaryError(RuntimeError):
    """Raised if weights were written to in a way that no event announced."""


class ShardValues(NamedTuple):
    """Values that a unit's shard holds on this rank.

    Attributes:
        tensors: The full-precision values, flat tensors on the device to gather on.
        numel: Their number.
        version: Their version, as of :meth:`ShardSource.shard_version`.
        is_trained: Whether steps change them.
    """

    tensors: Sequence[Tensor]
    numel: int
    version: Hashable
    is_trained: bool


class ShardSource(Protocol):
    """Source from which a unit's weights are read before FSDP asks for their gather; FSDP's record of a unit."""

    def can_be_read(self) -> bool:
        """Return whether the weights can be read now, and will not change before their gather."""

    def prepare_read(self) -> int:
        """Copy the values of replaced parameters into the shard, in the stream that gathers.

        Returns:
            This rank's number of values.
        """

    def read(self) -> ShardValues:
        """Return this rank's values."""

    def shard_version(self) -> Hashable:
        """Return a value that changes with each write to the shard that torch counts, and when it moves."""

    def compares_contents(self) -> bool:
        """Return whether versions of the shard are fingerprints, which differ after any write."""

    def keeps_gathered(self) -> bool:
        """Return whether a gather has left unsharded weights that the next one would reuse."""

    def is_trained(self) -> bool:
        """Return whether steps change the weights."""

    def layout(self, numel: int) -> FlatLayout:
        """Return where parameters lie in a gathered tensor of ``numel`` values."""


class SecondaryShard:
    """Secondary shard of one unit on this rank. See the top of this file.

    Args:
        hop: The inter-node hop; None on one node, where this rank's payload is all there is.
        own_node: This rank's node, and so its row.
        codec: Encodes the weights; None if the dtype of each gather's output decides.
        keep: Whether to keep it from one gather to the next, until the weights change.
        label: Names the unit in profiles and errors.

    Attributes:
        group: The ranks of the hop.
        own_node: This rank's node, and so its row.
        base: The older secondary shard that the next delta is to be against, if there is one.
        checkpointed: The shard that was loaded from a checkpoint, and may hold the weights as they are now.
        source: Where the weights can be read; None if they can't. FSDP may replace it.
        side_stream: The stream in which it is made; None if that is the one that reads it.
        find_exact: Returns the places of small values in this rank's shard, given its size and device.
        exact: These places; None if there are none, or before :meth:`sent_as` has looked for them.
        nbytes: Bytes of a row that is sent whole; 0 before :meth:`sent_as`.
        next_codec: The codec of the next gather, as :meth:`sent_as` takes it; None if that is not known yet.
        encoded_by: The codec that encoded what it holds; None if it holds nothing, or the weights have changed since.
        stale: True if the weights have changed since they were encoded.
        unread: True if it has not been read since it was made.
    """

    def __init__(self, hop: Hop | None, own_node: int, codec: Codec | None, keep: bool, label: str) -> None:
        self.hop, self.codec, self.label = hop, codec, label
        self.group = None if hop is None else hop.group
        # On one node there is no hop to save, so keeping what it leaves is of no use.
        self.keep = keep and hop is not None
        self.source: ShardSource | None = None
        self.side_stream: SideStream | None = None
        self.stale, self.unread = True, False
        self.own_node = own_node
        self.base: Tensor | None = None
        self._payload: Tensor | None = None
        self.checkpointed: CheckpointedShard | None = None
        self.find_exact: Callable[[int, torch.device], ExactPlaces | None] = lambda numel, device: None
        self.exact: ExactPlaces | None = None
        self.nbytes = 0
        self._sent_for: tuple[Codec, int, torch.device] | None = None
        self._sent_as: Codec | None = None
        self.next_codec = codec
        self.encoded_by: Codec | None = None
        self._version: Hashable = None
        self._ready: torch.cuda.Event | None = None

    @cached_property
    def peers(self) -> int:
        """Return the number of other ranks of the hop."""
        return 0 if self.hop is None else self.hop.size - 1

    @property
    def sends_deltas(self) -> bool:
        """Return whether the inter-node hop may send deltas."""
        return isinstance(self.codec, Int4Delta) and self.keep

    # ---- from stale to fresh

    def sent_as(self, codec: Codec, numel: int, device: torch.device) -> Codec:
        """Return ``codec`` with room for the small values of this rank's ``numel``, which it leaves as they are.

        Returns the same instance until an argument changes; sets ``exact`` and ``nbytes``.
        """
        if self._sent_as is None or self._sent_for != (codec, numel, device):
            self._sent_for = codec, numel, device
            self.exact = None if codec.is_lossless else self.find_exact(numel, device)
            self._sent_as = codec if self.exact is None else exact_tail(codec, self.exact.tail)
            self.nbytes = self._sent_as.nbytes(numel)
        return self._sent_as

    def take_base(self) -> Tensor:
        """Return the base, which must exist, for its last use, and drop it."""
        base, self.base = self.base, None
        assert base is not None
        if base.is_cuda:
            keep_until_read(base)  # it was made in the stream of an earlier gather
        return base

    def keep_base_apart(self) -> None:
        """Move the base, if there is one, to memory of its own, since it outlives the bases that share its memory."""
        if self.base is not None and self.base.untyped_storage().nbytes() > self.base.nbytes:
            self.base = self.take_base().clone()

    def gather_checkpoint(self, values: Tensor, codec: Codec, version: Hashable) -> bool:
        """Continue from the checkpoint's shard, if it is of these values on all ranks. Collective.

        Args:
            values: This rank's full-precision values, flat.
            codec: Encodes them.
            version: Their version.

        Returns:
            Whether the secondary shard is fresh now, so that nothing is to be sent.
        """
        checkpointed, self.checkpointed = self.checkpointed, None
        if checkpointed is None or self.hop is None or not self.sends_deltas:
            return False
        base = checkpointed.all_gather_if_matching(self.hop, values, codec.nbytes(values.numel()), self.label)
        if base is not None and checkpointed.fresh:
            self.hold(base, codec, version, record_event(base))
            return True
        self.base = base
        return False

    def hold(self, payload: Tensor, codec: Codec, version: Hashable, ready: torch.cuda.Event | None) -> None:
        """Hold a payload, and become fresh.

        Args:
            payload: The encoded shards from all nodes, uint8 [nodes, nbytes].
            codec: Decodes it.
            version: The version of the weights that it holds.
            ready: An event in the stream that makes ``payload``; None on a CPU.
        """
        if self.codec is None:
            self.next_codec = codec
        self._payload, self.encoded_by, self._version = payload, codec, version
        self.stale, self.unread = False, True
        self._ready = ready

    # ---- while it is fresh

    def read(self) -> Tensor:
        """Return the encoded shards of all nodes, for use in the current stream: uint8 [nodes, nbytes]."""
        payload, self.unread = self._payload, False
        assert payload is not None
        if self._ready is not None and self.side_stream is not None:
            wait_for(self._ready, payload.device)
            self.side_stream.read_by_current()
        if not self.keep:
            self._payload = self.encoded_by = None
            if payload.is_cuda:
                keep_until_read(payload)
        return payload

    def check_version(self, version: Hashable) -> None:
        """Raise if the weights do not have the version that was sent last. See [Note: Staleness].

        Raises:
            StaleSecondaryError: If they have another version, with no event in between.
        """
        if not self.stale and self._version != version:
            self.raise_written()

    def raise_written(self) -> NoReturn:
        """Raise the error about weights that were written to with no event."""
        raise StaleSecondaryError(
            f"the weights of {self.label} were changed outside of an optimizer step, load_state_dict or "
            "summon_full_params(writeback=True), or in a forward that was already sending them, so the copies on "
            "other ranks are out of date; after such a change, call fsdp_zpp.invalidate(model) on every rank"
        )

    @property
    def is_outdated(self) -> bool:
        """Return whether the next gather would reuse weights that were written to on this rank, with no event since."""
        source = self.source
        if self.stale or source is None or not (self.encoded_by is not None or source.keeps_gathered()):
            return False
        if source.can_be_read():
            source.prepare_read()  # writes back tensors that users have put in place of parameters
        return self._version != source.shard_version()

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
            self.base = None
        elif self._payload is not None:  # else nothing was sent since the last change: receivers hold the same base
            self.base = self._payload
        self._payload, self.encoded_by, self.stale = None, None, True
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s: secondary shard stale", self.label)

    # ---- in checkpoints

    def reset(self) -> None:
        """Send the weights whole when they are gathered next."""
        self.checkpointed = None
        self.mark_stale()

    def state_dict(self) -> CheckpointedShardState:
        """Return this rank's row of the base of deltas and a fingerprint of the present weights, on the CPU."""
        if self.checkpointed is not None:
            return self.checkpointed.state_dict()
        held = self._payload if self._payload is not None else self.base
        if held is None:
            return NOTHING.copy()
        if self._ready is not None:
            self._ready.synchronize()
        # Only now: before the first forward there is no shard to be read.
        readable = self.source is not None and self.source.can_be_read()
        weights = torch.cat(list(self.source.read().tensors)) if readable and self.source is not None else None
        row = held[self.own_node : self.own_node + 1]
        return CheckpointedShard.from_payload(row, self._payload is not None, weights).state_dict()

    def load_state_dict(self, state: CheckpointedShardState) -> None:
        """Continue with what :meth:`state_dict` returned, whether the weights are loaded before or after."""
        self.reset()
        self.checkpointed = CheckpointedShard.from_state_dict(state)
