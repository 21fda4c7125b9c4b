"""One hop of a collective, with its codec, byte count and profiler label; streams, and coalesced all-gathers."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.profiler import record_function

from fsdp_zpp.codecs import Codec, exact_tail

from .error_feedback import ErrorBuffer, decode_sum_encode_with_feedback, encode_with_feedback
from .flat_layout import ExactPlaces

# ---- kinds

Kind = Literal["gather", "reduce"]
Level = Literal["inter", "intra"]


# ---- streams
#
# Side streams, and memory that passes from one stream to another.
#
# Once nothing refers to memory, torch's allocator reuses it in the stream that allocated it. Work in that stream
# is ordered, but a kernel of another stream may still read the memory. So either the reader's stream is recorded with
# the tensor before the last reference goes (:func:`keep_until_read`), or the stream that will write to the memory waits
# for the reader's (:meth:`SideStream.after_current`). Neither makes the host wait.
# torch finds a stream faster by a device's index than by a ``torch.device``.


class SideStream:
    """A stream for communication, made at its first use. A CPU has none."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._readers: set[torch.cuda.Stream] = set()  # stays small: torch reuses a device's few streams in turn

    def after_current(self, device: torch.device) -> AbstractContextManager[object]:
        """Make the side stream wait for the current stream and the readers of its tensors; return it as a context."""
        if device.type != "cuda":
            return _NOTHING
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        # The next tensors made here may reuse memory that the readers still read.
        for other in {torch.cuda.current_stream(device.index), *self._readers}:
            stream.wait_stream(other)
        return torch.cuda.stream(stream)

    def read_by_current(self) -> None:
        """Note that the current stream reads tensors that were made in the side stream."""
        for device in self._streams:
            self._readers.add(torch.cuda.current_stream(device.index))


def record_event(made: Tensor) -> torch.cuda.Event | None:
    """Record an event in the current stream, after ``made`` has its values; None on a CPU."""
    return torch.cuda.current_stream(made.get_device()).record_event() if made.is_cuda else None


def wait_for(event: torch.cuda.Event | None, device: torch.device) -> None:
    if event is not None:
        torch.cuda.current_stream(device.index).wait_event(event)


def keep_until_read(tensor: Tensor) -> Tensor:
    """Return ``tensor``; once freed, its memory is not reused before the current stream has done its work."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.get_device()))
    return tensor


# ---- coalescing
#
# All-gathers that start together run as one collective per process group and dtype, since each collective costs the
# CPU tens of microseconds, and the network its latency. A private function of torch coalesces them.


class Waitable(Protocol):
    def wait(self) -> object:
        """Wait for the collective; on a GPU, the current stream waits, and the host does not."""


class AllGathers:
    """All-gathers that start together; ranks of a group must add the same all-gathers in the same order."""

    def __init__(self) -> None:
        self._of_groups: dict[tuple[dist.ProcessGroup, torch.dtype], _OfGroup] = {}

    def add(self, out: Tensor, own: Tensor, group: dist.ProcessGroup) -> Waitable:
        """Add an all-gather of ``own`` into ``out``; both must stay untouched until the result has been waited for."""
        # One entry per dtype: gloo concatenates an entry's tensors, which would convert them to a common dtype.
        of_group = self._of_groups.setdefault((group, own.dtype), _OfGroup(group))
        of_group.tensors.append((out, own))
        return of_group

    def start(self) -> None:
        for of_group in self._of_groups.values():
            of_group.start()
        self._of_groups = {}


class _OfGroup:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.tensors: list[tuple[Tensor, Tensor]] = []
        self._works: list[Waitable] | None = None

    def start(self) -> None:
        with _coalescing_manager(self.group, async_ops=True) as started:
            for out, own in self.tensors:
                getattr(dist, ALL_GATHER)(out, own, group=self.group)
        self._works = [started]

    def wait(self) -> None:
        assert self._works is not None, "all-gathers are waited for before they start"
        while self._works:
            self._works.pop().wait()
        self.tensors = []  # each reader still refers to its own tensors, and frees them when it has read them


# ---- autograd


def running_backward() -> int | None:
    """Return the process-wide id of the backward that the caller runs in, or None; nested backwards have larger ids."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


# ---- hops
#
# One hop: values are encoded, exchanged between the ranks of one network level, and decoded again.
#
# Every byte is counted and every phase has a name in profiles: ``fsdp_zpp::<phase> (<unit>)``.

logger = logging.getLogger("fsdp_zpp")

_NOTHING = nullcontext()


# torch 2.13 renamed these functions and deprecated the old names. A function is looked up at each call, so that tools
# that wrap torch.distributed's functions see our calls, too.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
"""The name of torch's all-gather into one tensor, ``f(out, in, group=...)``."""
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


@dataclass
class Traffic:
    """Bytes sent by this rank, per kind of collective and level of the network.

    An all-gather of a payload of b bytes over n ranks sends b * (n - 1), an all-to-all b * (n - 1) / n: the bytes that
    each rank must put on the wire when every byte goes to its destination once.
    """

    sent: Counter[tuple[Kind, Level]] = field(default_factory=Counter)
    before_reset: Counter[tuple[Kind, Level]] = field(default_factory=Counter)

    def add(self, kind: Kind, level: Level, nbytes: int) -> None:
        self.sent[kind, level] += nbytes

    def since_reset(self) -> dict[tuple[Kind, Level], int]:
        return {key: sent - self.before_reset[key] for key, sent in self.sent.items()}

    def reset(self) -> None:
        self.before_reset = self.sent.copy()

    def take_over(self, other: Traffic) -> None:
        self.sent.update(other.sent)
        self.before_reset.update(other.before_reset)


@dataclass(frozen=True, eq=False)
class Hop:
    """Collectives of one kind over one process group; chunks lie in the order of the group's ranks."""

    group: dist.ProcessGroup
    kind: Kind
    level: Level
    traffic: Traffic

    @cached_property
    def size(self) -> int:
        return int(self.group.size())

    def all_gather(self, payload: Tensor, label: str, out: Tensor | None = None) -> Tensor:
        """Gather payloads [chunks, nbytes] of all ranks into [size * chunks, nbytes], by rank; in ``out`` if given."""
        self.traffic.add(self.kind, self.level, payload.nbytes * (self.size - 1))
        return self.all_gather_uncounted(payload, label, out)

    def count_gather(self, nbytes: int) -> None:
        self.traffic.add(self.kind, self.level, nbytes * (self.size - 1))

    def all_gather_uncounted(self, payload: Tensor, label: str, out: Tensor | None = None) -> Tensor:
        """Gather as :meth:`all_gather` does, without counting: units that share a payload count their own parts."""
        gathered = payload.new_empty((self.size * payload.shape[0], payload.shape[1])) if out is None else out
        with labelled("all_gather", label, self.level):
            self._exchange(getattr(dist, ALL_GATHER), gathered, payload)
        return gathered

    def all_to_all(self, payload: Tensor, label: str) -> Tensor:
        """Send part i of ``payload`` [size * chunks, nbytes] to rank i; return the parts from all ranks, by rank."""
        received = torch.empty_like(payload)
        self.traffic.add(self.kind, self.level, payload.nbytes // self.size * (self.size - 1))
        with labelled("all_to_all", label, self.level):
            self._exchange(dist.all_to_all_single, received, payload)
        return received

    def reduce_scatter(self, values: Tensor, out: Tensor, label: str) -> None:
        """Reduce by torch's own reduce-scatter into ``out``; unlike the methods above, this counts no bytes."""
        with labelled("reduce_scatter", label, self.level):
            getattr(dist, _REDUCE_SCATTER)(out, values, group=self.group)

    @cached_property
    def _takes_cpu_tensors_only(self) -> bool:
        return dist.get_backend(self.group) == "gloo"

    def _exchange(self, collective: Callable[..., object], received: Tensor, sent: Tensor) -> None:
        if not (sent.is_cuda and self._takes_cpu_tensors_only):
            collective(received, sent, group=self.group)
            return
        on_cpu = torch.empty_like(received, device="cpu")
        collective(on_cpu, sent.cpu(), group=self.group)
        received.copy_(on_cpu)


def exchange_and_sum(
    hop: Hop, codec: Codec, payload: Tensor, out: Tensor, factor: float, label: str, exact: ExactPlaces | None
) -> None:
    """Make the last hop of a reduction, after which each rank has its chunk.

    ``payload`` is uint8 [size, nbytes], by destination; ``out`` receives the sum times ``factor``, flat. Values
    from the payloads' tails go to the places ``exact``.
    """
    if payload.is_cuda:
        keep_until_read(payload)  # it was made in the stream of the intra-node hop
    received = hop.all_to_all(payload, label)
    log_launched(label)
    decode_sum(codec, received.unsqueeze(1), out, 1, factor, label, exact)


def log_launched(label: str) -> None:
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s: last hop of the reduction launched", label)


def hop_over(group: dist.ProcessGroup | None, kind: Kind, level: Level, traffic: Traffic) -> Hop | None:
    return None if group is None else Hop(group, kind, level, traffic)


# ---- encode and decode


def encode(
    codec: Codec,
    values: Tensor,
    rows: int,
    cols: int,
    label: str,
    errors: ErrorBuffer | None = None,
    exact: ExactPlaces | None = None,
) -> Tensor:
    """Encode for the unit ``label`` as :meth:`Codec.encode` does, with error feedback if there are ``errors``.

    Values at the places ``exact`` travel in the rows' tails; see [Note: Small parameters] in flat_layout.py.
    """
    with labelled("encode", label):
        taken = None
        if exact is not None and not codec.is_lossless:
            codec = exact_tail(codec, exact.tail)
            if exact.strides is None:
                taken = values[exact.indices]
                values.index_fill_(0, exact.flat, 0)
            else:
                small = values.as_strided(exact.shape, exact.strides, values.storage_offset() + exact.start)
                taken = small.clone()
                small.zero_()
        if errors is None:
            payload = codec.encode(values, rows, cols)
        else:
            payload = encode_with_feedback(codec, values, rows, cols, errors)
        if taken is not None:
            payload.view(torch.float32)[:, -taken.shape[-1] :].view(taken.shape).copy_(taken)
        return payload


def decode(
    codec: Codec, payload: Tensor, out: Tensor, rows: int, cols: int, label: str, exact: ExactPlaces | None = None
) -> None:
    """Decode for the unit ``label``; small values go from the tails to the places ``exact``."""
    with labelled("decode", label):
        if exact is None or codec.is_lossless:
            codec.decode(payload, out, rows, cols)
            return
        exact_tail(codec, exact.tail).decode(payload, out, rows, cols)
        tails = payload.view(torch.float32)[:, -exact.tail :].view(exact.shape)
        if exact.strides is None:
            out.index_put_((exact.indices,), tails if out.dtype == tails.dtype else tails.to(out.dtype))
        else:
            out.as_strided(exact.shape, exact.strides, out.storage_offset() + exact.start).copy_(tails)


def decode_sum(
    codec: Codec, received: Tensor, out: Tensor, cols: int, scale: float, label: str, exact: ExactPlaces | None = None
) -> None:
    """Decode ``cols`` chunks per peer, and sum them over the peers in order; the rest as in :func:`decode`."""
    with labelled("decode_sum", label):
        if exact is None or codec.is_lossless:
            codec.decode_sum(received, out, 1, cols, scale)
            return
        exact_tail(codec, exact.tail).decode_sum(received, out, 1, cols, scale)
        sums = received.view(torch.float32)[..., -exact.tail :].sum(0).view(exact.shape)
        if exact.strides is None:
            out.index_put_((exact.indices,), torch.mul(sums, scale, out=out.new_empty(sums.shape)))
        else:
            torch.mul(sums, scale, out=out.as_strided(exact.shape, exact.strides, out.storage_offset() + exact.start))


def decode_sum_encode(
    codec: Codec,
    received: Tensor,
    numel: int,
    next_codec: Codec,
    scale: float,
    label: str,
    errors: ErrorBuffer | None = None,
    exact: ExactPlaces | None = None,
) -> Tensor:
    """Decode, sum and encode for the unit ``label``; arguments as in :func:`encode`."""
    if exact is not None and (codec.is_lossless or next_codec.is_lossless):
        # At most one of the two codecs has tails.
        chunks = received.shape[1]
        sums = torch.empty(chunks * numel, dtype=torch.float32, device=received.device)
        decode_sum(codec, received, sums, chunks, scale, label, exact)
        return encode(next_codec, sums, 1, chunks, label, errors, exact)
    with labelled("decode_sum_encode", label):
        if exact is not None:
            codec, next_codec = exact_tail(codec, exact.tail), exact_tail(next_codec, exact.tail)
        if errors is None:
            payload = codec.decode_sum_encode(received, numel, next_codec, scale)
        else:
            payload = decode_sum_encode_with_feedback(codec, received, numel, next_codec, scale, errors)
        if exact is not None:
            sums = received.view(torch.float32)[..., -exact.tail :].sum(0)
            torch.mul(sums, scale, out=payload.view(torch.float32)[:, -exact.tail :])
        return payload


def label_of(part: str) -> property:
    """Return the property ``label`` of an object whose attribute ``part`` has the label."""
    return property(attrgetter(f"{part}.label"), lambda whole, label: setattr(getattr(whole, part), "label", label))


def labelled(phase: str, unit: str, level: Level | None = None) -> AbstractContextManager[object]:
    """Label the block ``fsdp_zpp::<level>_<phase> (<unit>)`` for the profiler, if one is recording."""
    # Even without a profiler, record_function takes microseconds, and a unit would enter it a dozen times a step.
    if profiler._is_profiler_enabled:
        return record_function(f"fsdp_zpp::{phase if level is None else f'{level}_{phase}'} ({unit})")
    return _NOTHING
