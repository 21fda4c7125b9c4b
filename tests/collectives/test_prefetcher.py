"""The prefetcher by itself: which secondary shards it sends, and which of them together."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from harness import models
from harness.pool import Pool
from harness.wiretap import wiretap

from fsdp_zpp import Int8
from fsdp_zpp.collectives.hops import Traffic
from fsdp_zpp.collectives.mesh import process_mesh
from fsdp_zpp.collectives.prefetch import SecondaryShardPrefetcher
from fsdp_zpp.collectives.weight_gather import WeightGather

INTER, INTRA = ("all_gather", "inter"), ("all_gather", "intra")


class Given:
    """A shard that is there.

    Args:
        shard: The shard.
    """

    def __init__(self, shard: torch.Tensor) -> None:
        self._shard = shard

    def can_be_read(self) -> bool:
        """At any time."""
        return True

    def write_back(self) -> None:
        """Nothing replaces it."""

    def full_precision_shard(self) -> torch.Tensor:
        """The shard."""
        return self._shard

    def shard_version(self) -> None:
        """It has none."""


def some_unused(device_shards: int, together: int) -> list[int]:
    """In a worker: the inter-node hops of forwards that leave out the last of three units."""
    gathers = [WeightGather(process_mesh(dist.group.WORLD, 2), Int8(), True, Traffic()) for _ in range(3)]
    shards = [torch.full((device_shards,), float(dist.get_rank()), device=models.device()) for _ in gathers]
    prefetcher = SecondaryShardPrefetcher((gather.secondary for gather in gathers), together)
    for gather, shard in zip(gathers, shards, strict=True):
        gather.prefetcher, gather.secondary.source = prefetcher, Given(shard)
    counts = []
    for _ in range(3):
        with wiretap(2) as tap:
            for gather, shard in zip(gathers[:2], shards, strict=False):
                out = torch.empty(4 * device_shards, device=models.device())
                gather(shard, out)
                expected = torch.arange(4.0, device=models.device()).repeat_interleave(device_shards)
                torch.testing.assert_close(out, expected, rtol=0.5 / 127, atol=0)  # half a step
        counts.append(tap.order.count(INTER))
        for gather in gathers:
            gather.secondary.mark_stale()
    return counts


def test_an_unused_unit_is_prefetched_in_vain_only_once(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(some_unused, 64, 0) == [[3, 2, 2]] * 4


def test_small_neighbours_are_sent_together(pool: Callable[[int], Pool]) -> None:
    nbytes = Int8().nbytes(64)
    assert pool(4).run(some_unused, 64, 2 * nbytes - 1) == [[3, 2, 2]] * 4
    assert pool(4).run(some_unused, 64, 2 * nbytes) == [[2, 1, 1]] * 4
    assert pool(4).run(some_unused, 64, 3 * nbytes) == [[1, 1, 1]] * 4
