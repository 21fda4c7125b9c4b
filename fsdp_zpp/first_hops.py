"""The first hops of all units of a model, made in a row as soon as the first of them is needed.

[Note: First hops ahead]
A forward after a step asks for one unit after the other, but the slow network need not wait for that: what the first
hop leaves is kept anyway, so that all of them can be under way from the first unit's on. They run in a stream of their
own, each beside the second hops and the computation of the units before it, and the computation waits for a hop only
when it comes to its unit.

They start with the first gather after a change, not with the change: what is written between a step and the forward
(averages, clipped weights) is to be in them, and a step that another one follows, of a second optimizer, is not to send
weights twice. A GPU gets to them at the same time, since its host is ahead of it by then.

Ranks agree, for gathers and changes come in the same order on all of them. A unit whose hop was made and not used
before its weights changed again waits for its own gathers from then on.

A hop that carries little takes as long as the network's latency, so neighbours that are small go as one.

Whatever read a secondary shard did so in one of the streams that have gathered; their work is waited for before memory
of older ones is used again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .hop import all_gather_together
from .weight_gather import FirstHop, WeightGather

TOGETHER = 2**20
"""A MiB: on a network that is slow it takes far longer than a hop's latency."""


class Source(Protocol):
    """Where a unit's weights are to be had from ahead of their gather."""

    def write_back(self) -> None:
        """Have the shard contain what its parameters were replaced by, in the stream that gathers."""

    def shard_ahead(self) -> tuple[Tensor, Hashable] | None:
        """The full-precision shard, on the device to gather on, and its version; None if it can't be had now."""


@dataclass
class _Member:
    gather: WeightGather
    source: Source
    unused: bool = False  # what was made for it ahead
    ahead: bool = True

    def forget_unused(self) -> None:
        """Its weights have changed: if what was made ahead was of no use, make no more."""
        self.ahead, self.unused = self.ahead and not self.unused, False

    def begin(self) -> FirstHop | None:
        """What is to be sent for it, encoded in the current stream, if that can be told yet."""
        codec, held = self.gather.next_codec, self.source.shard_ahead()
        if codec is None or held is None:
            return None
        self.unused = True
        return self.gather.begin_first_hop(held[0], codec, held[1])


class FirstHopsAhead:
    """Makes the first hops of a model's units. See [Note: First hops ahead].

    Args:
        members: Units that keep what they gather, in the order in which a forward needs them, and their weights.
        together: Bytes of payloads that are sent as one; one that is larger goes by itself.
    """

    def __init__(self, members: Iterable[tuple[WeightGather, Source]], together: int = TOGETHER) -> None:
        self._together = together
        self._members = {id(gather): _Member(gather, source) for gather, source in members}
        self._stream: Any = None
        self._readers: set[Any] = set()
        for member in self._members.values():
            member.gather.first_hops = self

    def needed(self, gather: WeightGather, begin: Callable[[], FirstHop], device: torch.device) -> None:
        """Make the first hop of ``gather``, and those of the stale units that are to come. Collective.

        Args:
            gather: A member.
            begin: Begins its first hop.
            device: On which.
        """
        own = self._members[id(gather)]
        own.forget_unused()
        ahead = self._stale_others(own)
        for member in ahead:
            member.source.write_back()
        with self._beside_computation(device):
            waiting: list[FirstHop] = []
            for hop in _hops(begin, ahead):
                if waiting and (not _same_ranks(waiting[0], hop) or _nbytes([*waiting, hop]) > self._together):
                    _make_together(waiting)
                    waiting = []
                waiting.append(hop)
            _make_together(waiting)

    def _stale_others(self, own: _Member) -> list[_Member]:
        """The members whose first hops are to be made besides."""
        stale = [member for member in self._members.values() if member is not own and member.gather.stale]
        for member in stale:
            member.forget_unused()
        return [member for member in stale if member.ahead]

    def used(self, gather: WeightGather) -> None:
        """The secondary shard of ``gather`` is read in the current stream."""
        self._members[id(gather)].unused = False
        if self._stream is not None:
            self._readers.add(torch.cuda.current_stream(self._stream.device))

    def _beside_computation(self, device: torch.device) -> AbstractContextManager[Any]:
        """The stream of first hops, after what the current one and all readers were given so far."""
        if device.type != "cuda":
            return nullcontext()
        current = torch.cuda.current_stream(device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        for stream in {current, *self._readers}:
            self._stream.wait_stream(stream)
        return torch.cuda.stream(self._stream)


def _hops(begin: Callable[[], FirstHop], ahead: list[_Member]) -> Iterator[FirstHop]:
    yield begin()
    for member in ahead:
        hop = member.begin()
        if hop is not None:
            yield hop


def _nbytes(hops: list[FirstHop]) -> int:
    return sum(hop.payload.nbytes for hop in hops)


def _same_ranks(one: FirstHop, other: FirstHop) -> bool:
    return one.hop is not None and other.hop is not None and one.hop.group is other.hop.group


def _make_together(hops: list[FirstHop]) -> None:
    """Make hops over the same ranks, as one collective."""
    if len(hops) == 1:
        hops[0].make()
        return
    levels = [hop.hop for hop in hops if hop.hop is not None]
    label = f"{hops[0].label} to {hops[-1].label}"
    parts = all_gather_together(levels, [hop.payload for hop in hops], label)
    for hop, part in zip(hops, parts, strict=True):
        hop.complete(part)
