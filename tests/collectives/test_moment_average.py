"""Averages of moments over nodes beside the mean that plain torch makes, and what their encoding may change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.models import device
from harness.pool import Pool
from harness.wiretap import wiretap
from torch import Tensor

from fsdp_zpp import Codec, Int8
from fsdp_zpp.collectives.hops import Traffic
from fsdp_zpp.collectives.mesh import process_mesh
from fsdp_zpp.collectives.moment_average import MomentAverage

SHAPES = [(33, 7), (5,), (1, 2), (0, 3), (700,)]
LAYOUTS = [(4, 1), (4, 2)]
"""Ranks, and how many are on a node."""
over_layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout[0] // layout[1]} nodes")
HALF_CODE = 1.0001 / 254


def moments_of(rank: int, kind: str) -> dict[str, Tensor]:
    """First moments of a rank, or second ones, over twelve orders of magnitude."""
    generator = torch.Generator().manual_seed(rank)
    values = [10 ** (6 * torch.rand(shape, generator=generator) - 6) for shape in SHAPES]
    signs = [torch.randn(shape, generator=generator).sign() for shape in SHAPES]
    made = [one.square() if kind == "second" else one * sign for one, sign in zip(values, signs, strict=True)]
    return {str(index): each for index, each in enumerate(made)}


def averaged(
    codec: Codec | None, gpus_per_node: int, kind: str, dtype: torch.dtype
) -> tuple[dict[str, Tensor], int, dict[Any, int]]:
    """In a worker: what this rank holds afterwards, the bytes sent between nodes, and those that were counted."""
    traffic = Traffic()
    average = MomentAverage(process_mesh(dist.group.WORLD, gpus_per_node), codec, traffic, "unit")
    moments = {name: each.to(device(), dtype) for name, each in moments_of(dist.get_rank(), kind).items()}
    with wiretap(gpus_per_node) as tap:
        average.average(moments, dict.fromkeys(moments, ()))
    return {name: each.cpu() for name, each in moments.items()}, tap.total("inter"), traffic.sent


def root(moment: Tensor) -> Tensor:
    return moment.sign() * moment.abs() ** 0.25


def power(root: Tensor) -> Tensor:
    return root.sign() * root**4


@over_layouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_without_a_codec_it_is_the_mean(
    pool: Callable[[int], Pool], layout: tuple[int, int], dtype: torch.dtype
) -> None:
    results = pool(4).run(averaged, None, layout[1], "first", dtype)
    for rank, (found, *_) in enumerate(results):
        of_nodes = [moments_of(other, "first") for other in range(rank % layout[1], 4, layout[1])]
        for name, value in found.items():
            each = torch.stack([node[name].to(dtype).double() for node in of_nodes])
            # Each sum in fp32 is rounded, and then the mean is, to the moments' dtype.
            rounding = len(each) * torch.finfo(torch.float32).eps * each.abs().mean(0)
            assert ((value - each.mean(0)).abs() <= rounding + torch.finfo(dtype).eps * each.mean(0).abs()).all()
            assert torch.equal(value, results[rank % layout[1]][0][name])


@over_layouts
@pytest.mark.parametrize("kind", ["first", "second"])
def test_int8_is_off_by_no_more_than_half_a_code_of_the_roots_each_way(
    pool: Callable[[int], Pool], layout: tuple[int, int], kind: str
) -> None:
    results = pool(4).run(averaged, Int8(128), layout[1], kind, torch.float32)
    for rank, (found, *_) in enumerate(results):
        of_nodes = [moments_of(other, kind) for other in range(rank % layout[1], 4, layout[1])]
        largest = max(root(each).abs().max().item() for node in of_nodes for each in node.values() if each.numel())
        for name, value in found.items():
            assert torch.equal(value, results[rank % layout[1]][0][name])  # bit for bit
            bounds = []
            for off in (-HALF_CODE * largest, HALF_CODE * largest):
                sent = torch.stack([power(root(node[name].double()) + off) for node in of_nodes])
                bounds.append(power(root(sent.mean(0)) + off))
            assert (bounds[0] <= value).all()
            assert (value <= bounds[1]).all()
            assert kind == "first" or (value > 0).all()


def as_many_as(codec: Codec | None, layout: tuple[int, int]) -> int:
    nodes = layout[0] // layout[1]
    chunk = sum(-(-each.numel() // nodes) for each in moments_of(0, "first").values())
    return (nodes - 1) * (4 * chunk if codec is None else codec.nbytes(chunk))


@over_layouts
@pytest.mark.parametrize("codec", [None, Int8(128)], ids=str)
def test_each_byte_between_nodes_is_counted(
    pool: Callable[[int], Pool], layout: tuple[int, int], codec: Codec | None
) -> None:
    for _, sent, counted in pool(4).run(averaged, codec, layout[1], "first", torch.float32):
        assert counted == dict.fromkeys([("reduce", "inter"), ("gather", "inter")], as_many_as(codec, layout))
        assert sent == sum(counted.values())


def largest_updates(unseen: float) -> tuple[float, float]:
    """In a worker: Adam's largest update before and after an exchange, of 64 rows of which each node saw every other.

    Args:
        unseen: The second moment of the others, as a share of those seen.
    """
    generator = torch.Generator().manual_seed(dist.get_rank())
    gradients = torch.randn(64, 128, generator=generator) * 10 ** (4 * torch.rand(64, 128, generator=generator) - 4)
    gradients[dist.get_rank() % 2 :: 2] *= unseen**0.5
    first, second = 0.1 * gradients.to(device()), 0.001 * gradients.square().to(device())
    before = updates(first, second)
    average = MomentAverage(process_mesh(dist.group.WORLD, 1), Int8(128), Traffic(), "unit")
    for moment in (first, second):
        average.average({"rows": moment}, {"rows": ()})
    return before, updates(first, second)


def updates(first: Tensor, second: Tensor) -> float:
    return (first / (second.sqrt() + 1e-8)).abs().max().item()


@pytest.mark.parametrize("unseen", [0.0, 1e-12, 1e-4])
def test_no_update_blows_up(pool: Callable[[int], Pool], unseen: float) -> None:
    for before, after in pool(4).run(largest_updates, unseen):
        assert (
            after < 4 * before
        )  # where rounding to 0, a division by eps alone, would make it thousands of times larger


def beside_another_axis(names: Sequence[str]) -> Tensor:
    """In a worker: average a copy, the same for each local index, beside what another axis has sharded."""
    local = dist.get_rank() % 2
    generator = torch.Generator().manual_seed(dist.get_rank() // 2)
    copy = torch.randn(300, generator=generator)
    moments = {"own": 100 * torch.randn(33 * (local + 1), generator=generator), "copy": copy}
    average = MomentAverage(process_mesh(dist.group.WORLD, 2), Int8(128), Traffic(), "unit")
    exchanged = {name: moments[name].to(device()) for name in names}
    average.average(exchanged, {"own": ("tp",), "copy": ()})
    return exchanged["copy"].cpu()


def test_copies_do_not_depend_on_what_else_is_averaged(pool: Callable[[int], Pool]) -> None:
    alone = pool(4).run(beside_another_axis, ["copy"])
    for names in (["own", "copy"], ["copy", "own"]):
        assert all(torch.equal(copy, alone[0]) for copy in (*alone, *pool(4).run(beside_another_axis, names)))
