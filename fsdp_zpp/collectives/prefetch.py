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

inter_node_gather.py has how neighbours are encoded and sent together.
"""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_zpp.codecs.base import Codec

from .inter_node_gather import LEAST_NBYTES, StaleShard, gather_between_nodes, in_chunks
from .secondary_shard import SecondaryShard, ShardValues
from .streams import SideStream


class SecondaryShardPrefetcher:
    """Makes the secondary shards of a model's units. See the top of this file.

    Args:
        shards: The secondary shards of units that need no second inter-node hop until their weights change, in the
            order in which a forward needs them. Each has a source.
        least_nbytes: As of :func:`inter_node_gather.in_chunks`.
    """

    def __init__(self, shards: Iterable[SecondaryShard], least_nbytes: int = LEAST_NBYTES) -> None:
        self._shards = list(shards)
        self._least_nbytes = least_nbytes
        self._stream = SideStream()
        self._excluded: set[int] = set()  # the ids of those that are not prefetched any more
        for shard in self._shards:
            shard.side_stream = self._stream

    def refresh(self, needed: SecondaryShard, codec: Codec, values: ShardValues) -> None:
        """Make ``needed`` fresh, and the stale ones that are to come. Collective.

        Args:
            needed: The secondary shard of the unit that is gathered now.
            codec: Encodes its values.
            values: Its values.
        """
        stale = [shard for shard in self._shards if shard.stale and shard is not needed]
        self._excluded.update(id(shard) for shard in (needed, *stale) if shard.unread)
        ahead = {
            shard: (shard.next_codec, shard.source)
            for shard in stale
            if id(shard) not in self._excluded and shard.next_codec and shard.source and shard.source.can_be_read()
        }
        sizes, device = [codec.nbytes(values.numel)], values.tensors[0].device
        for shard, (its_codec, source) in ahead.items():
            numel = source.prepare_read()  # in this stream: parameters may have been replaced by what it computes
            ahead[shard] = (shard.sent_as(its_codec, numel, device), source)
            sizes.append(ahead[shard][0].nbytes(numel))
        sent = [(shard, size * shard.peers) for shard, size in zip((needed, *ahead), sizes, strict=True)]
        with self._stream.after_current(device):
            for shard in stale:
                if id(shard) in self._excluded:
                    shard.keep_base_apart()
            for chunk in in_chunks(sent, self._least_nbytes):
                # Others are read only now, for shards that are offloaded are copied to the device.
                others = [(shard, *ahead[shard]) for shard in chunk if shard is not needed]
                due = [StaleShard(needed, codec, values)] if needed in chunk else []
                gather_between_nodes(due + [StaleShard(shard, its, source.read()) for shard, its, source in others])
