"""Counts bytes and calls of torch.distributed's collectives themselves, knowing nothing of fsdp_zpp's own counter."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor, nn

from fsdp_zpp import traffic

KINDS = {
    "all_gather": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
"""The collectives that are counted, under the names that torch's versions have for them."""


@dataclass
class Wiretap:
    """Bytes that this rank sent inside of nodes and between them, by collective.

    The cheapest implementation counts: each byte goes once to every other node (``inter``) or rank of the node that
    needs it.
    """

    gpus_per_node: int
    sent: dict[tuple[str, str], int] = field(default_factory=dict)
    order: list[tuple[str, str]] = field(default_factory=list)  # collectives and hops, as they were called
    is_within: bool = False  # a collective, which may call another one

    def count(self, kind: str, output: Any, own: Tensor, group: dist.ProcessGroup | None = None, **others: Any) -> None:
        """Count a collective that was called with these arguments."""
        ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        nodes = {rank // self.gpus_per_node for rank in ranks}
        hop, peers = ("intra", len(ranks) - 1) if len(nodes) == 1 else ("inter", len(nodes) - 1)
        sent = (output if kind == "reduce_scatter" else own).nbytes // (len(ranks) if kind == "all_to_all" else 1)
        self.sent[kind, hop] = self.sent.get((kind, hop), 0) + sent * peers
        self.order.append((kind, hop))

    def total(self, hop: str, *collectives: str) -> int:
        """Bytes of one hop, in some collectives or all."""
        return sum(n for (name, at), n in self.sent.items() if at == hop and (not collectives or name in collectives))


@contextmanager
def wiretap(gpus_per_node: int) -> Iterator[Wiretap]:
    """Count everything that this process sends while in the context."""
    tap = Wiretap(gpus_per_node)

    def watched(original: Any, kind: str) -> Any:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if tap.is_within:
                return original(*args, **kwargs)
            output, own, *others = signature.bind(*args, **kwargs).arguments.items()
            tap.count(kind, output[1], own[1], **dict(others))
            tap.is_within = True
            try:
                return original(*args, **kwargs)
            finally:
                tap.is_within = False

        return call

    with ExitStack() as stack:
        for name, kind in KINDS.items():
            if hasattr(dist, name):
                stack.enter_context(patch.object(dist, name, watched(getattr(dist, name), kind)))
        yield tap


Sent = tuple[Wiretap, dict[str, dict[str, int]]]


def sent_in(step: Callable[[], object], model: nn.Module, gpus_per_node: int, counts: bool = True) -> Sent:
    """In a worker: what ``step()`` sends, by the wiretap and, where ours ``counts``, by traffic()."""
    before: Any = traffic(model) if counts else {}
    with wiretap(gpus_per_node) as tap:
        step()
    after: Any = traffic(model) if counts else {}
    return tap, {kind: {hop: n - before[kind][hop] for hop, n in hops.items()} for kind, hops in after.items()}
