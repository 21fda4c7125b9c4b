"""Prefetching: the secondary shards of all units of a model are made in a row, as soon as the first is needed.

A forward after a step asks for one unit after the other, but the slow network need not wait for that: secondary shards
are kept anyway, so all of them can be sent when the first is needed. They are made in a stream of their own, beside the
intra-node hops and the computation of earlier units; the computation waits for a secondary shard only when it reaches
its unit.

This starts with the first gather after a change, not with the change: what is written between a step and the forward
(averages, clipped weights) must be in them, and a step that another one follows, of a second optimizer, must not send
weights twice. Starting at the change would gain nothing on a GPU, whose host is already ahead of it.

Ranks agree, for gathers and changes come in the same order on all of them. A unit whose secondary shard was prefetched
and not read before its weights changed again is not prefetched any more.

A hop that carries little takes as long as the network's latency, so neighbours that are small are sent together.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from torch import Tensor

from fsdp_zpp.codecs.base import Codec

from .hops import labelled
from .secondary_shard import SecondaryShard, send_together
from .streams import SideStream

BATCH_NBYTES = 2**20
"""A MiB: on a network that is slow it takes far longer than a hop's latency."""


class SecondaryShardPrefetcher:
    """Makes the secondary shards of a model's units. See the top of this file.

    Args:
        shards: The secondary shards of units that need no second inter-node hop until their weights change, in the
            order in which a forward needs them. Each has a source.
        batch_nbytes: Bytes of payloads that are sent as one; one that is larger goes by itself.
    """

    def __init__(self, shards: Iterable[SecondaryShard], batch_nbytes: int = BATCH_NBYTES) -> None:
        self._shards = list(shards)
        self._batch_nbytes = batch_nbytes
        self._stream = SideStream()
        self._excluded: set[int] = set()  # the ids of those that are not prefetched any more
        for shard in self._shards:
            shard.side_stream = self._stream

    def refresh(self, needed: SecondaryShard, values: Tensor, codec: Codec, version: Hashable) -> None:
        """Make ``needed`` fresh, and the stale ones that are to come. Collective.

        Args:
            needed: The secondary shard of the unit that is gathered now.
            values: As of :meth:`SecondaryShard.encode`, like the next two.
            codec: As above.
            version: As above.
        """
        stale = [shard for shard in self._shards if shard.stale and shard is not needed]
        self._excluded.update(id(shard) for shard in (needed, *stale) if shard.unread)
        ahead = [
            (shard, shard.source, shard.next_codec)
            for shard in stale
            if id(shard) not in self._excluded and shard.next_codec and shard.source and shard.source.can_be_read()
        ]
        for _, source, _ in ahead:
            # In this stream: parameters may have been replaced by what it computes.
            source.write_back()
        with labelled("refresh", needed.label), self._stream.after_current(values.device):
            payload = needed.encode(values, codec, version)
            batch = [] if payload is None else [(needed, payload)]
            for shard, source, next_codec in ahead:
                payload = shard.encode(source.full_precision_shard(), next_codec, source.shard_version())
                if payload is None:
                    continue
                nbytes = payload.nbytes + sum(earlier.nbytes for _, earlier in batch)
                if batch and (batch[0][0].group is not shard.group or nbytes > self._batch_nbytes):
                    send_together(batch)
                    batch = []
                batch.append((shard, payload))
            send_together(batch)
