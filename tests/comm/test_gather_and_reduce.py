"""Two-hop gather and two-hop reduce: laws that hold for any size, layout, dtype and codec, and over steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness.covering import over_each
from harness.models import device
from hypothesis import HealthCheck, given, settings, strategies as st
from top_k_codec import TopK
from torch import Tensor

from fsdp_zpp import Codec, Int2Delta, Int3, Int4, Int4Delta, Int8, LoCo
from fsdp_zpp.codecs import Blockwise, Delta
from fsdp_zpp.comm import hops
from fsdp_zpp.comm.error_feedback import ErrorBuffer, encode_with_feedback
from fsdp_zpp.comm.flat_layout import ExactPlaces, Extent, FlatLayout, Piece, boundaries_of, exact_places
from fsdp_zpp.comm.gradient_reduce import GradientReduce, StepWatch
from fsdp_zpp.comm.hops import AllGathers, Traffic
from fsdp_zpp.comm.mesh import ProcessMesh, process_mesh
from fsdp_zpp.comm.weight_gather import SecondaryShardPrefetcher, ShardValues, WeightGather, in_chunks

OnRanks = Callable[..., list[Any]]
LAYOUTS = [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (3, 2), (2, 3), (4, 2), (2, 4)]
"""Nodes, and ranks of each."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Half a unit in the last place, relative, of a value rounded to a dtype.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def values(
    seed: int, rank: int, numel: int, dtype: torch.dtype = torch.float32, special: float | None = None
) -> Tensor:
    """Make a rank's values: magnitudes that differ between and in blocks, and perhaps one non-finite value."""
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    x = torch.randn(numel, generator=generator) * torch.exp(2 * torch.randn(numel, generator=generator))
    x[torch.rand(numel, generator=generator) < 0.1] = 0
    if special is not None and rank == 0:
        x[seed % numel] = special
    return x.to(dtype)


def gather(codec: Codec | None, numel: int, dtypes: Any, seed: int, special: float | None = None) -> Any:
    """On a rank: what a gather leaves, twice: fresh and from the kept secondary shard."""
    shard = values(seed, dist.get_rank(), numel, dtypes[0], special).to(device())
    weights, outs = WeightGather(process_mesh(dist.group.WORLD), codec, True, Traffic()), []
    for _ in range(2):
        out = torch.full((dist.get_world_size() * numel,), 777.0, dtype=dtypes[1], device=device())
        weights(shard, out)
        outs.append(out.float().cpu().numpy())
    return outs


def reduce(codecs: Any, numel: int, dtypes: Any, seed: int, special: float | None = None) -> Any:
    """On a rank: what a reduction leaves."""
    gradient = values(seed, dist.get_rank(), dist.get_world_size() * numel, dtypes[0], special).to(device())
    out = torch.full((numel,), 777.0, dtype=dtypes[1], device=device())
    GradientReduce(process_mesh(dist.group.WORLD), *codecs, Traffic())(gradient, out)
    return out.float().cpu().numpy()


def half_steps(x: np.ndarray, codec: Codec | None, numel: int) -> np.ndarray:
    """Return half a quantization step for each element of ``x``, made of chunks of ``numel``, by the definition.

    In two bits, what the largest value of a block loses where it clips may be more.
    """
    if codec is None:
        return np.zeros_like(x)
    qmax = 2 ** (codec.bits - 1) - 1
    out = np.empty_like(x)
    for start in range(0, x.size, numel):
        for block in range(start, min(start + numel, x.size), codec.block):
            end = min(block + codec.block, start + numel)
            largest, rms = np.abs(x[block:end]).max(), np.sqrt(np.square(x[block:end]).mean())
            out[block:end] = max(rms * 0.51, largest - rms * 1.46) if codec.bits == 2 else largest / qmax / 2
    return out


codecs = st.one_of(
    st.none(),
    st.builds(Int8, st.sampled_from([32, 64, 256, 4096])),
    st.builds(Int4, st.sampled_from([32, 128, 1024])),
)
sizes = st.one_of(st.integers(1, 70), st.integers(1, 5000))
dtype_pairs = st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES))
seeds = st.integers(0, 10**6)
relaxed = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)


@relaxed
@given(layout=st.sampled_from(LAYOUTS), codec=codecs, numel=sizes, dtypes=dtype_pairs, seed=seeds)
def test_gather_is_within_half_a_step_and_equal_on_all_ranks(
    on_ranks: OnRanks, layout: tuple[int, int], codec: Any, numel: int, dtypes: Any, seed: int
) -> None:
    results = on_ranks(*layout, gather, codec, numel, dtypes, seed)
    exact = torch.cat([values(seed, rank, numel, dtypes[0]) for rank in range(len(results))]).double().numpy()
    for fresh, kept in results:
        np.testing.assert_array_equal(fresh, results[0][0])
        np.testing.assert_array_equal(kept, fresh)
    step = half_steps(exact, codec, numel)
    bound = step * (1 + 1e-4) + (np.abs(exact) + step) * ROUNDING[dtypes[1]] * 1.01 + 1e-7
    assert (np.abs(results[0][0] - exact) <= bound).all()


@relaxed
@given(layout=st.sampled_from(LAYOUTS), intra=codecs, inter=codecs, numel=sizes, dtypes=dtype_pairs, seed=seeds)
def test_reduce_is_the_mean_within_half_a_step_a_hop(
    on_ranks: OnRanks, layout: tuple[int, int], intra: Any, inter: Any, numel: int, dtypes: Any, seed: int
) -> None:
    gpus, world = layout[1], layout[0] * layout[1]
    results = on_ranks(*layout, reduce, (intra, inter), numel, dtypes, seed)
    gradients = [values(seed, rank, world * numel, dtypes[0]).double().numpy() for rank in range(world)]
    wire = ROUNDING[dtypes[0]]
    bound = np.zeros(world * numel)
    for first in range(0, world, gpus):
        node = gradients[first : first + gpus]
        partial = sum(node) / world
        error = sum(half_steps(g, intra, numel) for g in node) / world if gpus > 1 else np.zeros_like(partial)
        error = error * (1 + 1e-4) + sum(map(np.abs, node)) / world * 2.0**-22
        bound += error
        if world > gpus:
            sent = np.abs(partial) + error
            bound += half_steps(sent, inter, numel) * (1 + 1e-4) if inter else sent * wire * 1.01
    mean = sum(gradients) / world
    bound += (np.abs(mean) + bound) * (ROUNDING[dtypes[1]] * 1.01 + 2.0**-22) + 1e-7
    assert (np.abs(np.concatenate(results) - mean) <= bound).all()


@over_each(rest=False, layout=LAYOUTS[1:], codec=[None, Int8(64), Int4(64)], special=[float("nan"), -float("inf")])
def test_non_finite_values_come_through(
    on_ranks: OnRanks, layout: tuple[int, int], codec: Codec | None, special: float
) -> None:
    numel, seed, dtypes = 133, 70, (torch.bfloat16, torch.float32)
    gathered = on_ranks(*layout, gather, codec, numel, dtypes, seed, special)
    reduced = np.concatenate(on_ranks(*layout, reduce, (codec, codec), numel, dtypes, seed, special))
    for fresh, _ in gathered:
        assert not np.isfinite(fresh[seed])
        assert np.isfinite(fresh[numel:]).all()
    assert not np.isfinite(reduced[seed])
    assert np.isfinite(reduced[numel:]).all()


def test_an_fp16_mean_does_not_overflow_where_the_sum_does(on_ranks: OnRanks) -> None:
    def reduced(native: bool) -> list[float]:
        reduce = GradientReduce(process_mesh(dist.group.WORLD), None, None, Traffic(), native=native)
        gradient = torch.full((8,), 30720.0 + 1024 * dist.get_rank(), dtype=torch.float16, device=device())
        reduce(gradient, out := torch.empty(2, dtype=torch.float16, device=device()), 0.5)
        return [float(reduce.is_native), *out.tolist()]

    assert on_ranks(1, 4, reduced, True) == [[1.0, 16128.0, 16128.0]] * 4
    assert on_ranks(1, 4, reduced, False) == on_ranks(2, 2, reduced, True) == [[0.0, 16128.0, 16128.0]] * 4


# ---- parts of a reduction, and micro-batches


def parts_of(keep: str, mesh: ProcessMesh) -> tuple[int, int]:
    """Return in how many parts a gradient is cut, and which of them this rank keeps."""
    world, gpus = mesh.topology.world, mesh.topology.gpus_per_node
    return {"G": (world, mesh.rank), "I": (gpus, mesh.rank % gpus), "N": (1, 0)}[keep]


@pytest.mark.parametrize("codecs", [(None, None), (Int8(), Int4())], ids=str)
@pytest.mark.parametrize("scopes", ["GG", "II", "NN"])
def test_only_the_second_part_of_a_reduction_crosses_nodes(on_ranks: OnRanks, scopes: str, codecs: Any) -> None:
    def in_two_parts() -> tuple[set[Any], set[Any], bool]:
        mesh, everyone = process_mesh(dist.group.WORLD), dist.group.WORLD
        gradient = values(7, dist.get_rank(), parts_of(scopes[1], mesh)[0] * 60).to(device())
        outs = torch.full((2, 60), 777.0, device=device())
        arguments = {"gradient_scope": scopes[0], "optimizer_scope": scopes[1]}
        whole, halves = (GradientReduce(mesh, *codecs, Traffic(), **arguments) for _ in range(2))
        whole(gradient.clone(), outs[0])
        before = everyone.calls.copy()
        pending = halves.start(gradient.clone(), outs[1])
        first = everyone.calls - before
        pending()
        return first, everyone.calls - before - first, torch.equal(*outs)

    for first, second, same in on_ranks(2, 2, in_two_parts):
        assert first == {("all_to_all", "intra"): 1}
        assert second["all_to_all", "inter"] == 1
        assert not second["all_to_all", "intra"]
        assert same


A, B = Piece(0, "a", 40), Piece(1, "b", 24)


@pytest.mark.parametrize("codecs", [(None, None), (Int8(32), Int4(32))], ids=str)
@pytest.mark.parametrize("earlier", [None, [A, B], [B]], ids=["no layout", "alike", "wider"])
def test_a_micro_batch_may_have_more_parameters_than_earlier_ones(
    on_ranks: OnRanks, earlier: list[Piece] | None, codecs: Any
) -> None:
    def reduced(late: bool) -> Tensor:
        reduce, world = GradientReduce(process_mesh(dist.group.WORLD), *codecs, Traffic()), dist.get_world_size()
        first, both = (None if each is None else FlatLayout.dense(each) for each in (earlier, earlier and [A, B]))
        numel = 64 if first is None else first.numel
        reduce.accumulate(values(1, dist.get_rank(), world * numel).to(device()), first)()
        sums = reduce.accumulated.sums
        assert sums is not None
        arrived = sums.clone()
        if late:
            sums.fill_(torch.nan)
        out = torch.empty(64, device=device())
        pending = reduce.start(values(2, dist.get_rank(), world * 64).to(device()), out, 1.0, both, 4.0)
        sums.copy_(arrived)
        pending()
        alone = torch.empty(64, device=device())
        reduce.start(values(2, dist.get_rank(), world * 64).to(device()), alone, 1.0, both)()
        alone[64 - numel :] += arrived / 4
        torch.testing.assert_close(out, alone, rtol=1e-6, atol=1e-7)
        return out.cpu()

    in_time, late = (on_ranks(2, 2, reduced, late) for late in (False, True))
    assert all(torch.equal(*each) for each in zip(in_time, late, strict=True))


# ---- small parameters

PIECES = [Piece(0, "matrix", 151), Piece(1, "bias", 6), Piece(2, "other", 100), Piece(3, "norm", 3)]
EXACT = [False, True, False, True]
LAYOUT = FlatLayout.dense(PIECES, EXACT)
AT_THE_END = FlatLayout.dense([Piece(0, "matrix", 252), Piece(1, "bias", 5), Piece(2, "norm", 3)], [False, True, True])
"""Fills a tail, so that a view reaches it."""


class Given:
    """Source of a shard that is there at any time, or that can't be read ahead."""

    def __init__(self, shard: Tensor, layout: FlatLayout | None = None, can_be_read: bool = True) -> None:
        self._shard, self._layout, self._can_be_read = shard, layout or FlatLayout.dense(()), can_be_read

    def can_be_read(self) -> bool:
        return self._can_be_read

    def prepare_read(self) -> int:
        return self._shard.numel()

    def read(self) -> ShardValues:
        return ShardValues([self._shard], self._shard.numel(), None, True)

    def is_trained(self) -> bool:
        return True

    def layout(self, numel: int) -> FlatLayout:
        return self._layout

    def shard_version(self) -> None:
        return None


@pytest.mark.parametrize(("blocks", "first"), [((64, 96), 0), ((32, 64), 64), ((1, 1), 120), ((64, 0), 0)])
def test_no_block_of_any_codec_spans_a_boundary_of_another_parallelism(blocks: tuple[int, ...], first: int) -> None:
    extent = Extent(LAYOUT.numel, (0,), replace(LAYOUT, exact=()))
    codecs: Any = [Mock(block_numel=block, mixes_values=False) for block in blocks]
    boundaries = boundaries_of(replace(LAYOUT, boundaries=(120,)), codecs)
    places = exact_places(extent, boundaries, (0,), device())
    assert sorted({*places.key} if places else ()) == list(range(first, 120))


@pytest.mark.parametrize("starts", [(5,), (0, 40, 80), (10, 90, 50, 130), (0, 40, 70), (40, 0)], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_places_that_a_view_reaches_are_those_of_its_elements(starts: tuple[int, ...], padded: bool) -> None:
    indices = torch.tensor(starts)[:, None] + (torch.tensor([0, 1, 2, 0]) if padded else torch.arange(4))
    places = ExactPlaces(indices, device())
    assert (places.strides is None) == (padded or starts in {(0, 40, 70), (40, 0)})
    if places.strides is not None:
        flat = torch.arange(160).as_strided(places.shape, places.strides, places.start)
        assert torch.equal(flat.reshape(indices.shape), indices)


def cut(into: FlatLayout | None, parts: int) -> tuple[FlatLayout, Tensor]:
    """Return the layout of a tensor in so many parts, and where it has small parameters.

    Each part has its share of each parameter, or, if ``into`` is None, parameters follow each other and are cut
    anywhere.
    """
    units, of_unit = ((3 if parts == 3 else 2), LAYOUT) if into is None else (parts, into)
    pieces = [piece._replace(order=n) for n, piece in enumerate(PIECES * units)]
    marks = torch.zeros(units, LAYOUT.numel, dtype=torch.bool, device=device())
    for start, stop in of_unit.exact:
        marks[:, start:stop] = True
    return into or FlatLayout.dense(pieces, EXACT * units), marks.view(-1)


def uneven(seed: int, marks: Tensor) -> Tensor:
    """Values in which small parameters are a 10,000th of what they share blocks with, or 10,000 times as large."""
    generator = torch.Generator().manual_seed(seed)
    signs, sizes = torch.randn(len(marks), generator=generator).sign(), torch.rand(len(marks), generator=generator)
    of_small = 10.0 ** (8 * (torch.arange(len(marks)) % 2) - 4)
    return torch.where(marks, of_small.to(marks.device), (signs * (sizes + 0.5)).to(marks.device))


CUTS = [None, LAYOUT, AT_THE_END]


def within_more(values: Tensor) -> Tensor:
    """Return a copy of flat values that is a part of a larger tensor."""
    return torch.cat([values.new_full((64,), torch.nan), values])[64:]


@pytest.mark.parametrize("into", CUTS, ids=["anywhere", "inside", "at the end"])
@pytest.mark.parametrize("codec", [Int8(64), Int4(32), Int4Delta(32, Int8(64)), Int2Delta(32, Int8(64))], ids=str)
def test_small_weights_are_gathered_exactly_and_shards_stay_as_they_are(
    on_ranks: OnRanks, codec: Codec, into: FlatLayout | None
) -> None:
    def gathered() -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        layout, marks = cut(into, world)
        weights = WeightGather(process_mesh(dist.group.WORLD), codec, True, Traffic())
        for step in range(3):
            every = uneven(0, marks) + 0.01 * uneven(step, marks)
            own, out = within_more(every.view(world, -1)[rank]), within_more(torch.empty_like(every))
            weights.secondary.source = Given(own, layout)  # type: ignore[assignment]
            weights.secondary.mark_stale(by_step=True)
            weights(own, out)
            assert torch.equal(own, every.view(world, -1)[rank])
            assert torch.equal(out[marks], every[marks])
            assert 0 < (out - every).abs().max() < 0.2

    on_ranks(2, 2, gathered)


@over_each(
    rest=False,
    layout=[(2, 2), (3, 1), (1, 2)],
    keep=["G", "I", "N"],
    codecs=[(Int8(64), Int4(32)), (None, Int4(32)), (Int8(64), None), (Int8(64), Int3(32))],
)
def test_small_gradients_are_reduced_exactly(
    on_ranks: OnRanks, keep: str, layout: tuple[int, int], codecs: Any
) -> None:
    def reduced(into: FlatLayout | None, has_earlier: bool) -> None:
        mesh = process_mesh(dist.group.WORLD)
        parts, own = parts_of(keep, mesh)
        of_gradient, marks = cut(into, parts)
        gradients = [uneven(rank, marks) * (1 + rank) for rank in range(dist.get_world_size())]
        reduce = GradientReduce(mesh, *codecs, Traffic(), gradient_scope="I", optimizer_scope=keep)
        if has_earlier:
            reduce.accumulate(gradients[mesh.rank].clone(), of_gradient)()
        out = within_more(torch.empty(len(marks) // parts, device=device()))
        reduce.start(within_more(gradients[mesh.rank]), out, 0.5, of_gradient)()
        mean = torch.stack(gradients).double().mean(0).view(parts, -1)[own] * (1.0 if has_earlier else 0.5)
        is_small = marks.view(parts, -1)[own]
        torch.testing.assert_close(out[is_small].double(), mean[is_small], rtol=1e-6, atol=0)
        assert (out - mean).square().mean() < 0.1  # what is encoded is near

    for into, has_earlier in product(CUTS, (False, True)):
        on_ranks(*layout, reduced, into, has_earlier)


def test_wrong_sizes_are_errors_before_any_collective(on_ranks: OnRanks) -> None:
    def wrong_sizes() -> None:
        mesh, everyone = process_mesh(dist.group.WORLD), dist.group.WORLD
        with pytest.raises(ValueError, match="10 values, got 11"):
            WeightGather(mesh, None, False, Traffic())(torch.ones(5), torch.empty(11))
        with pytest.raises(ValueError, match=r"10 values, got 11.*another process group"):
            GradientReduce(mesh, None, None, Traffic())(torch.ones(11), torch.empty(5))
        with pytest.raises(ValueError, match=r"a world of 2 and gpus_per_node=3; allowed are \[1, 2\]"):
            process_mesh(everyone, 3)
        assert not everyone.calls

    on_ranks(2, 1, wrong_sizes)


# ---- secondary shards over the steps of a training

DELTAS = Int4Delta(64, whole=Int8(64))
IN_TWO_BITS = Int2Delta(64, whole=Int8(64))
DELTA_NUMEL = 333


def gather_of_all(codec: Codec | None = DELTAS) -> WeightGather:
    """On a rank: the gather of a unit over all ranks, as launched."""
    return WeightGather(process_mesh(dist.group.WORLD), codec, True, Traffic())


def sent_by(gather: WeightGather) -> int:
    """The bytes that a gather has sent between nodes."""
    assert gather.secondary.hop is not None
    return gather.secondary.hop.traffic.sent.get(("gather", "inter"), 0)


def followed(dtype: torch.dtype, codec: Delta) -> list[tuple[float, Tensor]]:
    """On a rank: over 12 steps of a walk, the error of what is gathered against its bound, and what is gathered.

    The bound: half a step of the change, against what was held, and half one of the 8 bits that it is kept in.
    """
    world, gather = dist.get_world_size(), gather_of_all(codec)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(world, DELTA_NUMEL, generator=generator)
    held = torch.zeros(world, DELTA_NUMEL)
    results = []

    def half_step(values: Tensor, codec: Blockwise) -> Tensor:
        return 1.02 * torch.from_numpy(half_steps(values.numpy(), codec, DELTA_NUMEL))

    for step in range(12):
        out = torch.empty(world * DELTA_NUMEL, dtype=dtype, device=device())
        gather(weights[dist.get_rank()].to(device()), out)
        now = out.float().cpu().view(world, DELTA_NUMEL)
        rounding = now.abs() * torch.finfo(dtype).eps
        worst = 0.0
        for rank in range(world):
            bound = half_step(now[rank], codec.whole) + rounding[rank]
            if step:
                bound += half_step(weights[rank] - held[rank], codec.changes) + 2 * rounding[rank]
            worst = max(worst, ((now[rank] - weights[rank]).abs() / bound.clamp(min=1e-30)).max().item())
        results.append((worst, now))
        held = now
        weights = weights + 0.01 * torch.randn(world, DELTA_NUMEL, generator=generator)
        gather.secondary.mark_stale(by_step=True)
    return results


@over_each(
    rest=False,
    dtype=[torch.float32, torch.bfloat16],
    layout=[(2, 2), (4, 1)],
    codec={"int4": DELTAS, "int2": IN_TWO_BITS},
)
def test_gathered_weights_stay_within_half_a_step_of_the_true_ones(
    on_ranks: OnRanks, layout: tuple[int, int], dtype: torch.dtype, codec: Delta
) -> None:
    first, *others = on_ranks(*layout, followed, dtype, codec)
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
            gather(torch.ones(DELTA_NUMEL, device=device()), torch.empty(4 * DELTA_NUMEL, device=device()))
            sent.append(sent_by(gather))
        return [after - before for before, after in pairwise(sent)]

    whole, change = Int8(64).nbytes(DELTA_NUMEL), Int4(64).nbytes(DELTA_NUMEL)
    assert on_ranks(2, 2, after_events) == [[whole, change, whole, 0]] * 4


# ---- the order of reductions


def test_units_reduce_in_the_order_of_the_last_synchronized_backward() -> None:
    first, second, third = units = [Mock(takes_part=True) for _ in range(3)]
    watch = StepWatch(units, Mock())
    assert [watch.finished(unit) for unit in (second, third, first)] == [[], [third, second], [first]]
    watch.synchronized += [first, third, second]
    assert watch.remaining() == []
    assert [watch.finished(unit) for unit in (second, first)] == [[], [first]]
    assert watch.remaining() == [third, second]


# ---- prefetching


def three_units(codec: Codec, numel: int, together: int, *readable: bool) -> tuple[list[WeightGather], list[Tensor]]:
    """On a rank: gathers with one prefetcher, and shards that have the rank's number as their values."""
    gathers = [gather_of_all(codec) for _ in range(3)]
    shards = [torch.full((numel,), float(dist.get_rank() + 1), device=device()) for _ in gathers]
    prefetcher = SecondaryShardPrefetcher((gather.secondary for gather in gathers), together)
    for gather, shard, can_be_read in zip(gathers, shards, readable or [True] * 3, strict=True):
        gather.prefetcher = prefetcher
        gather.secondary.source = Given(shard, can_be_read=can_be_read)  # type: ignore[assignment]
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
            ([8] * 9, 0, 1000, [[8, 8]] * 4 + [[8]]),
            ([8] * 8, 64, 1000, [[8] * 8]),
            ([8] * 8, 63, 1000, [[8] * 7, [8]]),
            ([8] * 8, 0, 8, [[8]] * 8),
            ([100, 4, 4, 4], 0, 1000, [[100], [4, 4, 4]]),
            # Units larger than the first limit: alone at both ends, together where others are sent or compute.
            ([25] * 25, 0, 64, [[25]] * 2 + [[25, 25]] * 10 + [[25]] * 3),
            ([8] * 40, 0, 64, [[8] * count for count in (2, 2, *[3] * 11, 2, 1)]),
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


@over_each(rest=False, keep=["G", "I", "N"], codec=[Int4(32), Int3(32)], gpus=[1, 2])
def test_parameters_that_no_rank_uses_come_as_zeros(on_ranks: OnRanks, keep: str, codec: Codec, gpus: int) -> None:
    def reduced() -> None:
        mesh, numel = process_mesh(dist.group.WORLD), USED.numel
        gradient = uneven(mesh.rank, torch.zeros(parts_of(keep, mesh)[0] * numel, dtype=torch.bool))
        unused = USED.runs(["at times"])
        for begin, end in unused:
            gradient.view(-1, numel)[:, begin:end] = 0
        out = torch.empty(numel, device=device())
        GradientReduce(mesh, Int8(64), codec, Traffic(), optimizer_scope=keep).start(gradient, out, layout=USED)()
        assert all(not out[begin:end].any() for begin, end in unused)
        assert out.any()

    on_ranks(4 // gpus, gpus, reduced)


# ---- error feedback: what codecs leave out does not build up

CPU = torch.device("cpu")
FED_BACK = {"inter": (None, Int4(32)), "both": (Int8(64), Int4(32))}
"""For each setting, codecs whose errors are all fed back."""
USED = FlatLayout.dense([Piece(0, "always", 150), Piece(1, "at times", 100), Piece(2, "on one rank", 83)])
FLUSHES = 30
"""Steps without gradients, in which errors halve at least."""


def gradient_of(step: int, rank: int, numel: int) -> Tensor:
    """Make a noisy gradient, other noise on each rank."""
    fixed = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    noisy = torch.randn(numel, generator=torch.Generator().manual_seed(1000 * step + rank + 2))
    return fixed + 0.3 * noisy


def idle_on(step: int, rank: int) -> list[str]:
    """The parameters of ``USED`` that a rank does not use in a step."""
    return ["at times"] * (step % 2) + ["on one rank"] * (step % 3 == 2 or rank != step % 4)


def sums_of_steps(keep: str, config: LoCo, dtype: torch.dtype) -> tuple[float, float, list[float]]:
    """On a rank: how far what came is from the exact means after steps, and after others whose gradients are zeros.

    At last, the largest values that came for parameters which no rank had used.
    """
    mesh, numel = process_mesh(dist.group.WORLD), USED.numel
    (parts, own_part), world = parts_of(keep, mesh), mesh.topology.world
    reduce = GradientReduce(mesh, *FED_BACK[config.hops], Traffic(), optimizer_scope=keep, error_feedback=config)
    off, idle_came, offs = torch.zeros(numel).double(), [], []
    for step in range(12 + FLUSHES):
        gradients = [gradient_of(step, rank, parts * numel).to(dtype) * (step < 12) for rank in range(world)]
        idle = [idle_on(step, rank) if step < 12 else [] for rank in range(world)]
        for gradient, names in zip(gradients, idle, strict=True):
            for begin, end in USED.runs(names):
                gradient.view(-1, numel)[:, begin:end] = 0
        out, own = torch.empty(numel, device=device()), gradients[mesh.rank].to(device())
        reduce.start(own, out, layout=USED, idle=idle[mesh.rank])()
        off += out.cpu().double() - torch.stack(gradients).double().mean(0).view(parts, numel)[own_part]
        offs.append(off.abs().max().item())
        for begin, end in USED.runs(set.intersection(*map(set, idle))):
            idle_came.append(out[begin:end].abs().max().item())
    return offs[11], offs[-1], idle_came


# One node, or one GPU a node, turns scope I into another one, and one node alone leaves nothing between nodes.
WHERE_ERRORS_ARE = [
    *((gpus, keep, "both") for gpus in (1, 2, 4) for keep in "GIN" if gpus == 2 or keep != "I"),
    *((gpus, keep, "inter") for gpus, keep in ((1, "G"), (1, "N"), (2, "I"))),
]


@over_each(rest=False, shape=WHERE_ERRORS_ARE, beta=[0.0, 0.5], dtype=[torch.float32, torch.bfloat16])
def test_what_is_left_out_comes_later_also_of_parameters_that_ranks_do_not_use_meanwhile(
    on_ranks: OnRanks, shape: tuple[int, str, Any], beta: float, dtype: torch.dtype
) -> None:
    """A parameter that no rank uses comes as zeros."""
    gpus, keep, hops = shape
    if hops == "inter" and gpus > 1:
        dtype = torch.float32  # since what goes inside a node is rounded, too
    for before, after, idle_came in on_ranks(4 // gpus, gpus, sums_of_steps, keep, LoCo(beta=beta, hops=hops), dtype):
        assert before > 1e-3
        assert after < 2e-5
        assert idle_came
        assert max(idle_came) == 0


@pytest.mark.parametrize("codec", [None, Int8(128)], ids=str)
@pytest.mark.parametrize("numel", [USED.numel, 160])
def test_idle_errors_do_not_decay_and_are_not_rounded_again_and_again(codec: Int8 | None, numel: int) -> None:
    """Neighbours in their blocks grow in every step, and chunks may cut the layout anywhere."""
    buffer, extent = ErrorBuffer(0.0, codec, decay=0.9), Extent(numel, (0, numel % USED.numel), USED)
    marks = extent.marked(["at times"], CPU)
    assert marks is not None
    before = torch.empty(0)
    for step in range(60):
        values, idle = (1 + step) * gradient_of(step, 0, 2 * numel), step > 3
        if idle:
            values[marks] = 0
        if step == 4:
            before = buffer.read()[marks].clone()
        encode_with_feedback(Int4(32), values, 1, 2, buffer.prepare(extent, CPU, ["at times"] if idle else []))
    after = buffer.read()
    # In int8, at most one unit of the last scale; the largest error in a block is 127 units.
    assert (after[marks] - before).abs().max() <= (0 if codec is None else after.abs().max() / 127)
    assert before.abs().max() > 0


@pytest.mark.parametrize("dtype", [None, Int8(128)], ids=["fp32", "int8"])
@pytest.mark.parametrize("codec", [TopK(0.05, 4, 128), Int8(128)], ids=["without a kernel", "with a kernel"])
def test_errors_decay_once_each_time_they_are_used(codec: Codec, dtype: Int8 | None) -> None:
    one, other = Piece(0, "one", 256), Piece(1, "other", 256)
    both, alone = FlatLayout((one, other), (0, 256), 512), FlatLayout((one,), (0,), 256)
    values, buffer, errors = gradient_of(0, 0, 512), ErrorBuffer(0.0, dtype, 0.45), []
    for layout in (both, alone, alone, both):
        prepared = buffer.prepare(Extent(layout.numel, (0,), layout), CPU)
        errors.append(prepared.read().clone())
        if dtype is not None:  # scales stay short enough for exact products
            assert not (dtype.scales(prepared.state, layout.numel).view(torch.int32) & 0xFF).any()
        if layout is both:  # the first is sent no more, and its errors decay alone
            payload = encode_with_feedback(codec, values.clone(), 1, 1, prepared)
            if len(errors) == 1:
                codec.decode(payload, left_out := torch.empty(512), 1, 1)
                left_out = values - left_out
    first, second, third, fourth = errors
    assert not first.any()
    assert second.any()
    assert torch.allclose(third, 0.45 * second, rtol=1e-3, atol=0)
    assert torch.allclose(fourth[:256], 0.45**2 * second, rtol=2e-2, atol=1e-4)
    rounding = 0 if dtype is None else left_out.abs().max() / 127
    assert ((fourth[256:] - 0.45 * left_out[256:]).abs() <= rounding + 1e-7).all()


def test_errors_are_read_in_fp32_whatever_torchs_default_dtype_is() -> None:
    layout = FlatLayout((Piece(0, "one", 256),), (0,), 256)
    torch.set_default_dtype(torch.bfloat16)
    try:
        errors = ErrorBuffer(0.0, Int8(128), 1.0).prepare(Extent(256, (0,), layout), CPU).read()
    finally:
        torch.set_default_dtype(torch.float32)
    assert errors.dtype == torch.float32


# ---- all-gathers that start together


def test_what_all_gathers_send_is_kept_until_they_are_waited_for() -> None:
    own, gathers, works = torch.ones(4), AllGathers(), Mock()
    sent = weakref.ref(own)
    # In place of collectives on a CPU, which keep tensors themselves, as NCCL's need not.
    with (
        patch.object(hops, "_coalescing_manager", lambda group, async_ops: nullcontext(works)),
        patch.object(dist, hops.ALL_GATHER, lambda out, own, group: None),
    ):
        started = gathers.add(torch.empty(8), own, Mock())
        del own
        gathers.start()
    assert sent() is not None
    works.wait.side_effect = lambda: sent() is not None or pytest.fail("it is gone before it has arrived")
    started.wait()
    works.wait.assert_called_once_with()
    assert sent() is None
