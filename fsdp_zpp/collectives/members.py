"""Members of an elastic training: nodes that are jobs of their own, which meet, exchange and lose each other.

    store                   a TCPStore that outlives all nodes
    rendezvous              torch.distributed.elastic's, one participant a node: its first rank
    round                   the nodes that have met: a gloo group for each local index, until one of them is lost
    decision                in the store, once for each exchange: commit or retry; see [Note: Decisions] in decisions.py

Within a node, all ranks follow the first.
"""

from __future__ import annotations

import io
import logging
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError

from fsdp_zpp.config.elastic import Elastic
from fsdp_zpp.config.topology import Topology

from ._torch_group_of_store import group_of_store
from ._torch_rendezvous import Rendezvous, Round
from .agreement import from_first_rank, on_any_rank
from .decisions import Decisions
from .mesh import ProcessMesh

logger = logging.getLogger("fsdp_zpp")

MOST_FAILURES = 10
"""Failures in a row after which a node gives up: those that the loss of nodes explains are fewer."""
_PIECE = 1 << 24  # bytes, so that a timeout is not one of a whole model
T = TypeVar("T")


class Members:
    """Nodes that train together now, as one of them sees them. All methods are collective over the node's ranks.

    Args:
        config: Who may take part.
        node: The ranks of this node.
        model: The model's name in errors.

    Raises:
        ValueError: If nothing gives the address of the store.

    Attributes:
        mesh: The ranks of all members with this local index, as nodes of one; None while this node is not a member.
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
        """Return a connection to the store, which serves one caller at a time."""
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
        """End this node's part in the round.

        Args:
            reason: What has failed, if anything has.

        Raises:
            RuntimeError: If something has failed too often.
        """
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
        """Return the number of the round that this node is in, or was in last."""
        return 0 if self._round is None else self._round.number

    def end(self) -> None:
        """Let nobody join any more, since the training has ended."""
        self.disconnect()
        self._on_first_rank(lambda: self._own_rendezvous().close())
        self._rendezvous = None

    # ---- what they exchange

    def gather(self, value: T) -> list[T] | None:
        """Return what the first ranks of all members have, by node; None if a member is lost.

        Args:
            value: What this node has; any object that can be pickled. Only the first rank's matters.
        """
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
        """Return the state of one member's rank with this local index, where it is needed; else None.

        Not collective over the node's ranks: each has another state.

        Args:
            state: The state, of tensors and plain values; only the source's matters.
            source: That member.
            needed: Whether this one needs it.

        Raises:
            RuntimeError: If a member is lost.
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
        """Return whether all members commit to what they have exchanged; see [Note: Decisions] in decisions.py.

        Args:
            failure: What has failed on this rank, if anything has.
        """
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
        """Return what ``act`` returns on the node's first rank, on all of them.

        Raises:
            RuntimeError: If it fails there; on all ranks of the node.
        """
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
