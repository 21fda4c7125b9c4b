"""Two-hop gather of weights: the secondary shard, prefetching, and shards from checkpoints."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, NoReturn, Protocol, TypedDict

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_zpp.codecs import Codec, Delta, ExactTail, exact_tail, full_precision, tails_of

from .agreement import fingerprint, plain_parts
from .flat_layout import ExactPlaces, Extent, FlatLayout, boundaries_of, exact_places
from .hops import (
    Hop,
    SideStream,
    Traffic,
    decode,
    hop_over,
    keep_until_read,
    label_of,
    labelled,
    record_event,
    wait_for,
)
from .mesh import ProcessMesh

# ---- shard version
#
# torch counts writes to the parameters and to the shards themselves. It does not count those through ``p.data``, those
# of fused optimizers, those of some ``torch._foreach_*`` on GPUs, and those of most ``torch._foreach_*`` to DTensors on
# CPUs. With FSDP_ZPP_CHECK=1 a version is a fingerprint of the shards' values instead, so it differs after any
# write.

_version_of = attrgetter("_version")

CHECK = "FSDP_ZPP_CHECK"
"""With this environment variable, reused weights are compared with the shards; see the docs of secondary shards."""


class ShardVersion:
    """Versions of a unit's shards: two are equal if nothing was written, moved or replaced in between."""

    # A new tensor counts writes from zero, and an allocator may give it the address of a freed one, so count and
    # address could both match by chance. A weak reference reserves a storage's address, but not its memory.
    def __init__(self) -> None:
        self.of_contents = os.environ.get(CHECK, "") not in ("", "0")
        self._storages: list[int] = []
        self._references: list[StorageWeakRef] = []
        self._moves = 0

    def of(self, memory: Sequence[Tensor], counted: Sequence[Tensor]) -> Hashable:
        """Return the version of ``memory``, the tensors to gather; writes to them raise ``_version`` in ``counted``."""
        if self.of_contents:
            # The values of DTensors are in ``memory`` already; those of other subclasses are not.
            others = (each for each in counted if not isinstance(each, DTensor) and hasattr(each, "__tensor_flatten__"))
            return tuple(fingerprint(part) for each in (*memory, *others) for part in plain_parts(each))
        storages = [tensor.untyped_storage()._cdata for tensor in memory]
        if storages != self._storages:
            self._storages, self._moves = storages, self._moves + 1
            self._references = [StorageWeakRef(tensor.untyped_storage()) for tensor in memory]
        return self._moves, *map(_version_of, counted)


# ---- checkpointed shard
#
# [Note: Weights of a checkpoint]
# If the inter-node hop sends deltas, a checkpoint has the secondary shard, which is valid only for the weights saved
# with it. The weights may be loaded before the shard or after it, and other weights may be loaded or written later, so
# the order of events does not tell whether the two belong together. A fingerprint of this rank's weights is therefore
# saved with the shard: at the first gather, the ranks that gather from each other exchange whether their fingerprints
# match. If all match, they continue from the saved shard; otherwise the weights are sent whole.


class CheckpointedShard(TypedDict):
    """This rank's row of a secondary shard, on the CPU, and a fingerprint of the weights that were saved with it.

    A fresh row encodes these weights; a row that is not fresh is the base of their next delta. The row is None if there
    was nothing to save. A shard without a fingerprint matches no weights.
    """

    row: Tensor | None
    fresh: bool
    fingerprint: str | None


# ---- secondary shard
#
# Secondary shard of a unit's weights: what the inter-node hop leaves on a rank.
#
# Weights are encoded once, from the full-precision shard, and the inter-node hop gathers them among ranks of the same
# local index; its result on a rank, uint8 [nodes, nbytes], is the *secondary shard*, which the intra-node hop gathers.
# A secondary shard that is kept, still encoded, is ZeRO++'s hpZ: later gathers start at the intra-node hop. All ranks,
# the owner too, decode the same bytes, so they compute with the same weights bit for bit.
#
#     empty --hold()--> fresh, at a version of the weights --mark_stale()--> stale, perhaps with a base for a delta
#                         ^                                                    |
#                         +-------------------------- hold() ------------------+
#
# ``gather_inter_node`` makes the payloads for hold(), for several units at once.
#
# [Note: Staleness]
# A kept secondary shard is stale once the weights have changed. Ranks that disagree on staleness would enter different
# collectives and hang, so only events that all ranks share make a shard stale (``mark_stale``). A look at the shard
# never does: a rank whose shard is all padding sees no write. The shard's ``version`` is only a check: if it differs
# from the version that was encoded, something wrote to the weights without an event, and the gather raises rather than
# compute with old weights. That error is local: ranks that saw no write wait for this rank until their process group's
# timeout. The gather can't ask other ranks about such a write: they may use different units between changes, and the
# host would have to wait for their answer. Under FSDP_ZPP_CHECK the host does wait, before each forward of a model,
# where all ranks meet; see runtime/lifecycle.py.

logger = logging.getLogger("fsdp_zpp")


class StaleSecondaryError(RuntimeError):
    """Raised if weights were written to without an event."""


class ShardValues(NamedTuple):
    """Full-precision values of a unit's shard on this rank, flat, on the device that gathers.

    Attributes:
        numel: The number of values in all ``tensors``.
        version: Their version, from :meth:`ShardSource.shard_version`.
        is_trained: True if optimizer steps change them.
    """

    tensors: Sequence[Tensor]
    numel: int
    version: Hashable
    is_trained: bool


class ShardSource(Protocol):
    """An adapter's record of a unit; prefetching reads weights from it before FSDP asks for their gather."""

    def can_be_read(self) -> bool:
        """Return whether the weights can be read now, and will not change before their gather."""

    def prepare_read(self) -> int:
        """Copy the values of replaced parameters into the shard, in the stream that gathers; return its numel."""

    def read(self) -> ShardValues: ...

    def shard_version(self) -> Hashable:
        """Return a value that changes when the shard moves, and with each write that torch counts."""

    def compares_contents(self) -> bool:
        """Return whether versions of the shard are fingerprints, which differ after any write."""

    def keeps_gathered(self) -> bool:
        """Return whether a gather has left unsharded weights that the next gather would reuse."""

    def is_trained(self) -> bool: ...

    def layout(self, numel: int) -> FlatLayout:
        """Return the layout of a gathered tensor of ``numel`` values."""


class SecondaryShard:
    """Secondary shard of one unit on this rank. See the top of this section.

    Attributes:
        hop: The inter-node hop; None on one node, where there is only this rank's payload.
        codec: Encodes the weights; None if the dtype of each gather's output decides.
        base: The older secondary shard that the next delta refers to, if there is one.
        checkpointed: The shard from a checkpoint, until the first gather has compared it with the weights.
        source: The source of the weights; None if they can't be read.
        side_stream: The stream that makes the shard; None if the reader's stream makes it.
        nbytes: Bytes of a payload without deltas; 0 until the first :meth:`sent_as`.
        next_codec: The codec of the next gather, as :meth:`sent_as` takes it; None if that is not known yet.
        encoded_by: The codec of the payload; None without a payload.
        sends_deltas: Whether the inter-node hop may send deltas.
    """

    def __init__(self, hop: Hop | None, own_node: int, codec: Codec | None, keep: bool, label: str) -> None:
        self.hop, self.codec, self.label = hop, codec, label
        self.group = None if hop is None else hop.group
        # On one node there is no inter-node hop that a kept secondary shard would save.
        self.keep = keep and hop is not None
        self.sends_deltas = isinstance(codec, Delta) and self.keep
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
        return 0 if self.hop is None else self.hop.size - 1

    # ---- from stale to fresh

    def sent_as(self, codec: Codec, numel: int, device: torch.device) -> Codec:
        """Return ``codec``, with a tail if some of this rank's ``numel`` values (small parameters) are sent exactly.

        Returns the same instance until an argument changes; sets ``exact`` and ``nbytes``.
        """
        if self._sent_as is None or self._sent_for != (codec, numel, device):
            self._sent_for = codec, numel, device
            self.exact = None if codec.is_lossless else self.find_exact(numel, device)
            self._sent_as = codec if self.exact is None else exact_tail(codec, self.exact.tail)
            self.nbytes = self._sent_as.nbytes(numel)
        return self._sent_as

    def take_base(self) -> Tensor:
        """Drop the base, which must exist, and return it for its last use."""
        base, self.base = self.base, None
        assert base is not None
        if base.is_cuda:
            keep_until_read(base)  # it was made in the stream of an earlier gather
        return base

    def keep_base_apart(self) -> None:
        """Move the base, if there is one, to its own memory, since it outlives the bases that share its buffer."""
        if self.base is not None and self.base.untyped_storage().nbytes() > self.base.nbytes:
            self.base = self.take_base().clone()

    def gather_checkpoint(self, stale: StaleShard) -> bool:
        """Continue from the checkpoint's shard if it matches on all ranks; return whether it is fresh. Collective."""
        saved, self.checkpointed = self.checkpointed, None
        if saved is None or saved["row"] is None or self.hop is None or not self.sends_deltas:
            return False
        _, codec, (tensors, _, version, _) = stale
        values = _joined(tensors)
        is_one_row = saved["row"].shape == (1, codec.nbytes(values.numel()))
        matches = torch.tensor([[is_one_row and saved["fingerprint"] == fingerprint(values)]], dtype=torch.uint8)
        rows = self.hop.all_gather(torch.cat((saved["row"], matches), dim=1).to(values.device), self.label)
        base = rows[:, :-1].contiguous() if rows[:, -1].all() else None
        if base is not None and saved["fresh"]:
            self.hold(base, codec, version, record_event(base))
            return True
        self.base = base
        return False

    def hold(self, payload: Tensor, codec: Codec, version: Hashable, ready: torch.cuda.Event | None) -> None:
        """Hold a payload, uint8 [nodes, nbytes], and become fresh; ``ready`` is None on a CPU."""
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
        """Raise a StaleSecondaryError if the weights changed without an event. See [Note: Staleness]."""
        if not self.stale and self._version != version:
            self.raise_written()

    def raise_written(self) -> NoReturn:
        raise StaleSecondaryError(
            f"the weights of {self.label} were changed outside of an optimizer step, load_state_dict or "
            "summon_full_params(writeback=True), or in a forward that was already sending them, so the copies on "
            "other ranks are out of date; after such a change, call fsdp_zpp.invalidate(model) on every rank"
        )

    @property
    def is_outdated(self) -> bool:
        """Return whether the next gather would reuse weights that were written to on this rank without an event."""
        source = self.source
        if self.stale or source is None or not (self.encoded_by is not None or source.keeps_gathered()):
            return False
        if source.can_be_read():
            source.prepare_read()  # writes back tensors with which users have replaced parameters
        return self._version != source.shard_version()

    def rebase_version(self, before: Hashable, after: Hashable) -> None:
        """Declare that the values did not change between the versions ``before`` and ``after``."""
        if not self.stale and self._version == before:
            self._version = after

    def mark_stale(self, *, by_step: bool = False) -> None:
        """Declare that the weights have changed, on every rank; after a step, the next gather may send a delta."""
        if not by_step or not self.sends_deltas:
            self.base = None
        elif self._payload is not None:  # else nothing was sent since the last change: receivers hold the same base
            self.base = self._payload
        self._payload, self.encoded_by, self.stale = None, None, True
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s: secondary shard stale", self.label)

    # ---- in checkpoints

    def reset(self) -> None:
        self.checkpointed = None
        self.mark_stale()

    def state_dict(self) -> CheckpointedShard:
        """Return this rank's row of the secondary shard or base, and a fingerprint of the weights, on the CPU."""
        saved = self.checkpointed
        if saved is not None:
            return {**saved, "row": None if saved["row"] is None else saved["row"].clone()}
        held = self._payload if self._payload is not None else self.base
        if held is None:
            return {"row": None, "fresh": False, "fingerprint": None}
        if self._ready is not None:
            self._ready.synchronize()
        # Read the weights only here: before the first forward, they can't be read, and a return above is taken.
        readable = self.source is not None and self.source.can_be_read()
        weights = torch.cat(list(self.source.read().tensors)) if readable and self.source is not None else None
        row = held[self.own_node : self.own_node + 1].cpu().clone()
        return {
            "row": row,
            "fresh": self._payload is not None,
            "fingerprint": None if weights is None else fingerprint(weights),
        }

    def load_state_dict(self, state: CheckpointedShard) -> None:
        self.reset()
        if (row := state["row"]) is not None:
            self.checkpointed = {"row": row.cpu(), "fresh": state["fresh"], "fingerprint": state.get("fingerprint")}


# ---- inter node gather
#
# Inter-node hop of weights, for several units at once.
#
#     shards of k units of one size   what the optimizer holds, full precision
#         | concatenate, encode       one launch for all of them; with deltas, the change against their bases
#     payload                         uint8 [k, nbytes]
#         | all-gather                among the ranks with this local index
#     gathered                        uint8 [nodes, k, nbytes]
#         | transpose, apply deltas
#     secondary shards                uint8 [k, nodes, nbytes]: a contiguous part of one buffer for each unit
#
# Units of different sizes are encoded apart, and so are units with a base and units without. All share the collective.

_UNLABELLED = nullcontext()


class StaleShard(NamedTuple):
    """A stale secondary shard, and the codec and the values that make it fresh."""

    shard: SecondaryShard
    codec: Codec
    values: ShardValues


@torch.no_grad()
def gather_inter_node(stale: Sequence[StaleShard]) -> None:
    """Make secondary shards fresh in the current stream; their hops must be over the same ranks. Collective."""
    # One collective sends all of them; each shard from a checkpoint first takes a collective of its own.
    first, last = stale[0].shard, stale[-1].shard
    label = first.label if first is last else f"{first.label} to {last.label}"
    # labelled() makes the same check; made here, it saves a call on a hot path while no profiler runs.
    with labelled("refresh", label) if getattr(profiler, "_is_profiler_enabled", True) else _UNLABELLED:
        sent = [each for each in stale if each.shard.checkpointed is None or not each.shard.gather_checkpoint(each)]
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
    values = stale.values
    # Secondary shards of a run share a buffer, which lives until all are replaced. Frozen units never replace theirs,
    # so they have their own runs.
    exact = None if stale.shard.exact is None else stale.shard.exact.key
    return stale.codec, values.numel, stale.shard.base is not None, values.tensors[0].dtype, values.is_trained, exact


class Run:
    """Neighbouring shards encoded as one: all have the same size and codec, and all or none have a base for a delta."""

    def __init__(self, stale: list[StaleShard]) -> None:
        self.stale = stale
        codec = self._codec = stale[0].codec
        self._rows = len(stale)
        # This is without_tail(), inlined to save a call in each gather.
        self._coded, self._tail = (codec.codec, codec.tail) if isinstance(codec, ExactTail) else (codec, 0)
        bases = [shard.take_base() for shard, _, _ in stale if shard.base is not None]
        self._base = _adjacent(bases) if bases else None

    def encode(self) -> Tensor:
        values = _joined([piece for each in self.stale for piece in each.values.tensors])
        exact = self.stale[0].shard.exact
        if exact is None or not self._tail:
            return self._encode(values)
        if values.data_ptr() == self.stale[0].values.tensors[0].data_ptr():
            values = values.clone()  # do not write to the optimizer's shard itself
        # Small values travel in tails; see [Note: Small parameters] in flat_layout.py.
        parts = values.view(self._rows, -1)
        if exact.strides is None:
            taken = parts[:, exact.flat]
            parts.index_fill_(1, exact.flat, 0)
        else:  # the shard is one chunk
            small = parts.narrow(1, exact.start, exact.tail)
            taken = small.clone()
            small.zero_()
        payload = self._encode(values)
        payload.view(torch.float32)[:, -self._tail :].copy_(taken)
        return payload

    def _encode(self, values: Tensor) -> Tensor:
        if self._base is None or not isinstance(self._coded, Delta):
            return self._codec.encode(values, 1, self._rows)
        own = self._base.unflatten(0, (self._rows, -1))[:, self.stale[0].shard.own_node]
        return self._coded.encode_delta(own.contiguous(), values, self._tail)

    def receive(self, gathered: Tensor) -> Tensor:
        """Make secondary shards, uint8 [rows * nodes, nbytes], from all nodes' payloads [nodes, rows, nbytes]."""
        by_shard = gathered.transpose(0, 1).flatten(0, 1).contiguous()  # copies if several runs share the rows
        if self._base is None or not isinstance(self._coded, Delta):
            return by_shard
        changed = self._coded.apply_delta(self._base, by_shard, self.stale[0].values.numel, self._tail)
        if self._tail:
            tails_of(changed, self._tail).copy_(tails_of(by_shard, self._tail))  # small values are sent whole
        return changed


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _adjacent(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of all parts, without a copy if they lie one after the other already."""
    first = parts[0]
    memory, start = first.untyped_storage().data_ptr(), first.storage_offset()
    for number, part in enumerate(parts):
        beside = part.storage_offset() == start + number * first.numel() and part.shape == first.shape
        if not beside or part.untyped_storage().data_ptr() != memory:
            return torch.cat(list(parts))
    return first.as_strided((len(parts) * first.shape[0], first.shape[1]), first.stride())


# ---- prefetch
#
# Prefetching: the secondary shards of all units of a model are made in a row, as soon as the first is needed.
#
# A forward after a step asks for one unit after the other, but the slow network need not wait for that: secondary
# shards are kept anyway, so all of them can be sent when the first is needed. They are made in a stream of their own,
# concurrent with intra-node hops and computation of earlier units; the computation waits for a secondary shard only
# when it reaches its unit.
#
# Prefetching starts with the first gather after a change, not with the change: shards must include what is written
# between a step and the forward (averages, clipped weights), and two optimizers that step in turn must not send weights
# twice. Starting at the change would gain nothing on a GPU, since the host already runs ahead of it.
#
# All ranks prefetch the same units, since gathers and changes come in the same order on all of them. A unit whose
# secondary shard was prefetched and not read before its weights changed again is not prefetched any more.
#
# [Note: Chunks]
# To encode and send a unit by itself takes Python tens of microseconds and the network at least its latency. But a unit
# can be used only when all that was sent with it has arrived. So a forward's weights are sent in a few chunks; while
# units of one chunk compute, the next chunk is sent. The larger a chunk, the longer its first unit waits for the
# others, so a chunk of several units has a limit. It grows from the front, where nothing can compute meanwhile, and
# shrinks at the end, where nothing is sent meanwhile. ``gather_inter_node`` encodes and sends the units of a chunk.

CHUNKS = 4
"""Roughly how many chunks a forward's weights are sent in; all but the first can hide behind computation."""

LEAST_NBYTES = 2**20
"""A rank sends a MiB in about the time of the network's latency, so smaller chunks would gain nothing."""

LARGE_CHUNKS = 12
"""A chunk that grows beyond a quarter of :data:`MOST_NBYTES` is at most a twelfth of the weights, since its first unit
waits for all of it: if units are computed as fast as they are sent, a forward takes up to a twelfth longer."""

MOST_NBYTES = 2**26
"""The most bytes that a rank sends for a chunk of several units, to all other nodes together, and four times the most
for the first: 64 MiB take 21 ms at 25 Gb/s a GPU, and 1.3 ms at 400. Each other node gets the whole payload. While
being encoded, its values take 4 to 8 times that."""


class SecondaryShardPrefetcher:
    def __init__(self, shards: Iterable[SecondaryShard], least_nbytes: int = LEAST_NBYTES) -> None:
        self._shards = list(shards)
        self._least_nbytes = least_nbytes
        self._stream = SideStream()
        self._excluded: set[int] = set()  # the ids of shards that are not prefetched any more
        for shard in self._shards:
            shard.side_stream = self._stream

    def refresh(self, needed: SecondaryShard, codec: Codec, values: ShardValues) -> None:
        """Make ``needed`` fresh, and the stale shards that the forward needs later. Collective."""
        stale = [shard for shard in self._shards if shard.stale and shard is not needed]
        self._excluded.update(id(shard) for shard in (needed, *stale) if shard.unread)
        ahead = [
            # prepare_read() runs in the current stream: tensors that have replaced parameters are computed there.
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
                # Read a shard only with its chunk, since reading copies offloaded shards to the device.
                read = {shard: values if shard is needed else sources[shard].read() for shard in chunk}
                gather_inter_node([StaleShard(shard, codecs[shard], read[shard]) for shard in chunk])


def in_chunks(
    sent: Sequence[tuple[SecondaryShard, int]], least_nbytes: int = LEAST_NBYTES, most_nbytes: int = MOST_NBYTES
) -> list[list[SecondaryShard]]:
    """Group shards, each with the bytes that a rank sends for it, into chunks. See [Note: Chunks]."""
    total = left = sum(size for _, size in sent)
    limit = least = min(most_nbytes // 4, max(least_nbytes, -(-total // CHUNKS)))
    chunks: list[list[SecondaryShard]] = []
    nbytes = before = 0
    for shard, size in sent:
        if not chunks or nbytes + size > limit or shard.group is not chunks[-1][0].group:
            # At most as much as was sent before, and half of the rest.
            limit = max(least, min(most_nbytes, total // LARGE_CHUNKS, before, left // 2))
            chunks.append([])
            nbytes = 0
        chunks[-1].append(shard)
        nbytes, before, left = nbytes + size, before + size, left - size
    return chunks


# ---- weight gather
#
#     optimizer's shard       full precision, 1 / world of the unit, on this rank
#         | encode            once; with deltas, after a step, the change against what the receivers hold
#     payload                 uint8 [1, nbytes]
#         | inter-node hop    all-gather among the ranks with this local index
#     secondary shard         uint8 [nodes, nbytes]; parameter scope I keeps it until the weights change
#         | intra-node hop    all-gather among the ranks of this node
#     gathered payload        uint8 [world, nbytes], by local index, then node
#         | decode            one kernel, which restores the order of ranks
#     unsharded parameters    in the dtype to compute in; scope N keeps them until the weights change
#
# ``gather_inter_node`` goes down to the secondary shard, and ``SecondaryShardPrefetcher`` calls it for all units of a
# model ahead of their use.


class _Settled(NamedTuple):
    """The codecs and exact places for all gathers with outputs of the same shape, dtype and device."""

    of: tuple[torch.Size, torch.dtype, torch.device]
    codec: Codec
    sent_as: Codec
    exact: ExactPlaces | None


class WeightGather:
    """All-gathers one flat shard over a mesh in two hops.

    Args:
        codec: Encodes the weights for both hops; None sends them in the dtype of the output.
        keep_secondary: True to keep the secondary shard from one call to the next, until it is marked stale.
        label: The unit's name in profiles and errors.
    """

    def __init__(
        self, mesh: ProcessMesh, codec: Codec | None, keep_secondary: bool, traffic: Traffic, label: str = "unit"
    ) -> None:
        inter = hop_over(mesh.inter, "gather", "inter", traffic)
        self._intra = hop_over(mesh.intra, "gather", "intra", traffic)
        self.group = mesh.group
        own_node = mesh.rank // mesh.topology.gpus_per_node
        self.secondary = SecondaryShard(inter, own_node, codec, keep_secondary, label)
        self.prefetcher: SecondaryShardPrefetcher | None = None
        topology = mesh.topology
        self._world, self._nodes, self._gpus = topology.world, topology.nodes, topology.gpus_per_node
        self._rank = mesh.rank
        self.secondary.find_exact = partial(self._exact, of_all=False)
        self._settled: _Settled | None = None

    label = label_of("secondary")

    def __call__(self, shard: Tensor | None, out: Tensor, version: Hashable = None) -> None:
        """Gather every rank's ``shard`` into ``out``.

        Args:
            shard: This rank's full-precision values, flat [numel], the same numel on every rank; None reads them from
                the secondary shard's source, if they are needed.
            out: Flat [world * numel], in any float dtype; chunk i receives rank i's shard.
            version: Identifies the state of the shard; compared while the secondary shard is reused.

        Raises:
            ValueError: If the sizes do not fit, before any communication.
            StaleSecondaryError: If the secondary shard is reused but ``version`` has changed.
        """
        if shard is not None:
            self._check_sizes(shard, out)
        settled = self._settled
        if settled is None or settled.of != (out.shape, out.dtype, out.device):
            settled = self._settle(out)
        secondary, values = self.secondary, None
        if secondary.encoded_by is settled.sent_as:
            secondary.check_version(version)
        else:
            source = secondary.source
            if shard is not None:
                values = ShardValues([shard], shard.numel(), version, source is None or source.is_trained())
            else:
                assert source is not None
                values = source.read()
            if self.prefetcher is None:
                gather_inter_node([StaleShard(secondary, settled.sent_as, values)])
            else:
                self.prefetcher.refresh(secondary, settled.sent_as, values)
        payload = secondary.read()
        # A side stream may have read ``values``, which were allocated in this stream. They can be freed without
        # record_stream, since read() has made this stream wait for the encoding.
        del values
        if self._intra is not None:
            payload = self._intra.all_gather(payload, secondary.label)
        # Rows come by local index, then node; decoding transposes that grid to the order of ranks.
        decode(settled.codec, payload, out, self._gpus, self._nodes, secondary.label, settled.exact)

    def _settle(self, out: Tensor) -> _Settled:
        numel, device = out.numel() // self._world, out.device
        codec = self.secondary.codec or full_precision(out.dtype)
        exact = None if codec.is_lossless else self._exact(numel, device, of_all=True)
        sent_as = self.secondary.sent_as(codec, numel, device)
        self._settled = _Settled((out.shape, out.dtype, device), codec, sent_as, exact)
        return self._settled

    def _exact(self, numel: int, device: torch.device, *, of_all: bool) -> ExactPlaces | None:
        """Return the places of small values in the output (``of_all``) or in this rank's shard of ``numel`` values."""
        source = self.secondary.source
        layout = None if source is None else source.layout(numel * self._world)
        if layout is None or not (layout.exact or layout.boundaries):
            return None
        nodes, gpus = range(self._nodes), range(self._gpus)
        starts = tuple([(node * self._gpus + local) * numel for local in gpus for node in nodes])
        own = starts if of_all else (self._rank * numel,)
        at = starts if of_all else None
        boundaries = boundaries_of(layout, [self.secondary.codec]) if layout.boundaries else []
        return exact_places(Extent(numel, own, layout), boundaries, starts, device, at)

    def _check_sizes(self, shard: Tensor, out: Tensor) -> None:
        if out.numel() != self._world * shard.numel():
            raise ValueError(
                f"{self.label}: a gather of {shard.numel()} values over {self._world} ranks needs an output "
                f"of {self._world * shard.numel()} values, got {out.numel()}"
            )
