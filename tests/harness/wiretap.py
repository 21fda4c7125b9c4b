"""Counts bytes and calls of torch.distributed's collectives themselves, knowing nothing of fsdp_zpp's own counter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor, nn

from fsdp_zpp import traffic


@dataclass
class Wiretap:
    """Bytes that this rank sent inside of nodes and between them, by collective.

    A collective over ranks on several nodes is counted as the cheapest implementation would send it: each byte
    goes once to every other node (``inter``) or rank of the node (``intra``) that needs it.
    """

    gpus_per_node: int
    sent: dict[tuple[str, str], int] = field(default_factory=dict)
    order: list[tuple[str, str]] = field(default_factory=list)
    """The collectives and the hops that they were, as they were called."""

    def count(self, collective: str, group: dist.ProcessGroup | None, nbytes_per_peer: int) -> None:
        """Count a collective in which this rank owes ``nbytes_per_peer`` to each peer."""
        ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        nodes = {rank // self.gpus_per_node for rank in ranks}
        hop, peers = ("intra", len(ranks) - 1) if len(nodes) == 1 else ("inter", len(nodes) - 1)
        key = (collective, hop)
        self.sent[key] = self.sent.get(key, 0) + nbytes_per_peer * peers
        self.order.append(key)

    def total(self, hop: str, *collectives: str) -> int:
        """Bytes of one hop, in some collectives or all."""
        return sum(n for (name, at), n in self.sent.items() if at == hop and (not collectives or name in collectives))


def _observers(tap: Wiretap) -> dict[str, Any]:
    def gather(output: Tensor, input: Tensor, group: Any = None, async_op: bool = False) -> None:
        tap.count("all_gather", group, input.nbytes)

    def gather_list(outputs: list[Tensor], input: Tensor, group: Any = None, async_op: bool = False) -> None:
        tap.count("all_gather", group, input.nbytes)

    def scatter(output: Tensor, input: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> None:
        tap.count("reduce_scatter", group, output.nbytes)

    def all_to_all(output: Tensor, input: Tensor, *splits: Any, group: Any = None, async_op: bool = False) -> None:
        tap.count("all_to_all", group, input.nbytes // dist.get_world_size(group))

    return {
        "all_gather_single": gather,
        "all_gather_into_tensor": gather,
        "all_gather": gather_list,
        "reduce_scatter_single": scatter,
        "reduce_scatter_tensor": scatter,
        "all_to_all_single": all_to_all,
    }


@contextmanager
def wiretap(gpus_per_node: int) -> Iterator[Wiretap]:
    """Count everything that this process sends while in the context."""
    tap = Wiretap(gpus_per_node)
    depth = [0]

    def watched(original: Any, observe: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not depth[0]:  # a deprecated name calls the new one
                observe(*args, **kwargs)
            depth[0] += 1
            try:
                return original(*args, **kwargs)
            finally:
                depth[0] -= 1

        return call

    with ExitStack() as stack:
        for name, observe in _observers(tap).items():
            if hasattr(dist, name):
                stack.enter_context(patch.object(dist, name, watched(getattr(dist, name), observe)))
        yield tap


Sent = tuple[Wiretap, dict[str, dict[str, int]]]


def sent_in(step: Callable[[], object], model: nn.Module, gpus_per_node: int, counts: bool = True) -> Sent:
    """In a worker: what ``step()`` sends, by the wiretap and, where ours ``counts``, by traffic()."""
    before: Any = traffic(model) if counts else {}
    with wiretap(gpus_per_node) as tap:
        step()
    after: Any = traffic(model) if counts else {}
    return tap, {kind: {hop: n - before[kind][hop] for hop, n in hops.items()} for kind, hops in after.items()}
