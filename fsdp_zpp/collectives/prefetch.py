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

[Note: Chunks]
To encode and send a unit by itself takes Python tens of microseconds and the network at least its latency. But a unit
can be used only when all that was sent with it has arrived. So what a forward needs is sent in a few chunks, the next
one while units of the last one compute. The larger a chunk, the longer its first unit waits for the others, so a chunk
of several units has a limit. inter_node_gather.py encodes and sends the units of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fsdp_zpp.codecs.base import Codec

from .inter_node_gather import StaleShard, gather_inter_node
from .secondary_shard import SecondaryShard, ShardValues
from .streams import SideStream

CHUNKS = 4
"""In about how many parts the weights of a forward are sent: all but the first can hide behind computation."""

LEAST_NBYTES = 2**20
"""A rank that sends less than a MiB takes about as long as the network's latency, so that is not worth cutting."""

MOST_NBYTES = 2**24
"""Most that a rank sends to all others for a chunk of several units: 16 MiB take 1.3 ms at 100 Gb/s a GPU. While it is
encoded, its full-precision values take four to eight times that, divided by the number of other nodes."""


class SecondaryShardPrefetcher:
    """Makes the secondary shards of a model's units. See the top of this file.

    Args:
        shards: The secondary shards of units that need no second inter-node hop until their weights change, in the
            order in which a forward needs them. Each has a source.
        least_nbytes: As of :func:`in_chunks`.
    """

    def __init__(self, shards: Iterable[SecondaryShard], least_nbytes: int = LEAST_NBYTES) -> None:
        self._shards = list(shards)
        self._least_nbytes = least_nbytes
        self._stream = SideStream()
        self._excluded: set[int] = set()  # the ids of those that are not prefetched any more
        for shard in self._shards:
            shard.side_stream = self._stream

    def refresh(self, needed: SecondaryShard, codec: Codec, values: ShardValues) -> None:
        """Make ``needed`` fresh, and the stale secondary shards that the forward needs after it. Collective.

        Args:
            needed: The secondary shard of the unit that is gathered now.
            codec: Encodes its values.
            values: Its values.
        """
        stale = [shard for shard in self._shards if shard.stale and shard is not needed]
        self._excluded.update(id(shard) for shard in (needed, *stale) if shard.unread)
        ahead = [
            # In this stream: parameters may have been replaced by what it computes.
            (shard, shard.next_codec, shard.source, shard.source.prepare_read())
            for shard in stale
            if id(shard) not in self._excluded and shard.next_codec and shard.source and shard.source.can_be_read()
        ]
        codecs, sources, device = {needed: codec}, {}, values.tensors[0].device
        for shard, next_codec, source, numel in ahead:
            codecs[shard], sources[shard] = shard.sent_as(next_codec, numel, device), source
        with self._stream.after_current(device):
            for shard in stale:
                if id(shard) in self._excluded:
                    shard.keep_base_apart()
            for chunk in in_chunks([(shard, shard.nbytes * shard.peers) for shard in codecs], self._least_nbytes):
                # Others are read only now, for shards that are offloaded are copied to the device.
                read = {shard: values if shard is needed else sources[shard].read() for shard in chunk}
                gather_inter_node([StaleShard(shard, codecs[shard], read[shard]) for shard in chunk])


def in_chunks(
    sent: Sequence[tuple[SecondaryShard, int]], least_nbytes: int = LEAST_NBYTES, most_nbytes: int = MOST_NBYTES
) -> list[list[SecondaryShard]]:
    """Cut what is to be sent, in order, into parts that are sent together. See [Note: Chunks].

    Args:
        sent: Secondary shards, and the bytes that a rank sends for each if it sends no delta.
        least_nbytes: Parts of fewer bytes are not cut.
        most_nbytes: The most that a part of several shards may be.
    """
    limit = min(most_nbytes, max(least_nbytes, -(-sum(size for _, size in sent) // CHUNKS)))
    chunks: list[list[SecondaryShard]] = []
    nbytes = 0
    for shard, size in sent:
        if not chunks or nbytes + size > limit or shard.group is not chunks[-1][0].group:
            chunks.append([])
            nbytes = 0
        chunks[-1].append(shard)
        nbytes += size
    return chunks
