"""Elastic nodes: local steps whose nodes may be lost, and may come back or join, while the others train on."""

from __future__ import annotations

import os
from dataclasses import dataclass

from fsdp_zpp.suggestions import explains_keywords

ENDPOINT_VARIABLE = "FSDP_ZPP_ENDPOINT"
"""The environment variable that gives the endpoint if the argument does not."""


@explains_keywords
@dataclass(frozen=True)
class Elastic:
    """Says where nodes that train on their own find each other, and how long they wait for one that is silent.

    Each node is a job of its own (``torchrun --standalone``). Nodes meet in a rendezvous of torch.distributed.elastic
    (``DynamicRendezvousHandler``) over a ``TCPStore``, which must outlive every node: start it where no node runs.

    Args:
        max_nodes: The most nodes that train together. More wait, as spares, until one is lost.
        min_nodes: The fewest that train; fewer wait for others.
        endpoint: ``host:port`` of the store; None takes it from the environment variable ``FSDP_ZPP_ENDPOINT``.
        run_id: Names the run in the store. Runs that share a store, and models that train apart, need names of their
            own; so does a run after one that has ended.
        timeout: Seconds that a node waits for the others in an exchange, those included by which it is faster.
        heartbeat: Seconds between a node's signs of life. A node that misses three is lost to the others, so clocks of
            nodes must not differ by as much.
        last_call: Seconds that nodes which meet wait for more once there are ``min_nodes``; more than one.
        join_timeout: Seconds that a node waits to be taken in, and for the store; longer than nodes take from one
            exchange to the next, and shorter than the timeout of the node's own process group.

    Raises:
        ValueError: If a number is out of range, or ``endpoint`` is not ``host:port``.
        TypeError: If a number of nodes is not an int, or ``endpoint`` or ``run_id`` is not text.
    """

    max_nodes: int
    min_nodes: int = 1
    endpoint: str | None = None
    run_id: str = "fsdp_zpp"
    timeout: float = 30.0
    heartbeat: float = 2.0
    last_call: float = 3.0
    join_timeout: float = 300.0

    def __post_init__(self) -> None:
        for name in ("max_nodes", "min_nodes"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an int of 1 or more nodes, got {value!r}")
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ValueError(
                f"min_nodes must be 1 or more and max_nodes no fewer, got min_nodes={self.min_nodes} and "
                f"max_nodes={self.max_nodes}"
            )
        if not isinstance(self.run_id, str) or not self.run_id:
            raise TypeError(f"run_id must be a text that is not empty, got {self.run_id!r}")
        if self.endpoint is not None:
            parse_endpoint(self.endpoint)
        for name, least in (("timeout", 0), ("heartbeat", 0), ("last_call", 1), ("join_timeout", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least < value < float("inf"):
                raise ValueError(f"{name} must be a number of seconds above {least}, got {value!r}")

    def address(self) -> tuple[str, int]:
        """Return host and port of the store.

        Raises:
            ValueError: If neither the argument nor the environment variable gives them.
        """
        endpoint = self.endpoint or os.environ.get(ENDPOINT_VARIABLE)
        if not endpoint:
            raise ValueError(
                f"elastic nodes need the address of a store: pass Elastic(endpoint='host:port') or set "
                f"{ENDPOINT_VARIABLE}"
            )
        return parse_endpoint(endpoint)

    def __str__(self) -> str:
        at_least = f"{self.min_nodes} to " if self.min_nodes != self.max_nodes else ""
        return f"{at_least}{self.max_nodes} nodes that come and go"


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Return the host and the port of an endpoint.

    Raises:
        TypeError: If it is not text.
        ValueError: If it is not ``host:port``.
    """
    if not isinstance(endpoint, str):
        raise TypeError(f"endpoint must be a text such as 'login1:29400', got {endpoint!r}")
    host, colon, port = endpoint.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"endpoint must be host:port such as 'login1:29400', got {endpoint!r}")
    return host.strip("[]"), int(port)
