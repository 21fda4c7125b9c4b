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
# Members of a round decide together whether they commit to an exchange: all of them do, or none.
#
# [Note: Decisions]
# If a member is lost during an exchange, some of the others have received all changes and some have not. So received
# changes are tentative until the store holds a decision. Each node that has received all changes raises a counter in
# the store, and the node that completes the count writes "commit". A node that fails, or waits for too long, writes
# "retry": nodes then meet again without the lost ones, and repeat the exchange. The store takes only the first
# decision, and all nodes obey it. A node that was suspended finds the decision, and then a round without itself.
#
# [Note: One round at a time]
# Nodes that wait to join may take all members of a round for lost when these are only slow, and begin another round.
# Two rounds without a common member would then commit to exchanges side by side. So each round first closes the earlier
# ones: it decides "retry" for their next exchange. An exchange under way in an earlier round is either decided before
# that, or never commits.


class Decisions:
    """Decisions of a round, as one of its members sees them; ``timeout`` is the longest wait for others."""

    def __init__(self, store: dist.Store, run_id: str, round_number: int, members: int, timeout: timedelta) -> None:
        self._store = dist.PrefixStore(f"fsdp_zpp.{run_id}", store)
        self._round, self._members, self._timeout = round_number, members, timeout
        self._made = 0

    def close_earlier_rounds(self) -> None:
        """Keep earlier rounds from committing. One member calls this before any member of this round decides."""
        for number in range(self._store.add("closed", 0), self._round):
            at = self._store.add(f"{number}/committed", 0)  # the count may lag behind the decisions
            while self._first_decision(number, at, "retry") == "commit":
                at += 1
        self._store.set("closed", str(self._round))  # lowering a later round's number only costs time

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
        with suppress(RuntimeError):  # if nobody decides in time, this member does
            self._store.wait([f"{key}/decision"], self._timeout)
        return self._first_decision(self._round, at, "retry") == "commit"

    def _first_decision(self, number: int, at: int, decision: str) -> str:
        """Record ``decision`` on an exchange unless one is recorded already; return the recorded one."""
        return self._store.compare_set(f"{number}/{at}/decision", "", decision).decode()


# ---- group of store
#
# Process groups across jobs: their processes meet in a store that belongs to no job.
#
# torch's public functions make groups of one job's ranks. The private helper behind them accepts any store and name.


def group_of_store(store: dist.Store, name: str, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Make a group of all processes that pass the same store and the same unique name. Collective over them.

    Nobody else may use the store's keys. ``timeout`` limits the set-up and each collective of the group.

    Raises:
        RuntimeError: If a member is missing, or can't be reached.
    """
    # Gloo's sockets fail when a member is gone; communicators of GPUs may hang instead. The list of ranks stays empty:
    # torch would take its entries for ranks of this job.
    make: Any = distributed_c10d._new_process_group_helper
    group, _ = make(size, rank, [], "gloo", store, name, timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    # Collectives look up this process's rank in the group here.
    distributed_c10d._world.pg_group_ranks[group] = {dist.get_rank(): rank}
    return group


# ---- rendezvous
#
# The rendezvous of torch.distributed.elastic, for nodes that are separate jobs.

HEARTBEATS = 3
"""A node that misses this many heartbeats counts as lost."""


class Round(NamedTuple):
    """A meeting of nodes: the round's number, which grows, this node's number, and the number of nodes."""

    number: int
    node: int
    nodes: int


class Rendezvous:
    # A thread sends heartbeats through ``store``. A wait in the same client would delay the heartbeats, so nothing else
    # uses this client.
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
        # Nodes ask before each exchange if their round is still the last one; a cached answer may be a second old.
        self._handler._state_holder._cache_duration = 0
        # torch would start a store on a round's first node, and have the other nodes read its address. That node writes
        # the address only once, so nodes that join a later round would wait for it. Nobody here uses such a store.
        self._handler._shared_tcp_store_server = store
        self._handler._bootstrap_store_info = RendezvousStoreInfo("", 0)

    def next_round(self) -> Round:
        """Meet other nodes for a new round; the previous round ends.

        Raises:
            RendezvousClosedError: If the training has ended.
            RendezvousTimeoutError: If too few nodes come in time.
            RendezvousConnectionError: If the store can't be reached.
        """
        info = self._handler.next_rendezvous()
        return Round(self._handler._state_holder.state.round, info.rank, info.world_size)

    def is_over(self, round_: Round) -> bool:
        """Return whether nodes have to meet again: others wait to join, or some have left ``round_``."""
        waiting = self._handler.num_nodes_waiting()  # reads the state again
        state = self._handler._state_holder.state
        # The other nodes may have missed this node's heartbeats, and gone on without it.
        is_member = state.complete and self._handler._this_node in state.participants
        return waiting > 0 or state.round != round_.number or len(state.participants) < round_.nodes or not is_member

    def close(self) -> None:
        self._handler.set_closed()
        self._handler._stop_heartbeats()


# ---- members
#
# Members of an elastic training: nodes meet, exchange and lose each other; each node is a job of its own.
#
#     store                   a TCPStore that outlives all nodes
#     rendezvous              torch.distributed.elastic's, one participant a node: its first rank
#     round                   the nodes that have met, until one is lost; each local index has a gloo group
#     decision                in the store, once for each exchange: commit or retry; see [Note: Decisions]
#
# Within a node, all ranks follow the first.

logger = logging.getLogger("fsdp_zpp")

MOST_FAILURES = 10
"""A node gives up after more failures in a row than this; lost nodes alone cause fewer."""
_PIECE = 1 << 24  # bytes in one broadcast, so that the timeout does not apply to a whole model at once
T = TypeVar("T")


class Members:
    """Nodes that train together now, as one of them sees them. Methods are collective over the node's ranks by default.

    ``mesh`` has one rank of each member, the one with this rank's local index; None while this node is not a member.
    """

    def __init__(self, config: Elastic, node: ProcessMesh, model: str) -> None:
        self._config, self._node, self._model = config, node, model
        self._address = config.address()
        self._timeout = timedelta(seconds=config.timeout)
        self.mesh: ProcessMesh | None = None
        self._rendezvous: Rendezvous | None = None  # on the node's first rank alone
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
            round_ = self._on_first_rank(lambda: self._own_rendezvous().next_round())
            failure = ""
            try:
                self._connect(round_)
            except RuntimeError as error:
                failure = str(error)
            if on_any_rank(bool(failure), self._node.group, f"{self._model}: elastic nodes meet"):
                self.disconnect(failure or "another rank of this node could not connect")
        logger.info("%s: this is node %d of %d", self._model, self.mesh.rank, self.mesh.topology.nodes)

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
        """Leave the round. A ``reason`` counts as a failure; too many failures in a row raise a RuntimeError."""
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
        except RendezvousError:  # the store is gone: the next decision fails on all ranks
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
        """Send ``state`` from the member ``source`` to the others; return it on others with ``needed``, elsewhere None.

        Collective over ``mesh``, not over the node's ranks. Raises a RuntimeError if a member is lost.
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
        """Return whether all members commit to an exchange; ``failure`` is this rank's error. See [Note: Decisions]."""
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
        """Run ``act`` on the node's first rank; on all ranks, return its result or raise a RuntimeError if it fails."""
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
        with suppress(ValueError):  # the job has destroyed all of its groups already
            dist.destroy_process_group(groups.pop())
