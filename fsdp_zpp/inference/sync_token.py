"""What a trainer knows of the weights that an inference engine holds, and what it sends it next.

The copy of what receivers hold is spread over ranks: of each tensor, a rank has a run of chunks (codecs/weight_changes.
py). It encodes the changes of those, from the gathered tensor, and an all-gather makes the update of the whole tensor.
The update does not depend on the number of ranks.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_zpp.codecs.blockwise import Int4
from fsdp_zpp.codecs.weight_changes import CHUNK, add_changes, changes_nbytes, encode_changes, largest_scale
from fsdp_zpp.collectives.agreement import check_agreement, from_first_rank, on_any_rank
from fsdp_zpp.collectives.devices import for_collectives
from fsdp_zpp.collectives.hops import all_gather_single
from fsdp_zpp.runtime.full_tensors import gets

from .weight_update import WeightUpdate, takes_changes

_CALL = "gathered_weights(since=...)"


@dataclass
class _Sent:
    """A tensor that receivers hold: its version there, its place in the pass, and this rank's run of its values."""

    version: int
    place: int
    dtype: torch.dtype
    shape: torch.Size
    values: slice
    base: Tensor


class SyncToken:
    """Notes what receivers hold, so that ``gathered_weights(model, since=token)`` sends changes only, in 4 bits.

    The first pass with a token sends all tensors whole, later ones what has changed since the last one. Every rank has
    a token of its own and passes it to each call. Receivers that get the same updates share a token; each token takes
    the bytes of the gathered weights, divided by the number of ranks, on each rank.

    A pass that is not iterated to its end is as good as lost, and the next one sends whole tensors again.

    Args:
        block: Number of changes that share a scale, a power of two from 32 to 4096.

    Raises:
        TypeError: If ``block`` is not an int.
        ValueError: If ``block`` is not a power of two in that range.
    """

    def __init__(self, *, block: int = 256) -> None:
        self._codec = Int4(block)
        self._stream = ""
        self._version = 0
        self._complete = False
        self._sent: dict[str, _Sent] = {}

    def __repr__(self) -> str:
        return f"SyncToken(block={self._codec.block}), version {self._version} of {self._stream or 'nothing sent'}"

    @property
    def version(self) -> int:
        """Return the number of the last pass, counted from the one that sent whole tensors; 0 before that."""
        return self._version

    @property
    def nbytes(self) -> int:
        """Return the bytes of this rank's part of the copy of what receivers hold."""
        return sum(sent.base.nbytes for sent in self._sent.values())

    def reset(self) -> None:
        """Have the next pass send whole tensors. One rank's call is enough.

        Call it when a receiver joins or raises :class:`OutOfSyncError`, and after the weights were replaced, by
        ``load_state_dict`` for example: 4 bits suit what a few steps change.
        """
        self._complete = False
        self._sent.clear()

    def updates(
        self, weights: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup | None
    ) -> Generator[tuple[str, WeightUpdate]]:
        """Yield what receivers need to hold ``weights``. Collective.

        Args:
            weights: Names and tensors, the same on all ranks.
            group: The ranks; None means this process alone.

        Yields:
            Names and updates, the same on all ranks, in the order of ``weights`` without what has not changed.

        Raises:
            ValueError: If ranks pass tokens with different settings, or of different passes.
        """
        self._begin(group)
        for place, (name, weight) in enumerate(weights):
            update = self._next(name, weight.detach(), place, group)
            del weight  # the receiver of its changes may take time, and has no use for it
            if update is not None:
                yield name, update
        self._complete = True

    def _begin(self, group: dist.ProcessGroup | None) -> None:
        anew = on_any_rank(not self._complete, group, _CALL)
        facts: dict[str, object] = {"block": self._codec.block}
        if not anew:
            facts |= {"version": self._version, "stream": self._stream}
        check_agreement(group, _CALL, facts)
        if anew:
            self._sent.clear()
            stream = secrets.token_hex(8)
            self._stream = stream if group is None else from_first_rank(stream, group)
            self._version = 0
        self._version += 1
        self._complete = False

    def _next(self, name: str, weight: Tensor, place: int, group: dist.ProcessGroup | None) -> WeightUpdate | None:
        sent = self._sent.get(name)
        if sent is None or sent.dtype != weight.dtype or sent.shape != weight.shape:
            return self._whole(name, weight, place, group)
        flat = weight.reshape(-1)
        if not takes_changes(weight.dtype, weight.numel(), self._codec):
            changed = not torch.equal(flat[sent.values].view(torch.uint8), sent.base.view(torch.uint8))
            return self._whole(name, weight, place, group) if on_any_rank(changed, group, _CALL) else None
        own = encode_changes(flat[sent.values], sent.base, self._codec)
        payload = _of_all_ranks(own, len(flat), sent.place, self._codec, group)
        largest = largest_scale(payload, len(flat), self._codec)
        if largest == 0:
            return None
        if not largest < float("inf"):  # a change from or to Inf or NaN, which 4 bits can't hold
            return self._whole(name, weight, place, group)
        add_changes(sent.base, own, self._codec)
        since, sent.version = sent.version, self._version
        shape = tuple(weight.shape)
        block = self._codec.block
        return WeightUpdate(name, "delta", weight.dtype, shape, self._stream, self._version, since, block, payload)

    def _whole(self, name: str, weight: Tensor, place: int, group: dist.ProcessGroup | None) -> WeightUpdate:
        values = _run_of(weight.numel(), place, group)
        base = weight.reshape(-1)[values].clone()
        self._sent[name] = _Sent(self._version, place, weight.dtype, weight.shape, values, base)
        return WeightUpdate(
            name, "whole", weight.dtype, tuple(weight.shape), self._stream, self._version, 0, 0, weight.contiguous()
        )


def check_token(since: object) -> None:
    """Raise a TypeError unless ``since`` is a token or None."""
    if not (since is None or isinstance(since, SyncToken)):
        raise TypeError(f"since must be a SyncToken, which notes what receivers hold, or None, got {since!r}")


def updates_since(
    token: SyncToken, weights: Iterator[tuple[str, Tensor | None]], group: dist.ProcessGroup | None, rank: int | None
) -> Iterator[tuple[str, WeightUpdate | None]]:
    """Yield what :meth:`SyncToken.updates` does; on ranks other than ``rank``, if it is given, None for the updates."""
    with closing(token.updates(cast(Iterator[tuple[str, Tensor]], weights), group)) as updates:
        for name, update in updates:
            yield name, update if gets(rank) else None


def _first_rank(place: int, world: int) -> int:
    """Return the rank that has the first run of the tensor at ``place`` of a pass.

    Small tensors are one run alone, so ranks take turns.
    """
    return place % world


def _chunks_of_a_run(numel: int, world: int) -> int:
    chunks = -(-numel // CHUNK)
    return -(-chunks // world)


def _run_of(numel: int, place: int, group: dist.ProcessGroup | None) -> slice:
    """Return which values of a tensor this rank has."""
    if group is None:
        return slice(0, numel)
    world = dist.get_world_size(group)
    run = (dist.get_rank(group) - _first_rank(place, world)) % world
    length = _chunks_of_a_run(numel, world) * CHUNK
    return slice(min(run * length, numel), min((run + 1) * length, numel))


def _of_all_ranks(own: Tensor, numel: int, place: int, codec: Int4, group: dist.ProcessGroup | None) -> Tensor:
    """Return the changes of a tensor of ``numel`` values in the order of its chunks, given this rank's run of them."""
    if group is None:
        return own
    world, nbytes = dist.get_world_size(group), changes_nbytes(numel, codec)
    longest = min(_chunks_of_a_run(numel, world) * codec.nbytes(CHUNK), nbytes)
    padded = own if len(own) == longest else torch.cat([own, own.new_zeros(longest - len(own))])
    padded = for_collectives(padded, group)
    gathered = padded.new_empty(world * longest)
    all_gather_single()(gathered, padded, group=group)
    in_order = gathered.view(world, longest).roll(-_first_rank(place, world), 0).view(-1)
    return in_order if len(in_order) == nbytes else in_order[:nbytes].clone()
