"""Several nodes in one process: each rank is a thread, and the ranks take turns.

torch.distributed gives a process one rank. Here each thread has torch's record of groups to itself, and its groups are
of a backend of this file. So code for real ranks runs unchanged: training under ``FullyShardedDataParallel`` and
``fully_shard``, ``new_group``, collectives of objects, gathers that start together. N nodes fit on one GPU, which holds
what all of their ranks hold, or on a CPU.

    job = Loopback(nodes=4, gpus_per_node=2)
    losses = job.run(train, 100)           # what train(100) returns, by rank
    losses += job.run(train, 100)          # groups live as long as the job, and so does what ranks have kept
    job.sent[3]["all_to_all", "inter"]     # bytes that rank 3 has sent to other nodes in these collectives
    job.calls[3]["all_to_all", "inter"]    # and in how many of them

A function finds out which rank it is by ``dist.get_rank()``, and in the same way all else: ``dist.group.WORLD`` is the
job, ``dist.group.WORLD.sent`` and ``.calls`` are this rank's, ``LOCAL_WORLD_SIZE`` is the size of a node.

**Turns.** A rank runs until it waits in a collective; then the next one runs that can go on. So a run is reproducible,
and what a process has once needs no locks: caches, patched functions, Triton's interpreter. But ranks do share it. What
is set before a collective (default dtype, environment, the state of the default random generator) is another rank's
when the collective returns. Draw random numbers from a ``torch.Generator`` of the rank's own.

**Values.** Bytes that are moved are those that gloo and NCCL move. Sums are made in the order of the group's ranks, in
the dtype of the tensors; of more than two floats, other backends may add in another order.

**Streams.** As with NCCL, a collective begins after the work so far of the streams that its ranks have called it in,
and the stream that waits for it goes on after its end.

**Bytes.** A collective sends each byte once to each rank that needs it, ``intra`` to ranks of the same node and
``inter`` to others. Reductions count what is summed, as an all-to-all sends it.

**Errors.** An error on one rank ends the others and is raised by ``run``, as is one that says which ranks wait for what
if none of them can go on, or if they call different collectives. The job is over then.

Sends and receives between two ranks are missing, and so are functional collectives, on which DTensor relies.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

BACKEND = "loopback"
_REDUCTIONS: dict[Any, Callable[..., Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}

_Counts = Counter[tuple[str, str]]
"""Bytes or calls, by collective and level of the network."""


def on_ranks(nodes: int, gpus_per_node: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``function(*args)`` on each rank of a job that lasts no longer; return the results by rank."""
    return Loopback(nodes, gpus_per_node).run(function, *args)


class Loopback:
    """A job of several nodes in this process; see the top of this file.

    Args:
        nodes: Number of nodes.
        gpus_per_node: Ranks of each.

    Attributes:
        sent: Bytes that each rank has sent.
        calls: Collectives in which it has sent any.
    """

    def __init__(self, nodes: int, gpus_per_node: int = 1) -> None:
        self.world, self.gpus_per_node = nodes * gpus_per_node, gpus_per_node
        self.sent: list[_Counts] = [Counter() for _ in range(self.world)]
        self.calls: list[_Counts] = [Counter() for _ in range(self.world)]
        store = dist.HashStore()
        self._worlds = [_World.of(_Group(self, BACKEND, range(self.world), rank), store) for rank in range(self.world)]
        self._turns = [threading.Semaphore(0) for _ in range(self.world)]
        self._ready: deque[int] = deque()
        self._waiting: dict[int, _Meeting] = {}
        self._meetings: dict[tuple[str, int], _Meeting] = {}
        self._error: BaseException | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(*args)`` on each rank.

        Returns:
            Its results, by rank.

        Raises:
            RuntimeError: If ranks wait for each other, call different collectives, or have failed in an earlier run.
            BaseException: Whatever the function raises first, on any rank.
        """
        if self._error is not None:
            raise RuntimeError("this job is over, since it has failed") from self._error
        results: list[Any] = [None] * self.world
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        threads = [
            threading.Thread(target=self._be, args=(rank, device, function, args, results), daemon=True)
            for rank in range(self.world)
        ]
        self._ready.extend(range(self.world))
        with self._installed():
            for thread in threads:
                thread.start()
            self._next_turn()
            for thread in threads:
                thread.join()
        if self._error is not None:
            raise self._error
        return results

    @contextmanager
    def _installed(self) -> Iterator[None]:
        """Have torch make groups of this job, and find those of the rank that runs."""
        devices = ["cpu", "cuda"]
        dist.Backend.register_backend(BACKEND, self._new_group, extended_api=True, devices=devices)
        launched = {
            "LOCAL_WORLD_SIZE": str(self.gpus_per_node),
            "GROUP_WORLD_SIZE": str(self.world // self.gpus_per_node),
        }
        isolate: Callable[[bool], None] = torch._C._distributed_c10d._set_thread_isolation_mode
        isolate(True)  # or groups of two ranks could not have one name
        try:
            with patch.object(distributed_c10d, "_world", distributed_c10d._world), patch.dict(os.environ, launched):
                yield
        finally:
            isolate(False)

    def _new_group(self, options: Any, _: Any) -> _Group:
        return _Group(self, options.group_id, options.global_ranks_in_group, options.group_rank)

    def _be(
        self, rank: int, device: int | None, function: Callable[..., Any], args: tuple[Any, ...], results: list[Any]
    ) -> None:
        """Be a rank, in a thread of its own."""
        try:
            self._await_turn(rank)
            if device is not None:
                torch.cuda.set_device(device)
            for group in self._worlds[rank].pg_map:  # torch forgets their names with the thread of an earlier run
                distributed_c10d._register_process_group(group.group_name, group)
            # All ranks would share the threads of autograd, and wait there for each other.
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = function(*args)
        except _EndedError:
            pass
        except BaseException as error:
            error.add_note(f"on rank {rank} of {self.world}")
            self._fail(error)
        self._next_turn()

    # ---- turns

    def _next_turn(self) -> None:
        """Let the next rank run that can, in the order in which they could; this one has ended or waits."""
        if not self._ready and self._waiting:
            waits = "; ".join(f"rank {rank} in {meeting}" for rank, meeting in sorted(self._waiting.items()))
            self._fail(RuntimeError(f"no rank can go on: {waits}"))
        if self._ready:
            self._turns[self._ready.popleft()].release()

    def _await_turn(self, rank: int) -> None:
        self._turns[rank].acquire()
        world: Any = self._worlds[rank]
        distributed_c10d._world = world
        if self._error is not None:
            raise _EndedError

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._ready.extend(self._waiting)
        self._waiting.clear()

    def _wait(self, rank: int, meeting: _Meeting) -> None:
        if not meeting.is_over:
            self._waiting[rank] = meeting
            self._next_turn()
            self._await_turn(rank)

    def _meet(self, key: tuple[str, int], members: Sequence[int], number: int, call: _Call) -> _Work:
        """Take a rank's part in a collective, which the last rank to come makes for all."""
        rank = members[number]
        meeting = self._meetings.setdefault(key, _Meeting(members))
        meeting.calls[number] = call
        self._count(rank, members, call)
        if len(meeting.calls) == len(members):
            del self._meetings[key]
            meeting.make()
            gone_on = [waiting for waiting, other in self._waiting.items() if other is meeting]
            for waiting in gone_on:
                del self._waiting[waiting]
            self._ready.extend(gone_on)
        return _Work(self, rank, meeting)

    def _count(self, rank: int, members: Sequence[int], call: _Call) -> None:
        sent: _Counts = Counter()
        for exchange in call.exchanges:
            for to, part in exchange.sends.items():
                if members[to] != rank:
                    is_near = members[to] // self.gpus_per_node == rank // self.gpus_per_node
                    sent[call.kind, "intra" if is_near else "inter"] += part.nbytes
        self.sent[rank] += sent
        self.calls[rank].update(sent.keys())


class _EndedError(BaseException):
    """Ends a rank, since another one has failed."""


@dataclass
class _World:
    """torch's record of the groups of a rank."""

    default_pg: dist.ProcessGroup | None = None
    group_count: int = 0
    pg_map: dict[dist.ProcessGroup, tuple[str, dist.Store]] = field(default_factory=dict)
    pg_names: dict[dist.ProcessGroup, str] = field(default_factory=dict)
    pg_group_ranks: dict[dist.ProcessGroup, dict[int, int]] = field(default_factory=dict)
    pg_backend_config: dict[dist.ProcessGroup, str] = field(default_factory=dict)
    tags_to_pg: dict[str, list[dist.ProcessGroup]] = field(default_factory=dict)
    pg_to_tag: dict[dist.ProcessGroup, str] = field(default_factory=dict)
    pg_coalesce_state: dict[dist.ProcessGroup, list[Any]] = field(default_factory=dict)
    comms: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, group: _Group, store: dist.Store) -> _World:
        """Return the record of a rank that has ``group`` as its default group."""
        return cls(
            default_pg=group,
            pg_map={group: (BACKEND, store)},
            pg_names={group: BACKEND},
            pg_group_ranks={group: {rank: rank for rank in group.members}},
            pg_backend_config={group: f"cpu:{BACKEND},cuda:{BACKEND}"},
        )


@dataclass(frozen=True)
class _Exchange:
    """One rank's part in a collective on one tensor.

    Attributes:
        sends: The parts for ranks of the group.
        receives: Where the parts of ranks of the group go; of a reduction, one tensor for the sum, by any rank.
    """

    sends: Mapping[int, Tensor]
    receives: Mapping[int, Tensor]


@dataclass(frozen=True)
class _Call:
    """One rank's call of a collective.

    Attributes:
        kind: The collective.
        exchanges: Its tensors.
        op: How it reduces; None if it moves values.
        begun: An event in the stream that it was called in; None on a CPU.
    """

    kind: str
    exchanges: Sequence[_Exchange]
    op: Any
    begun: torch.cuda.Event | None


class _Meeting:
    """A collective, for which its ranks come together.

    Args:
        members: The ranks, by their numbers in the group.

    Attributes:
        calls: Those that have come, by these numbers.
        is_over: Whether all have.
        made: An event after it; None on a CPU.
    """

    def __init__(self, members: Sequence[int]) -> None:
        self._members = members
        self.calls: dict[int, _Call] = {}
        self.is_over = False
        self.made: torch.cuda.Event | None = None

    def __str__(self) -> str:
        missing = [rank for number, rank in enumerate(self._members) if number not in self.calls]
        return f"{next(iter(self.calls.values())).kind} without ranks {missing} of {list(self._members)}"

    @torch.no_grad()
    def make(self) -> None:
        """Move or reduce the values of all ranks, in the current stream."""
        calls = [self.calls[number] for number in range(len(self._members))]
        kinds = {(call.kind, len(call.exchanges)) for call in calls}
        if len(kinds) > 1:
            called = ", ".join(f"rank {rank} {call.kind}" for rank, call in zip(self._members, calls, strict=True))
            raise RuntimeError(f"ranks call different collectives: {called}")
        for call in calls:
            _go_on_after(call.begun)
        for exchanges in zip(*(call.exchanges for call in calls), strict=True):
            if calls[0].op is None:
                _move(exchanges)
            else:
                _reduce(exchanges, calls[0].op)
        self.calls, self.is_over = {}, True
        if any(call.begun is not None for call in calls):
            self.made = torch.cuda.current_stream().record_event()


class _Work:
    """The handle that ``async_op=True`` returns."""

    def __init__(self, job: Loopback, rank: int, meeting: _Meeting) -> None:
        self._job, self._rank, self._meeting = job, rank, meeting

    def wait(self, timeout: object = None) -> bool:
        self._job._wait(self._rank, self._meeting)
        _go_on_after(self._meeting.made)
        return True

    def is_completed(self) -> bool:
        return self._meeting.is_over


class _Group(dist.ProcessGroup):
    """One rank's process group, with the methods that torch.distributed's functions call.

    Args:
        job: The job.
        name: The same on all members.
        members: The ranks of the job that it consists of.
        number: This rank's place among them.
    """

    def __init__(self, job: Loopback, name: str, members: Sequence[int], number: int) -> None:
        super().__init__(number, len(members))
        self._job, self._name, self.members, self._number = job, name, list(members), number
        self._made = 0

    @property
    def sent(self) -> _Counts:
        """Return the bytes that this rank has sent over any group."""
        return self._job.sent[self.members[self._number]]

    @property
    def calls(self) -> _Counts:
        """Return the collectives over any group in which this rank has sent any."""
        return self._job.calls[self.members[self._number]]

    @property
    def group_name(self) -> str:
        return self._name

    def shutdown(self) -> None:
        pass

    def _meet(self, kind: str, exchanges: Sequence[_Exchange], op: Any = None) -> _Work:
        tensors = [tensor for each in exchanges for side in (each.sends, each.receives) for tensor in side.values()]
        begun = torch.cuda.current_stream().record_event() if any(tensor.is_cuda for tensor in tensors) else None
        key, self._made = (self._name, self._made), self._made + 1
        return self._job._meet(key, self.members, self._number, _Call(kind, exchanges, op, begun))

    def _gather(self, outs: Sequence[Tensor], own: Tensor) -> _Exchange:
        return _Exchange(dict.fromkeys(range(self.size()), own), dict(enumerate(outs)))

    def _chunks(self, tensor: Tensor) -> Sequence[Tensor]:
        return tensor.view(-1).chunk(self.size())

    def allgather(self, outs: list[list[Tensor]], own: list[Tensor], options: Any = None) -> _Work:
        return self._meet("all_gather", [self._gather(outs[0], own[0])])

    def all_gather_single(self, out: Tensor, own: Tensor, options: Any = None) -> _Work:
        return self.all_gather_single_coalesced([out], [own])

    def all_gather_single_coalesced(self, outs: list[Tensor], own: list[Tensor], options: Any = None) -> _Work:
        pairs = zip(outs, own, strict=True)
        return self._meet("all_gather", [self._gather(self._chunks(out), each) for out, each in pairs])

    def all_to_all_single(
        self, out: Tensor, own: Tensor, out_sizes: list[int], own_sizes: list[int], options: Any = None
    ) -> _Work:
        sides = (
            (own.split(own_sizes) if own_sizes else self._chunks(own)),
            (out.split(out_sizes) if out_sizes else self._chunks(out)),
        )
        return self._meet("all_to_all", [_Exchange(*(dict(enumerate(side)) for side in sides))])

    def broadcast(self, tensors: list[Tensor], options: Any) -> _Work:
        root, (tensor,) = options.rootRank, tensors
        others = [number for number in range(self.size()) if number != root]
        is_root = self._number == root
        exchange = _Exchange(dict.fromkeys(others, tensor), {}) if is_root else _Exchange({}, {root: tensor})
        return self._meet("broadcast", [exchange])

    def allreduce(self, tensors: list[Tensor], options: Any) -> _Work:
        everyone = range(self.size())
        exchanges = [_Exchange(dict.fromkeys(everyone, tensor), {0: tensor}) for tensor in tensors]
        return self._meet("all_reduce", exchanges, options.reduceOp.op)

    def reduce_scatter_single(self, out: Tensor, own: Tensor, options: Any) -> _Work:
        return self.reduce_scatter_single_coalesced([out], [own], options)

    def reduce_scatter_single_coalesced(self, outs: list[Tensor], own: list[Tensor], options: Any) -> _Work:
        pairs = zip(outs, own, strict=True)
        exchanges = [_Exchange(dict(enumerate(self._chunks(each))), {0: out}) for out, each in pairs]
        return self._meet("reduce_scatter", exchanges, options.reduceOp.op)

    def barrier(self, opts: Any = None) -> _Work:
        return self._meet("barrier", [])

    allreduce_coalesced = allreduce
    # The names before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _move(exchanges: Sequence[_Exchange]) -> None:
    for to, exchange in enumerate(exchanges):
        for source, out in exchange.receives.items():
            _write(out, exchanges[source].sends[to])


def _reduce(exchanges: Sequence[_Exchange], op: Any) -> None:
    totals: dict[tuple[int, ...], Tensor] = {}
    parts_of = [[other.sends[to] for other in exchanges] for to in range(len(exchanges))]
    for parts in parts_of:  # all before any is written, since sums may be made in place
        key = tuple(map(id, parts))
        if key not in totals:
            totals[key] = _reduced(parts, op)
    for exchange, parts in zip(exchanges, parts_of, strict=True):
        for out in exchange.receives.values():
            _write(out, totals[tuple(map(id, parts))])


def _reduced(parts: Sequence[Tensor], op: Any) -> Tensor:
    if op not in _REDUCTIONS:
        raise NotImplementedError(f"reductions by {op}")
    total = parts[0].clone()
    for part in parts[1:]:
        _check_alike(total, part)
        _REDUCTIONS[op](total, part, out=total)
    return total.div_(len(parts)) if op == dist.ReduceOp.AVG else total


def _write(out: Tensor, part: Tensor) -> None:
    _check_alike(out, part)
    out.copy_(part.reshape(out.shape))


def _check_alike(one: Tensor, other: Tensor) -> None:
    if one.numel() != other.numel() or one.dtype != other.dtype:
        sizes = " and ".join(f"{each.numel()} values in {each.dtype}" for each in (one, other))
        raise RuntimeError(f"ranks do not agree on what they exchange: {sizes}")


def _go_on_after(event: torch.cuda.Event | None) -> None:
    if event is not None:
        torch.cuda.current_stream().wait_event(event)
