"""Prefetcher by itself: which secondary shards it sends, and which of them together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.pool import Pool
from harness.wiretap import wiretap

from fsdp_zpp import Int4Delta, Int8
from fsdp_zpp.collectives.flat_layout import FlatLayout
from fsdp_zpp.collectives.hops import Traffic
from fsdp_zpp.collectives.mesh import process_mesh
from fsdp_zpp.collectives.prefetch import SecondaryShardPrefetcher, in_chunks
from fsdp_zpp.collectives.secondary_shard import ShardValues
from fsdp_zpp.collectives.weight_gather import WeightGather

INTER, INTRA = ("all_gather", "inter"), ("all_gather", "intra")


class Given:
    """Source of a shard that is there at any time.

    Args:
        shard: The shard.
    """

    def __init__(self, shard: torch.Tensor) -> None:
        self._shard = shard

    def can_be_read(self) -> bool:
        """Return True: at any time."""
        return True

    def prepare_read(self) -> int:
        """Return its number of values; nothing replaces it."""
        return self._shard.numel()

    def read(self) -> ShardValues:
        """Return the shard."""
        return ShardValues([self._shard], self._shard.numel(), None, True)

    def is_trained(self) -> bool:
        """Return True."""
        return True

    def layout(self, numel: int) -> FlatLayout:
        """Return the layout of no parameters in particular."""
        return FlatLayout.dense(())

    def shard_version(self) -> None:
        """Return None: it has none."""


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


def deltas_of_three_units() -> tuple[list[int], list[bool]]:
    """In a worker: over steps that leave out the last of three units, what each sends, and if its memory is its own."""
    gathers = [WeightGather(process_mesh(dist.group.WORLD, 2), Int4Delta(), True, Traffic()) for _ in range(3)]
    shards = [torch.ones(512, device=models.device()) for _ in gathers]
    prefetcher = SecondaryShardPrefetcher(gather.secondary for gather in gathers)
    for gather, shard in zip(gathers, shards, strict=True):
        gather.prefetcher, gather.secondary.source = prefetcher, Given(shard)
    for _ in range(3):
        for gather, shard in zip(gathers[:2], shards, strict=False):
            gather(shard, torch.empty(4 * 512, device=models.device()))
        for gather in gathers:
            gather.secondary.mark_stale(by_step=True)
    sent = [gather.secondary.hop.traffic.sent["gather", "inter"] for gather in gathers if gather.secondary.hop]
    bases = [gather.secondary.base for gather in gathers]
    return sent, [base is not None and base.untyped_storage().nbytes() == base.nbytes for base in bases]


def test_what_units_send_together_is_each_ones_own(pool: Callable[[int], Pool]) -> None:
    codec = Int4Delta()
    once, twice_more = codec.nbytes(512), 2 * codec.changes.nbytes(512)
    for sent, apart in pool(4).run(deltas_of_three_units):
        assert sent == [once + twice_more, once + twice_more, once]
        # One that is not sent any more must not keep the memory of those that it was sent with.
        assert apart == [False, False, True]


def sizes_of_chunks(units: list[int], least_nbytes: int, most_nbytes: int) -> list[list[int]]:
    """In a worker: units of so many bytes, cut into chunks."""
    mesh = process_mesh(dist.group.WORLD, 2)
    shards = [WeightGather(mesh, None, True, Traffic()).secondary for _ in units]
    sizes = dict(zip(shards, units, strict=True))
    chunks = in_chunks(list(sizes.items()), least_nbytes=least_nbytes, most_nbytes=most_nbytes)
    return [[sizes[shard] for shard in chunk] for chunk in chunks]


@pytest.mark.parametrize(
    ("units", "least", "most", "expected"),
    [
        ([8] * 8, 0, 1000, [[8, 8]] * 4),
        ([8] * 9, 0, 1000, [[8, 8]] * 4 + [[8]]),
        ([8] * 8, 64, 1000, [[8] * 8]),
        ([8] * 8, 63, 1000, [[8] * 7, [8]]),
        ([8] * 8, 0, 8, [[8]] * 8),
        ([100, 4, 4, 4], 0, 1000, [[100], [4, 4, 4]]),
        ([4, 100, 4], 0, 50, [[4], [100], [4]]),
        ([8], 0, 1, [[8]]),
    ],
)
def test_a_model_is_sent_in_a_few_chunks(
    pool: Callable[[int], Pool], units: list[int], least: int, most: int, expected: list[list[int]]
) -> None:
    assert pool(4).run(sizes_of_chunks, units, least, most) == [expected] * 4


def test_small_neighbours_are_sent_together(pool: Callable[[int], Pool]) -> None:
    nbytes = Int8().nbytes(64)
    assert pool(4).run(some_unused, 64, 2 * nbytes - 1) == [[3, 2, 2]] * 4
    assert pool(4).run(some_unused, 64, 2 * nbytes) == [[2, 1, 1]] * 4
    assert pool(4).run(some_unused, 64, 3 * nbytes) == [[1, 1, 1]] * 4
