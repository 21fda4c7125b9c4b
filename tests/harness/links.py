"""Links between GPUs: machines of any, as if each rank had a GPU of its own, and hops that take long."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_zpp.comm.hops import Hop
from fsdp_zpp.runtime import _torch_rank_layout, links
from fsdp_zpp.runtime.links import GpuReport

Sets = Sequence[Sequence[int]]
"""The ranks that NVLink joins to each other; others are alone."""

NONE: Sets = ()
CYCLES = 20_000_000
"""Cycles of a GPU by which a hop is late: a hundredth of a second, in which the host starts the next operations."""


def reports_of(world: int, sets: Sets) -> list[GpuReport]:
    """The reports of the ranks of a job on one host."""
    gpus, reports = [f"GPU-{rank}" for rank in range(world)], []
    for rank, gpu in enumerate(gpus):
        near = {f"GPU-{other}" for part in sets if rank in part for other in part}
        reports.append(GpuReport(gpu, frozenset(near - {gpu}), frozenset({*gpus} - near - {gpu})))
    return reports


@contextmanager
def machine(sets: Sets | None) -> Iterator[None]:
    """In a worker: NVLink joins GPUs in these sets, or nothing is known; nor is it of groups from before."""

    def own_report(group: dist.ProcessGroup, device: torch.device | None) -> GpuReport:
        return GpuReport(None) if sets is None else reports_of(dist.get_world_size(), sets)[dist.get_rank()]

    def supports_link_query(group: dist.ProcessGroup) -> bool:
        return dist.get_world_size(group) > 1

    with (
        patch.object(links, "own_report", own_report),
        patch.object(links, "supports_link_query", supports_link_query),
        patch.object(_torch_rank_layout, "supports_link_query", supports_link_query),
        patch.object(links, "_links", WeakKeyDictionary()),
    ):
        yield


@contextmanager
def late_hops(*levels: str) -> Iterator[None]:
    """In a worker: hops of these levels take long on a GPU, so that a stream that does not wait reads wrong values."""
    exchange = Hop._exchange

    def late(self: Hop, collective: Callable[..., Any], received: Tensor, sent: Tensor) -> None:
        if sent.is_cuda and self.level in levels:
            torch.cuda._sleep(CYCLES)
        exchange(self, collective, received, sent)

    with patch.object(Hop, "_exchange", late):
        yield
