"""Secondary shards over the steps of a training: deltas, prefetching, and gathers that start together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.covering import over_each
from harness.models import device
from harness.pool import Pool
from torch import Tensor

from fsdp_zpp import Codec, Int4, Int4Delta, Int8
from fsdp_zpp.collectives._torch_coalescing import AllGathers
from fsdp_zpp.collectives.flat_layout import FlatLayout
from fsdp_zpp.collectives.hops import Traffic
from fsdp_zpp.collectives.mesh import process_mesh
from fsdp_zpp.collectives.prefetch import SecondaryShardPrefetcher, in_chunks
from fsdp_zpp.collectives.secondary_shard import ShardValues
from fsdp_zpp.collectives.weight_gather import WeightGather

OnRanks = Callable[..., list[Any]]
DELTAS = Int4Delta(64, whole=Int8(64))
NUMEL = 333


def gather_of_all(codec: Codec | None = DELTAS) -> WeightGather:
    """On a rank: the gather of a unit over all ranks, as launched."""
    return WeightGather(process_mesh(dist.group.WORLD), codec, True, Traffic())


def sent_by(gather: WeightGather) -> int:
    """The bytes that a gather has sent between nodes."""
    assert gather.secondary.hop is not None
    return gather.secondary.hop.traffic.sent.get(("gather", "inter"), 0)


# ---- deltas


def block_steps(values: Tensor, codec: Int8 | Int4) -> Tensor:
    """Return the quantization step of each value, by the definition."""
    steps = [block.abs().max().expand(len(block)) / (2 ** (codec.bits - 1) - 1) for block in values.split(codec.block)]
    return torch.cat(steps)


def followed(dtype: torch.dtype) -> list[tuple[float, Tensor]]:
    """On a rank: over 30 steps of a walk, the error of what is gathered against its bound, and what is gathered.

    The bound: half a step of the 4-bit change, against what was held, and half one of the 8 bits that it is kept in.
    """
    world, gather = dist.get_world_size(), gather_of_all()
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(world, NUMEL, generator=generator)
    held = torch.zeros(world, NUMEL)
    results = []
    for step in range(30):
        out = torch.empty(world * NUMEL, dtype=dtype, device=device())
        gather(weights[dist.get_rank()].to(device()), out)
        now = out.float().cpu().view(world, NUMEL)
        rounding = now.abs() * torch.finfo(dtype).eps
        worst = 0.0
        for rank in range(world):
            bound = block_steps(now[rank], DELTAS.whole) * 0.51 + rounding[rank]
            if step:
                bound += block_steps(weights[rank] - held[rank], DELTAS.changes) * 0.51 + 2 * rounding[rank]
            worst = max(worst, ((now[rank] - weights[rank]).abs() / bound.clamp(min=1e-30)).max().item())
        results.append((worst, now))
        held = now
        weights = weights + 0.01 * torch.randn(world, NUMEL, generator=generator)
        gather.secondary.mark_stale(by_step=True)
    return results


@over_each(dtype=[torch.float32, torch.bfloat16], layout=[(2, 2), (4, 1)])
def test_gathered_weights_stay_within_half_a_step_of_the_true_ones(
    on_ranks: OnRanks, layout: tuple[int, int], dtype: torch.dtype
) -> None:
    first, *others = on_ranks(*layout, followed, dtype)
    assert max(error for error, _ in first) <= 1
    for other in others:
        assert all(torch.equal(one[1], same[1]) for one, same in zip(first, other, strict=True))


def test_a_change_is_sent_after_a_step_and_whole_weights_after_any_other_event(on_ranks: OnRanks) -> None:
    def after_events() -> list[int]:
        gather = gather_of_all()
        stale = gather.secondary.mark_stale
        sent = [0]
        for event in (lambda: None, partial(stale, by_step=True), stale, lambda: None):
            event()
            gather(torch.ones(NUMEL, device=device()), torch.empty(4 * NUMEL, device=device()))
            sent.append(sent_by(gather))
        return [after - before for before, after in pairwise(sent)]

    whole, change = Int8(64).nbytes(NUMEL), Int4(64).nbytes(NUMEL)
    assert on_ranks(2, 2, after_events) == [[whole, change, whole, 0]] * 4


# ---- prefetching


class Given:
    """Source of a shard that is there at any time, or that can't be read ahead.

    Args:
        shard: The shard.
        can_be_read: Whether it can.
    """

    def __init__(self, shard: Tensor, can_be_read: bool = True) -> None:
        self._shard, self._can_be_read = shard, can_be_read

    def can_be_read(self) -> bool:
        return self._can_be_read

    def prepare_read(self) -> int:
        return self._shard.numel()

    def read(self) -> ShardValues:
        return ShardValues([self._shard], self._shard.numel(), None, True)

    def is_trained(self) -> bool:
        return True

    def layout(self, numel: int) -> FlatLayout:
        return FlatLayout.dense(())

    def shard_version(self) -> None:
        return None


def three_units(codec: Codec, numel: int, together: int, *readable: bool) -> tuple[list[WeightGather], list[Tensor]]:
    """On a rank: gathers with one prefetcher, and shards that have the rank's number as their values."""
    gathers = [gather_of_all(codec) for _ in range(3)]
    shards = [torch.full((numel,), float(dist.get_rank() + 1), device=device()) for _ in gathers]
    prefetcher = SecondaryShardPrefetcher((gather.secondary for gather in gathers), together)
    for gather, shard, can_be_read in zip(gathers, shards, readable or [True] * 3, strict=True):
        gather.prefetcher = prefetcher
        gather.secondary.source = Given(shard, can_be_read)  # type: ignore[assignment]
    return gathers, shards


@pytest.mark.parametrize(
    ("units_together", "readable", "expected"),
    [
        (0, (), [3, 2, 2]),  # a unit that is not used is prefetched in vain once
        (0, (True, False, True), [3, 2, 2]),
        (0, (True, False, False), [2, 2, 2]),
        (1.9, (), [3, 2, 2]),
        (2, (), [2, 1, 1]),
        (3, (), [1, 1, 1]),
    ],
)
def test_stale_units_are_sent_with_the_first_small_neighbours_together(
    on_ranks: OnRanks, units_together: float, readable: tuple[bool, ...], expected: list[int]
) -> None:
    def inter_node_gathers_of_forwards_without_the_last_unit() -> list[int]:
        gathers, shards = three_units(Int8(), 64, int(units_together * Int8().nbytes(64)), *readable)
        everyone: Any = dist.group.WORLD
        counts = [0]
        for _ in expected:
            for gather, shard in zip(gathers[:2], shards, strict=False):
                gather(shard, out := torch.empty(4 * 64, device=device()))
                whole = torch.arange(1.0, 5.0, device=device()).repeat_interleave(64)
                torch.testing.assert_close(out, whole, rtol=0.5 / 127, atol=0)  # half a step
            counts.append(everyone.calls["all_gather", "inter"])
            for gather in gathers:
                gather.secondary.mark_stale()
        return [after - before for before, after in pairwise(counts)]

    assert on_ranks(2, 2, inter_node_gathers_of_forwards_without_the_last_unit) == [expected] * 4


def test_what_units_send_together_is_each_ones_own(on_ranks: OnRanks) -> None:
    def deltas_of_three_units() -> tuple[list[int], list[bool]]:
        gathers, shards = three_units(Int4Delta(), 512, 2**20)
        for _ in range(3):
            for gather, shard in zip(gathers[:2], shards, strict=False):
                gather(shard, torch.empty(4 * 512, device=device()))
            for gather in gathers:
                gather.secondary.mark_stale(by_step=True)
        bases = [gather.secondary.base for gather in gathers]
        apart = [base is not None and base.untyped_storage().nbytes() == base.nbytes for base in bases]
        return [sent_by(gather) for gather in gathers], apart

    codec = Int4Delta()
    once, twice_more = codec.nbytes(512), 2 * codec.changes.nbytes(512)
    for sent, apart in on_ranks(2, 2, deltas_of_three_units):
        assert sent == [once + twice_more, once + twice_more, once]
        # One that is not sent any more must not keep the memory of those that it was sent with.
        assert apart == [False, False, True]


def test_a_model_is_sent_in_a_few_chunks_of_one_group_each(on_ranks: OnRanks) -> None:
    def check() -> None:
        for units, least, most, expected in (
            ([8] * 8, 0, 1000, [[8, 8]] * 4),
            ([8] * 9, 0, 1000, [[8, 8]] * 4 + [[8]]),
            ([8] * 8, 64, 1000, [[8] * 8]),
            ([8] * 8, 63, 1000, [[8] * 7, [8]]),
            ([8] * 8, 0, 8, [[8]] * 8),
            ([100, 4, 4, 4], 0, 1000, [[100], [4, 4, 4]]),
            ([4, 100, 4], 0, 50, [[4], [100], [4]]),
            ([8], 0, 1, [[8]]),
        ):
            sizes = {gather_of_all().secondary: size for size in units}
            chunks = in_chunks(list(sizes.items()), least_nbytes=least, most_nbytes=most)
            assert [[sizes[shard] for shard in chunk] for chunk in chunks] == expected
        assert dist.group.WORLD is not None
        ones, others = (
            [WeightGather(process_mesh(dist.group.WORLD, gpus), None, True, Traffic()).secondary for _ in range(2)]
            for gpus in (1, 2)
        )
        chunks = in_chunks([(shard, 8) for shard in (*ones, *others)], least_nbytes=1000)
        assert chunks == [ones, others]

    on_ranks(2, 2, check)


# ---- gathers that start together, beside torch's own, one by one

SHAPES = {
    (3, 5): torch.float32,
    (1,): torch.bfloat16,
    (7, 2, 2): torch.int8,
    (0, 4): torch.float32,
    (2**12,): torch.float16,
    (2, 3): torch.float32,
}


def gather_over_two_groups() -> None:
    """In a worker: gathers of several shapes and dtypes over all ranks and over pairs."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    everyone, pair = dist.group.WORLD, dist.new_subgroups(2)[0]
    assert everyone is not None
    gathers, added = AllGathers(), []
    for shape, dtype in SHAPES.items():
        for group in (everyone, pair):
            own = torch.randint(-9, 9, shape, dtype=torch.int8, generator=generator).to(device(), dtype)
            out = own.new_empty(shape[0] * group.size(), *shape[1:])
            added.append((gathers.add(out, own, group), out, own, group))
    early = gathers.add(torch.empty(4, device=device()), torch.ones(1, device=device()), everyone)
    with pytest.raises(AssertionError, match="before they start"):
        early.wait()
    gathers.start()
    for started, out, own, group in added:
        started.wait()
        started.wait()  # several tensors share what they wait for
        parts = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(parts, own, group=group)
        assert torch.equal(out, torch.cat(parts))


def test_all_gathers_that_start_together_are_those_that_start_one_by_one(pool: Callable[[int], Pool]) -> None:
    pool(4).run(gather_over_two_groups)
