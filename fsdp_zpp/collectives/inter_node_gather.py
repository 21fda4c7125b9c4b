"""Inter-node hop of weights, for several units at once.

    shards of k units of one size   what the optimizer holds, full precision
        | concatenate, encode       one launch for all of them; with Int4Delta, the change against their bases
    payload                         uint8 [k, nbytes]
        | all-gather                among the ranks with this local index
    gathered                        uint8 [nodes, k, nbytes]
        | transpose, apply deltas
    secondary shards                uint8 [k, nodes, nbytes]: a contiguous part of one buffer for each unit

Units of another size, or of which only some have a base for a delta, are encoded apart and share the collective.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import profiler

from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.codecs.exact_tail import ExactTail, sends_deltas

from .hops import labelled
from .secondary_shard import SecondaryShard, ShardValues
from .streams import record_event

logger = logging.getLogger("fsdp_zpp")

_UNLABELLED = nullcontext()


class StaleShard(NamedTuple):
    """A secondary shard that is to be made fresh, and the values to make it from.

    Attributes:
        shard: The secondary shard.
        codec: Encodes the values.
        values: The values that it is made from.
    """

    shard: SecondaryShard
    codec: Codec
    values: ShardValues


@torch.no_grad()
def gather_inter_node(stale: Sequence[StaleShard]) -> None:
    """Make secondary shards fresh whose hops are over the same ranks, in the current stream, in one collective.

    Collective. Each shard that was loaded from a checkpoint takes another collective.
    """
    first, last = stale[0].shard, stale[-1].shard
    label = first.label if first is last else f"{first.label} to {last.label}"
    # Asked here, too, as labelled() asks: a hot path need not go there to learn that no profiler runs.
    with labelled("refresh", label) if getattr(profiler, "_is_profiler_enabled", True) else _UNLABELLED:
        sent = []
        for each in stale:
            shard, codec, values = each
            if shard.checkpointed is None or not shard.gather_checkpoint(
                _joined(values.tensors), codec, values.version
            ):
                sent.append(each)
        if sent:
            _send(sent, label)


def _send(sent: Sequence[StaleShard], label: str) -> None:
    runs = list(map(Run, [list(neighbours) for _, neighbours in groupby(sent, _kind)]))
    payloads = [run.encode() for run in runs]
    flat = [payload.view(-1) for payload in payloads]
    gathered, hop = _joined(flat).unsqueeze(0), sent[0].shard.hop
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s: inter-node gather launched", label)
    if hop is not None:
        for run, payload in zip(runs, payloads, strict=True):
            for shard, _, _ in run.stale:
                if shard.hop is not None:
                    shard.hop.count_gather(payload.shape[1])
        gathered = hop.all_gather_uncounted(gathered, label)
    parts = gathered.split([part.numel() for part in flat], dim=1)
    received = [
        run.receive(part.unflatten(1, payload.shape)) for run, part, payload in zip(runs, parts, payloads, strict=True)
    ]
    ready = record_event(received[-1])
    for run, rows in zip(runs, received, strict=True):
        for (shard, codec, values), part in zip(run.stale, rows.unflatten(0, (len(run.stale), -1)), strict=True):
            shard.hold(part, codec, values.version, ready)


def _kind(stale: StaleShard) -> Hashable:
    """Return a key, equal for shards that can be encoded as one."""
    values = stale.values
    # A buffer is freed when the last of its units has another one, which a frozen unit never has.
    exact = None if stale.shard.exact is None else stale.shard.exact.key
    return stale.codec, values.numel, stale.shard.base is not None, values.tensors[0].dtype, values.is_trained, exact


class Run:
    """Neighbours that are encoded as one: of one size, by one codec, all of them with a base for a delta or none.

    Args:
        stale: The neighbours.
    """

    def __init__(self, stale: list[StaleShard]) -> None:
        self.stale = stale
        self._codec, self._rows = stale[0].codec, len(stale)
        bases = [shard.take_base() for shard, _, _ in stale if shard.base is not None]
        self._base = _adjacent(bases) if bases else None

    def encode(self) -> Tensor:
        """Encode all of them: uint8 [rows, nbytes], a row for each."""
        values = _joined([piece for each in self.stale for piece in each.values.tensors])
        exact, codec = self.stale[0].shard.exact, self._codec
        if exact is None or not isinstance(codec, ExactTail):
            return self._encode(values)
        if values.data_ptr() == self.stale[0].values.tensors[0].data_ptr():
            values = values.clone()  # the optimizer's shard itself is not to be written to
        # Small values travel in tails; see [Note: Small parameters] in exact_places.py.
        parts = values.view(self._rows, -1)
        taken = parts[:, exact.flat]
        parts.index_fill_(1, exact.flat, 0)
        payload = self._encode(values)
        payload.view(torch.float32)[:, -codec.tail :].copy_(taken)
        return payload

    def _encode(self, values: Tensor) -> Tensor:
        codec = self._codec
        if self._base is None or not sends_deltas(codec):
            return codec.encode(values, 1, self._rows)
        own = self._base.unflatten(0, (self._rows, -1))[:, self.stale[0].shard.own_node]
        return codec.encode_delta(own.contiguous(), values)

    def receive(self, gathered: Tensor) -> Tensor:
        """Make secondary shards, uint8 [rows * nodes, nbytes], from all nodes' payloads [nodes, rows, nbytes]."""
        by_shard = gathered.transpose(0, 1).flatten(0, 1).contiguous()  # a part of longer rows is not
        codec = self._codec
        if self._base is None or not sends_deltas(codec):
            return by_shard
        changed = codec.apply_delta(self._base, by_shard, self.stale[0].values.numel)
        if isinstance(codec, ExactTail):
            codec.tails(changed).copy_(codec.changes.tails(by_shard))  # small values are no deltas
        return changed


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _adjacent(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of all parts; without a copy if they lie one after the other, as a run leaves them."""
    first = parts[0]
    memory, start = first.untyped_storage().data_ptr(), first.storage_offset()
    for number, part in enumerate(parts):
        beside = part.storage_offset() == start + number * first.numel() and part.shape == first.shape
        if not beside or part.untyped_storage().data_ptr() != memory:
            return torch.cat(list(parts))
    return first.as_strided((len(parts) * first.shape[0], first.shape[1]), first.stride())
