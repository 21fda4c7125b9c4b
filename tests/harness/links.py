"""Machines of any links, as if each rank had a GPU of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fsdp_zpp.collectives import links
from fsdp_zpp.collectives.links import GpuReport
from fsdp_zpp.runtime import rank_layout

Sets = Sequence[Sequence[int]]
"""The ranks that NVLink joins to each other; others are alone."""

NONE: Sets = ()


def reports_of(world: int, sets: Sets) -> list[GpuReport]:
    """What the ranks of a job on one host report."""
    near = {rank: {rank}.union(*(part for part in sets if rank in part)) for rank in range(world)}
    return [
        GpuReport(
            _gpu(rank), frozenset(map(_gpu, near[rank] - {rank})), frozenset(map(_gpu, {*range(world)} - near[rank]))
        )
        for rank in range(world)
    ]


@contextmanager
def machine(sets: Sets | None) -> Iterator[None]:
    """In a worker: NVLink joins GPUs in these sets, or nothing is known; nor is it of groups from before."""

    def own_report(group: dist.ProcessGroup, device: torch.device | None) -> GpuReport:
        return GpuReport(None) if sets is None else reports_of(dist.get_world_size(), sets)[dist.get_rank()]

    def may_be_known(group: dist.ProcessGroup) -> bool:
        return dist.get_world_size(group) > 1

    with (
        patch.object(links, "own_report", own_report),
        patch.object(links, "may_be_known", may_be_known),
        patch.object(rank_layout, "may_be_known", may_be_known),
        patch.object(links, "_links", WeakKeyDictionary()),
    ):
        yield


def _gpu(rank: int) -> str:
    return f"GPU-{rank}"
