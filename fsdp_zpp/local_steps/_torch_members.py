"""Members of an elastic job, by torch's rendezvous."""

from __future__ import annotations

import io
import logging
import socket
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from fsdp_zpp.comm.agreement import from_first_rank, on_any_rank
from fsdp_zpp.comm.mesh import ProcessMesh
from fsdp_zpp.strategy.error_feedback import Topology
from fsdp_zpp.strategy.local_steps import Elastic

# ---- decisions
#
# Decisions of the members of a round: whether they commit to an exchange, all of them or none.
#
# [Note: Decisions]
# A member may be lost at any moment of an exchange, after which some of the others have all of it and some have not. So
# received changes are tentative until the store has a decision: a node that has them counts itself there, and the
# last one writes that all of them commit. A node that fails, or has waited for too long, writes that all of them try
# again, without lost members. The store takes only the first decision, and all nodes obey it. A node that
# was stopped meanwhile, and wakes up, finds the decision there, and then that the others have met without it.
#
# [Note: One round at a time]
# All members of a round may be taken for lost, by nodes that have waited to join, while they only were slow. Two rounds
# without a common member would then commit to exchanges side by side. So a round begins by closing those before: it
# decides that they retry their next exchange. An exchange that was on its way when it began is committed to
# before that, or never.


class Decisions:
    """Decisions of a round, as one of its members sees them; ``timeout`` is the longest wait for others."""

    def __init__(self, store: dist.Store, run_id: str, round_number: int, members: int, timeout: timedelta) -> None:
        self._store = dist.PrefixStore(f"fsdp_zpp.{run_id}", store)
        self._round, self._members, self._timeout = round_number, members, timeout
        self._made = 0

    def close_earlier_rounds(self) -> None:
        """Keep earlier rounds from committing; one member does this before any of them decides."""
        for number in range(self._store.add("closed", 0), self._round):
            at = self._store.add(f"{number}/committed", 0)  # this many at least
            while self._first_decision(number, at, "retry") == "commit":
                at += 1
        self._store.set("closed", str(self._round))  # a smaller number than another's only costs time

    def decide(self, *, failed: bool) -> bool:
        """Return whether all members commit to the next exchange; every member calls it, and all get the same answer.

        Raises:
            RuntimeError: If the store can't be reached.
        """
        at, self._made = self._made, self._made + 1
        key = f"{self._round}/{at}"
        if failed:
            self._first_decision(self._round, at, "retry")
        elif self._store.add(f"{key}/done", 1) == self._members and (
            self._first_decision(self._round, at, "commit") == "commit"
        ):
            self._store.add(f"{self._round}/committed", 1)
        with suppress(RuntimeError):  # if nobody decides in time, this one does
            self._store.wait([f"{key}/decision"], self._timeout)
        return self._first_decision(self._round, at, "retry") == "commit"

    def _first_decision(self, number: int, at: int, decision: str) -> str:
        """Decide one exchange of a round, unless that was done before; return the first decision."""
        return self._store.compare_set(f"{number}/{at}/decision", "", decision).decode()


# ---- group of store
#
# Process groups of processes that are in no common job: they meet in a store of their own.
#
# torch's public functions make groups of the job's ranks alone. Its private helper makes the job's own group, too, and
# given a store and a name it makes another one like it.


def group_of_store(store: dist.Store, name: str, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Make a group with all processes that make it on the same store, under a unique name. Collective over them.

    Nobody else may use the store's keys. Neither making the group nor any of its collectives takes longer than
    ``timeout``.

    Raises:
        RuntimeError: If a member is missing, or can't be reached.
    """
    # The group is gloo's: communicators of GPUs may not give up when a member is gone, but sockets do. It gets no list
    # of ranks: a group of some of the job's ranks would have to have their numbers.
    make: Any = distributed_c10d._new_process_group_helper
    group, _ = make(size, rank, [], "gloo", store, name, timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    # Collectives look up this process's rank in the group here.
    distributed_c10d._world.pg_group_ranks[group] = {dist.get_rank(): rank}
    return group


# ---- rendezvous
#
# The rendezvous of torch.distributed.elastic, as nodes use it that are in no common job.

HEARTBEATS = 3
"""Signs of life that a node may miss."""


class Round(NamedTuple):
    """Round of nodes that have met: its number, larger than any before, this node's number, and the number of nodes."""

    number: int
    node: int
    nodes: int


class Rendezvous:
    # A thread sends signs of life between rounds. A client that waits would hold them up, so this one has its own
    # store.
    def __init__(self, config: Elastic, store: dist.Store) -> None:
        self._store = store
        seconds = timedelta(seconds=1)
        self._handler = DynamicRendezvousHandler.from_backend(
            config.run_id,
            store,
            C10dRendezvousBackend(store, config.run_id),
            config.min_nodes,
            config.max_nodes,
            local_addr=socket.gethostname(),
            timeout=RendezvousTimeout(join=config.join_timeout * seconds, last_call=config.last_call * seconds),
            keep_alive_interval=config.heartbeat,  # type: ignore[arg-type]  # an int by its annotation only
            keep_alive_max_attempt=HEARTBEATS,
        )
        # Before each exchange, nodes ask whether their round is still the last one; a cached answer may be a second
        # old.
        self._handler._state_holder._cache_duration = 0
        # torch would start a store on the first node of a round, and have others read its address, which only nodes
        # that are new write: those that join later would wait for it. Nobody here uses it.
        self._handler._shared_tcp_store_server = store
        self._handler._bootstrap_store_info = RendezvousStoreInfo("", 0)

    def next_round(self) -> Round:
        """Meet the other nodes that come, which ends the round before.

        Raises:
            RendezvousClosedError: If the training has ended.
            RendezvousTimeoutError: If too few come in time.
            RendezvousConnectionError: If the store can't be reached.
        """
        info = self._handler.next_rendezvous()
        return Round(self._handler._state_holder.state.round, info.rank, info.world_size)

    def is_over(self, round_: Round) -> bool:
        """Return whether nodes have to meet again after a round: others wait to join, or some have left it."""
        waiting = self._handler.num_nodes_waiting()  # reads the state again
        state = self._handler._state_holder.state
        # Others may have missed this node's signs of life, and gone on without it.
        is_member = state.complete and self._handler._this_node in state.participants
        return waiting > 0 or state.round != round_.number or len(state.participants) < round_.nodes or not is_member

    def close(self) -> None:
        self._handler.set_closed()
        self._handler._stop_heartbeats()


# ---- members
#
# Members of an elastic training: nodes that are jobs of their own, which meet, exchange and lose each other.
#
#     store                   a TCPStore that outlives all nodes
#     rendezvous              torch.distributed.elastic's, one participant a node: its first rank
#     round                   the nodes that have met: a gloo group for each local index, until one of them is lost
#     decision                in the store, once for each exchange: commit or retry; see [Note: Decisions]
#
# Within a node, all ranks follow the first.

logger = logging.getLogger("fsdp_zpp")

MOST_FAILURES = 10
"""Failures in a row after which a node gives up: those that the loss of nodes explains are fewer."""
_PIECE = 1 << 24  # bytes, so that a timeout is not one of a whole model
T = TypeVar("T")


class Members:
    """Nodes that train together now, as one of them sees them. All methods are collective over the node's ranks.

    ``mesh`` has the ranks of all members with this local index, as nodes of one; None while this node is not a member.
    """

    def __init__(self, config: Elastic, node: ProcessMesh, model: str) -> None:
        self._config, self._node, self._model = config, node, model
        self._address = config.address()
        self._timeout = timedelta(seconds=config.timeout)
        self.mesh: ProcessMesh | None = None
        self._rendezvous: Rendezvous | None = None  # of the node's first rank
        self._round: Round | None = None
        self._store: dist.Store | None = None
        self._decisions: Decisions | None = None
        self._failures = 0
        self._groups: list[dist.ProcessGroup] = []
        # torch keeps a group until it is destroyed explicitly.
        weakref.finalize(self, _destroy, self._groups).atexit = False

    @property
    def _leads(self) -> bool:
        return self._node.rank == 0

    # ---- who takes part

    def join(self) -> None:
        """Meet the other nodes, for a new round.

        Raises:
            RuntimeError: If the store can't be reached, too few nodes come, none of those that come can be reached,
                or the training has ended; on all ranks of the node.
        """
        while self.mesh is None:
            round_ = self._on_first_rank(self._next_round)
            failure = ""
            try:
                self._connect(round_)
            except RuntimeError as error:
                failure = str(error)
            if on_any_rank(bool(failure), self._node.group, f"{self._model}: elastic nodes meet"):
                self.disconnect(failure or "another rank of this node could not connect")
        logger.info("%s: this is node %d of %d", self._model, self.mesh.rank, self.mesh.topology.nodes)

    def _next_round(self) -> Round:
        return self._own_rendezvous().next_round()

    def _own_rendezvous(self) -> Rendezvous:
        if self._rendezvous is None:
            self._rendezvous = Rendezvous(self._config, self._client())
        return self._rendezvous

    def _client(self) -> dist.Store:
        host, port = self._address
        longest = timedelta(seconds=self._config.join_timeout)
        store = dist.TCPStore(host, port, is_master=False, timeout=longest, wait_for_workers=False)
        store.set_timeout(self._timeout)
        return store

    def _connect(self, round_: Round) -> None:
        if self._store is None:
            self._store = self._client()
        run_id, self._round = self._config.run_id, round_
        name = f"fsdp_zpp.{run_id}.{round_.number}.{self._node.rank}"
        group = group_of_store(dist.PrefixStore(name, self._store), name, round_.node, round_.nodes, self._timeout)
        self._groups.append(group)
        self._decisions = Decisions(self._store, run_id, round_.number, round_.nodes, self._timeout)
        if self._leads and round_.node == 0:
            self._decisions.close_earlier_rounds()
        self.mesh = ProcessMesh(Topology(round_.nodes, 1), round_.node, None, group, group)

    def disconnect(self, reason: str = "") -> None:
        """End this node's part in the round; ``reason`` is a failure, and too many of them raise a RuntimeError."""
        _destroy(self._groups)
        self.mesh = None
        if not reason:
            return
        self._failures += 1
        if self._leads:
            logger.warning("%s: nodes meet again, since an exchange between them failed: %s", self._model, reason)
        if self._failures > MOST_FAILURES:
            raise RuntimeError(
                f"{self._model}: exchanges between nodes failed {self._failures} times in a row, the last time with: "
                f"{reason}"
            )

    def round_is_over(self) -> bool:
        """Return, on the node's first rank, whether nodes have to meet again; False on the others. Not collective."""
        if self._rendezvous is None or self._round is None:
            return False
        try:
            return self._rendezvous.is_over(self._round)
        except RendezvousError:  # the store is gone, as the decision that follows will tell all ranks
            return False

    @property
    def round_number(self) -> int:
        return 0 if self._round is None else self._round.number

    def end(self) -> None:
        self.disconnect()
        self._on_first_rank(lambda: self._own_rendezvous().close())
        self._rendezvous = None

    # ---- what they exchange

    def gather(self, value: T) -> list[T] | None:
        """Return the values of all members' first ranks, by node; None if a member is lost."""
        assert self.mesh is not None
        values: list[T] | None = [value] * self.mesh.topology.nodes
        failure = ""
        if self._leads:
            try:
                dist.all_gather_object(values, value, group=self.mesh.group)
            except RuntimeError as error:
                values, failure = None, str(error)
        values, failure = from_first_rank((values, failure), self._node.group)
        if values is None:
            self.disconnect(failure)
        return values

    def send(self, state: object, source: int, *, needed: bool) -> Any:
        """Return the state of the member ``source``'s rank with this local index, where it is needed; else None.

        Unlike other methods, it is not collective over the node's ranks. Raises a RuntimeError if a member is lost.
        """
        assert self.mesh is not None
        group, is_source = self.mesh.group, self.mesh.rank == source
        data = torch.empty(0, dtype=torch.uint8)
        if is_source:
            buffer = io.BytesIO()
            torch.save(state, buffer)
            data = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
        size = torch.tensor(data.numel())
        dist.broadcast(size, group_src=source, group=group)
        if not is_source:
            data = torch.empty(int(size) if needed else min(int(size), _PIECE), dtype=torch.uint8)
        for start in range(0, int(size), _PIECE):
            length = min(_PIECE, int(size) - start)
            at = start if is_source or needed else 0
            dist.broadcast(data[at : at + length], group_src=source, group=group)
        return torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True) if needed and not is_source else None

    def commit(self, failure: str = "") -> bool:
        """Return whether all members commit to their exchange; ``failure`` is this rank's. See [Note: Decisions]."""
        assert self.mesh is not None
        assert self._decisions is not None
        failed = on_any_rank(bool(failure), self._node.group, f"{self._model}: elastic nodes commit to an exchange")
        decisions = self._decisions
        committed = self._on_first_rank(lambda: decisions.decide(failed=failed))
        if committed:
            self._failures = 0
        else:
            self.disconnect(failure or "a member has not received all of it")
        return committed

    def _on_first_rank(self, act: Callable[[], T]) -> T:
        """Return the result of ``act`` on the node's first rank, or raise its RuntimeError, on all ranks."""
        result: T | None = None
        failure = ""
        if self._leads:
            try:
                result = act()
            except RendezvousClosedError:
                failure = (
                    f"the training has ended: nodes of the run {self._config.run_id!r} let nobody join any more; for "
                    "another run, pass Elastic(run_id=...) or start another store"
                )
            except (RendezvousError, RuntimeError, ValueError) as error:
                failure = (
                    f"this node can't meet others at {':'.join(map(str, self._address))}: "
                    f"{type(error).__name__}: {error}"
                )
        result, failure = from_first_rank((result, failure), self._node.group)
        if failure:
            raise RuntimeError(f"{self._model}: {failure}")
        return result  # type: ignore[return-value]


def _destroy(groups: list[dist.ProcessGroup]) -> None:
    while groups:
        with suppress(ValueError):  # of a job that has destroyed all of its groups
            dist.destroy_process_group(groups.pop())
