"""Two-hop gather and two-hop reduce: laws that hold for any size, layout, dtype and codec."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness.covering import over_each
from harness.models import device
from harness.pool import SHARE_GPUS, Pool, device_type
from harness.wiretap import wiretap
from hypothesis import HealthCheck, given, settings, strategies as st

from fsdp_zpp import Codec, Int4, Int8
from fsdp_zpp.collectives.gradient_reduce import GradientReduce
from fsdp_zpp.collectives.hops import Traffic
from fsdp_zpp.collectives.mesh import process_mesh
from fsdp_zpp.collectives.secondary_shard import StaleSecondaryError
from fsdp_zpp.collectives.weight_gather import WeightGather

LAYOUTS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (6, 2), (6, 3), (8, 2), (8, 4)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# Half a unit in the last place, relative, of a value rounded to a dtype.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
WORLD = 8 if device_type() == "cpu" or SHARE_GPUS in os.environ else min(8, torch.cuda.device_count())


def values(seed: int, rank: int, numel: int, dtype: torch.dtype, special: float | None) -> torch.Tensor:
    """Make a rank's values: magnitudes that differ between and in blocks, and perhaps one non-finite value."""
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    x = torch.randn(numel, generator=generator) * torch.exp(2 * torch.randn(numel, generator=generator))
    x[torch.rand(numel, generator=generator) < 0.1] = 0
    if special is not None and rank == 0:
        x[seed % numel] = special
    return x.to(dtype)


def gather(layout: tuple[int, int], codec: Codec | None, numel: int, dtypes: Any, seed: int, special: Any) -> Any:
    """In a worker: what a gather leaves on this rank, twice: fresh and from the kept secondary shard."""
    shard = values(seed, dist.get_rank(), numel, dtypes[0], special).to(device())
    weights = WeightGather(process_mesh(dist.group.WORLD, layout[1]), codec, True, Traffic())
    outs = []
    for _ in range(2):
        out = torch.full((layout[0] * numel,), 777.0, dtype=dtypes[1], device=device())
        weights(shard, out)
        outs.append(out.float().cpu().numpy())
    return outs


def reduce(layout: tuple[int, int], codecs: Any, numel: int, dtypes: Any, seed: int, special: Any) -> Any:
    """In a worker: what a reduction leaves on this rank."""
    world, gpus_per_node = layout
    gradient = values(seed, dist.get_rank(), world * numel, dtypes[0], special).to(device())
    out = torch.full((numel,), 777.0, dtype=dtypes[1], device=device())
    GradientReduce(process_mesh(dist.group.WORLD, gpus_per_node), *codecs, Traffic())(gradient, out)
    return out.float().cpu().numpy()


def half_steps(x: np.ndarray, codec: Codec | None, numel: int) -> np.ndarray:
    """Return half a quantization step for each element of ``x``, made of chunks of ``numel``, by the definition."""
    if codec is None:
        return np.zeros_like(x)
    qmax = 2 ** (codec.bits - 1) - 1
    out = np.empty_like(x)
    for start in range(0, x.size, numel):
        for block in range(start, min(start + numel, x.size), codec.block):
            end = min(block + codec.block, start + numel)
            out[block:end] = np.abs(x[block:end]).max() / qmax / 2
    return out


codecs = st.one_of(
    st.none(),
    st.builds(Int8, st.sampled_from([32, 64, 256, 4096])),
    st.builds(Int4, st.sampled_from([32, 128, 1024])),
)
layouts = st.sampled_from([layout for layout in LAYOUTS if layout[0] <= WORLD])
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
@given(layout=layouts, codec=codecs, numel=sizes, dtypes=dtype_pairs, seed=seeds)
def test_gather_is_within_half_a_step_and_equal_on_all_ranks(
    pool: Callable[[int], Pool], layout: Any, codec: Any, numel: int, dtypes: Any, seed: int
) -> None:
    results = pool(layout[0]).run(gather, layout, codec, numel, dtypes, seed, None)
    exact = torch.cat([values(seed, rank, numel, dtypes[0], None) for rank in range(layout[0])]).double().numpy()
    for fresh, kept in results:
        np.testing.assert_array_equal(fresh, results[0][0])
        np.testing.assert_array_equal(kept, fresh)
    step = half_steps(exact, codec, numel)
    bound = step * (1 + 1e-4) + (np.abs(exact) + step) * ROUNDING[dtypes[1]] * 1.01 + 1e-7
    assert (np.abs(results[0][0] - exact) <= bound).all()


@relaxed
@given(layout=layouts, intra=codecs, inter=codecs, numel=sizes, dtypes=dtype_pairs, seed=seeds)
def test_reduce_is_the_mean_within_half_a_step_a_hop(
    pool: Callable[[int], Pool], layout: Any, intra: Any, inter: Any, numel: int, dtypes: Any, seed: int
) -> None:
    world, gpus = layout
    results = pool(world).run(reduce, layout, (intra, inter), numel, dtypes, seed, None)
    gradients = [values(seed, rank, world * numel, dtypes[0], None).double().numpy() for rank in range(world)]
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


@over_each(
    layout=[layout for layout in LAYOUTS if 2 <= layout[0] <= WORLD],
    codec_and_special=list(product([None, Int8(64), Int4(64)], [float("nan"), float("inf"), -float("inf")])),
)
def test_non_finite_values_come_through(
    pool: Callable[[int], Pool], layout: Any, codec_and_special: tuple[Codec | None, float]
) -> None:
    (codec, special), numel, seed = codec_and_special, 133, 70
    dtypes = (torch.bfloat16, torch.float32)
    gathered = pool(layout[0]).run(gather, layout, codec, numel, dtypes, seed, special)
    reduced = np.concatenate(pool(layout[0]).run(reduce, layout, (codec, codec), numel, dtypes, seed, special))
    for fresh, _ in gathered:
        assert not np.isfinite(fresh[seed])
        assert np.isfinite(fresh[numel:]).all()
    assert not np.isfinite(reduced[seed])
    assert np.isfinite(reduced[numel:]).all()


def in_two_parts(gpus_per_node: int, scopes: tuple[str, str], codecs: Any, parts: int) -> Any:
    """In a worker: where a reduction's two parts send, and what comes of them and of a whole one."""
    gradient = values(7, dist.get_rank(), parts * 60, torch.float32, None).to(device())
    outs = torch.full((2, 60), 777.0, device=device())
    arguments = {"gradient_scope": scopes[0], "optimizer_scope": scopes[1]}
    whole, halves = (
        GradientReduce(process_mesh(dist.group.WORLD, gpus_per_node), *codecs, Traffic(), **arguments) for _ in range(2)
    )
    whole(gradient.clone(), outs[0])
    with wiretap(gpus_per_node) as first:
        pending = halves.start(gradient.clone(), outs[1])
    with wiretap(gpus_per_node) as second:
        pending.finish()
    return first.order, second.order, torch.equal(*outs)


@pytest.mark.parametrize("codecs", [(None, None), (Int8(), Int4())], ids=str)
@pytest.mark.parametrize(("scopes", "parts"), [(("G", "G"), 4), (("I", "I"), 2), (("N", "N"), 1)])
def test_only_the_second_part_of_a_reduction_crosses_nodes(
    pool: Callable[[int], Pool], scopes: tuple[str, str], parts: int, codecs: Any
) -> None:
    for first, second, same in pool(4).run(in_two_parts, 2, scopes, codecs, parts):
        assert first == [("all_to_all", "intra")]
        assert second[0] == ("all_to_all", "inter")
        assert same


def stale_gather() -> str:
    """In a worker: gather, write without an event, gather again."""
    weights = WeightGather(process_mesh(dist.group.WORLD, 1), Int8(), True, Traffic(), label="layers.0")
    shard, out = torch.ones(5, device=device()), torch.empty(10, device=device())
    weights(shard, out, shard._version)
    shard.mul_(2)
    try:
        weights(shard, out, shard._version)
    except StaleSecondaryError as error:
        weights.secondary.mark_stale()
        weights(shard, out, shard._version)
        torch.testing.assert_close(out, torch.full_like(out, 2.0), rtol=0.5 / 127, atol=0)  # half a step
        return str(error)
    return "no error"


def test_an_unannounced_write_is_an_error(pool: Callable[[int], Pool]) -> None:
    for message in pool(2).run(stale_gather):
        assert "layers.0" in message
        assert "fsdp_zpp.invalidate(model)" in message


def wrong_sizes() -> list[str]:
    """In a worker: the errors of a gather and a reduction whose sizes don't fit."""
    mesh = process_mesh(dist.group.WORLD, 1)
    messages = []
    for attempt in (
        lambda: WeightGather(mesh, None, False, Traffic())(torch.ones(5), torch.empty(11)),
        lambda: GradientReduce(mesh, None, None, Traffic())(torch.ones(11), torch.empty(5)),
        lambda: process_mesh(dist.group.WORLD, 3),
    ):
        with pytest.raises(ValueError, match=r"needs|divisible") as caught:
            attempt()
        messages.append(str(caught.value))
    return messages


def test_wrong_sizes_are_errors_before_any_collective(pool: Callable[[int], Pool]) -> None:
    for gathering, reducing, layout in pool(2).run(wrong_sizes):
        assert "10 values, got 11" in gathering
        assert "10 values, got 11" in reducing
        assert "another process group" in reducing
        assert "a world of 2 and gpus_per_node=3; allowed are [1, 2]" in layout
