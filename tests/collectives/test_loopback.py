"""Ranks in one process (benchmarks/common/loopback.py) beside real ones, and what ends them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.benchmarks import load
from harness.models import device
from harness.pool import Pool
from torch import Tensor

from fsdp_zpp import Int4, Int4Delta, Int8, LocalSteps, LoCo
from fsdp_zpp.collectives.gradient_reduce import GradientReduce
from fsdp_zpp.collectives.hops import Traffic
from fsdp_zpp.collectives.mesh import process_mesh
from fsdp_zpp.collectives.moment_average import MomentAverage
from fsdp_zpp.collectives.outer_step import OuterStep
from fsdp_zpp.collectives.weight_gather import WeightGather

NUMEL, STEPS = 333, 3


def values(seed: int, numel: int) -> Tensor:
    """Other values on each rank."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(numel, generator=generator).to(device())


def steps_of_all_kinds() -> tuple[list[Tensor], dict[Any, int]]:
    """On a rank: what steps with gathers, reductions and exchanges leave, and the bytes sent."""
    mesh, traffic, world = process_mesh(dist.group.WORLD), Traffic(), dist.get_world_size()
    gpus = mesh.topology.gpus_per_node
    gather = WeightGather(mesh, Int4Delta(64, whole=Int8(64)), True, traffic)
    reductions = [
        (GradientReduce(mesh, Int8(64), Int4(32), traffic, error_feedback=LoCo(hops="both", dtype=Int8(64))), world),
        (GradientReduce(mesh, None, None, traffic, optimizer_scope="I", gradient_scope="I"), gpus),
        (GradientReduce(mesh, None, Int4(64), traffic, optimizer_scope="N", error_feedback=LoCo()), 1),
    ]
    outer = OuterStep(LocalSteps(codec=Int4(32), error_feedback=LoCo()), mesh, traffic)
    outer.start({"weight": torch.full((NUMEL,), float(dist.get_rank() % gpus), device=device())})
    moments, kept = MomentAverage(mesh, Int8(64), traffic, "unit"), []
    shard = values(0, NUMEL)
    for step in range(STEPS):
        shard += 0.01 * values(step, NUMEL)
        gather.secondary.mark_stale(by_step=True)
        kept.append(torch.empty(world * NUMEL, device=device()))
        gather(shard, kept[-1])
        for reduce, parts in reductions:
            kept.append(torch.empty(NUMEL, device=device()))
            reduce(values(step, parts * NUMEL), kept[-1])
        weight, moment = values(step, NUMEL), values(step, NUMEL).square()
        outer.exchange({"weight": weight})
        moments.average({"weight": moment}, {"weight": ()})
        kept += [weight, moment]
    return [each.cpu() for each in kept], traffic.sent


@pytest.mark.parametrize(("nodes", "gpus_per_node"), [(2, 1), (2, 2)])
def test_ranks_in_one_process_compute_what_real_ones_do_bit_for_bit(
    pool: Callable[[int], Pool], on_ranks: Callable[..., list[Any]], nodes: int, gpus_per_node: int
) -> None:
    real = pool(nodes * gpus_per_node).run(as_nodes_of, gpus_per_node)
    for (ours, sent), (theirs, sent_by_theirs) in zip(
        on_ranks(nodes, gpus_per_node, steps_of_all_kinds), real, strict=True
    ):
        assert all(torch.equal(*each) for each in zip(ours, theirs, strict=True))
        assert sent == sent_by_theirs


def as_nodes_of(gpus_per_node: int) -> tuple[list[Tensor], dict[Any, int]]:
    """In a worker: the same on nodes of this size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(gpus_per_node))
        return steps_of_all_kinds()


def test_a_collective_may_be_waited_for_later_and_its_bytes_are_counted(on_ranks: Callable[..., list[Any]]) -> None:
    def reduce_and_exchange() -> None:
        own, everyone = torch.arange(4.0, device=device()) + 10 * dist.get_rank(), dist.group.WORLD
        total, received = own.clone(), torch.zeros_like(own)
        work = dist.all_reduce(total, async_op=True)
        dist.all_to_all_single(received, own, group=dist.new_group())
        work.wait()
        dist.barrier()
        dist.broadcast(own, src=3)
        assert total.tolist() == [60, 64, 68, 72]
        assert received.tolist() == [dist.get_rank() + 10 * other for other in range(4)]
        assert own.tolist() == [30, 31, 32, 33]
        assert (everyone.sent["all_to_all", "intra"], everyone.sent["all_to_all", "inter"]) == (4, 8)
        assert everyone.calls["broadcast", "inter"] == (dist.get_rank() == 3)

    on_ranks(2, 2, reduce_and_exchange)


def end(how: str) -> None:
    """On a rank: fail, or call what the others don't."""
    everyone, value = dist.group.WORLD, torch.ones(2, device=device())
    if how == "fails" and dist.get_rank() == 1:
        raise KeyError("of rank 1")
    if how == "leaves" and dist.get_rank() == 1:
        return
    if how == "differs" and dist.get_rank() == 1:
        dist.broadcast(value, src=0)
    dist.all_reduce(value[: 1 + (how == "sizes" and dist.get_rank() == 1)], group=everyone)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("fails", KeyError, "of rank 1"),
        ("leaves", RuntimeError, r"no rank can go on: rank 0 in all_reduce without ranks \[1\] of \[0, 1\]"),
        ("differs", RuntimeError, "different collectives: rank 0 all_reduce, rank 1 broadcast"),
        ("sizes", RuntimeError, "do not agree on what they exchange: 1 values in torch.float32 and 2 values"),
    ],
)
def test_what_would_hang_real_ranks_is_an_error(how: str, error: type[Exception], message: str) -> None:
    job = load("common", "loopback").Loopback(2)
    assert job.run(dist.get_rank) == [0, 1]
    with pytest.raises(error, match=message):
        job.run(end, how)
    with pytest.raises(RuntimeError, match="this job is over"):
        job.run(dist.get_rank)
    assert not dist.is_initialized()
