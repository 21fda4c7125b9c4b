"""The rendezvous of torch.distributed.elastic, as nodes use it that are in no common job."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from fsdp_zpp.config.elastic import Elastic

HEARTBEATS = 3
"""Signs of life that a node may miss."""


class Round(NamedTuple):
    """What nodes that have met agree on.

    Attributes:
        number: Number of the round, larger than any before.
        node: This node among them.
        nodes: How many have met.
    """

    number: int
    node: int
    nodes: int


class Rendezvous:
    """One node's part in a rendezvous. A thread sends its signs of life between rounds.

    Args:
        config: Who may meet.
        store: A client of the store for the rendezvous alone: one that waits would hold up signs of life.
    """

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
        # Before each exchange, nodes ask whether their round is still the last one: not whether it was, a second ago.
        self._handler._state_holder._cache_duration = 0
        # torch would start a store on the first node of a round, and have others read its address, which only nodes
        # that are new write: those that join later would wait for it. Nobody here uses it.
        self._handler._shared_tcp_store_server = store
        self._handler._bootstrap_store_info = RendezvousStoreInfo("", 0)

    def next_round(self) -> Round:
        """Meet whoever else comes, which ends the round before.

        Raises:
            RendezvousClosedError: If the training has ended.
            RendezvousTimeoutError: If too few come in time.
            RendezvousConnectionError: If the store can't be reached.
        """
        info = self._handler.next_rendezvous()
        return Round(self._handler._state_holder.state.round, info.rank, info.world_size)

    def is_over(self, round_: Round) -> bool:
        """Return whether nodes have to meet again after a round: others wait to be taken in, or some have left it."""
        waiting = self._handler.num_nodes_waiting()  # reads the state anew
        state = self._handler._state_holder.state
        # Others may have missed this node's signs of life, and gone on without it.
        is_member = state.complete and self._handler._this_node in state.participants
        return waiting > 0 or state.round != round_.number or len(state.participants) < round_.nodes or not is_member

    def close(self) -> None:
        """Let nobody meet any more."""
        self._handler.set_closed()
        self._handler._stop_heartbeats()
