"""Ranks: nodes as launched, process groups of the hops, facts that ranks must agree on, and ranks in one process."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness.adapter import Adapter, Case, Precision
from harness.benchmarks import load
from harness.covering import over_adapters
from harness.launch import groups_of_this_rank
from harness.models import batch, device, loss_of, make_optimizer
from harness.pool import Pool
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_zpp import Int2Delta, Int4, Int4Delta, Int8, LocalSteps, LoCo, Strategy
from fsdp_zpp.comm.agreement import agree, check_agreement, checksums
from fsdp_zpp.comm.gradient_reduce import GradientReduce
from fsdp_zpp.comm.hops import Traffic
from fsdp_zpp.comm.mesh import (
    accelerator,
    compute_device,
    launched_on_each_node,
    own_rank,
    process_mesh,
    topology_of,
)
from fsdp_zpp.comm.weight_gather import WeightGather
from fsdp_zpp.local_steps.outer_step import OuterStep

OnRanks = Callable[..., list[Any]]


# ---- nodes as launched: what torchrun says counts, then what srun says where its tasks are the ranks


def by_srun(nodes_of_ranks: list[int], tasks: str, others: dict[str, str]) -> int | str:
    """On a rank, which srun has started with these tasks on its nodes: the size of nodes, or the error."""
    rank = dist.get_rank()
    node = nodes_of_ranks[rank]
    variables = {"SLURM_NODEID": str(node), "SLURM_LOCALID": str(nodes_of_ranks[:rank].count(node))}
    variables |= {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_PROCID": str(rank)}
    with patch.dict(os.environ, variables):
        del os.environ["LOCAL_WORLD_SIZE"]
        os.environ |= others
        try:
            assert topology_of(dist.group.WORLD).gpus_per_node == launched_on_each_node()
            return launched_on_each_node()
        except ValueError as error:
            return str(error)


@pytest.mark.parametrize(
    ("nodes", "tasks", "others", "size"),
    [
        ([0, 0, 1, 1], "2(x2)", {}, 2),
        ([0, 0, 0, 0], "4", {}, 4),
        ([0, 1, 2, 3], "1(x4)", {"LOCAL_WORLD_SIZE": "2"}, 2),  # torchrun under srun
        ([0, 0, 1, 1], "2(x2)", {"SLURM_NTASKS_PER_NODE": "4"}, 2),  # which is the job's
    ],
)
def test_equal_nodes_of_consecutive_ranks(
    on_ranks: OnRanks, nodes: list[int], tasks: str, others: dict[str, str], size: int
) -> None:
    assert on_ranks(2, 2, by_srun, nodes, tasks, others) == [size] * 4


@pytest.mark.parametrize(
    ("nodes", "tasks", "message"),
    [
        ([0, 0, 0, 1], "3,1", "the nodes are of different sizes: 4 ranks on 2 nodes"),
        ([0, 0, 1, 1], "1(x2)", "gpus_per_node was not given"),  # a daemon on each node, which has started the ranks
    ],
)
def test_anything_else_is_an_error_on_all_ranks(on_ranks: OnRanks, nodes: list[int], tasks: str, message: str) -> None:
    for raised in on_ranks(2, 2, by_srun, nodes, tasks, {}):
        assert message in raised
        assert "pass gpus_per_node" in raised


def test_ranks_out_of_order_are_named(on_ranks: OnRanks) -> None:
    raised = on_ranks(2, 2, by_srun, [0, 1, 0, 1], "2(x2)", {})
    assert raised[0] == raised[3] == 2  # these have the place that they would have in order
    assert all("srun has not put consecutive ranks on a node" in str(raised[rank]) for rank in (1, 2))


def test_what_a_launcher_says_of_nodes_must_be_a_positive_number(on_ranks: OnRanks) -> None:
    def refused() -> None:
        for name, value in product(("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"), ("0", "abc", "", "-2", "2.0")):
            with (
                patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"} | {name: value}),
                pytest.raises(ValueError, match=r"in the environment is not a positive number.*pass gpus_per_node"),
            ):
                process_mesh(dist.group.WORLD)

    on_ranks(2, 2, refused)


# ---- process groups


def make_and_destroy_groups() -> None:
    """In a worker: meshes of groups that come and go."""
    group = dist.new_group(timeout=timedelta(seconds=77))
    mesh, made = process_mesh(group, 2), dist.get_pg_count()
    assert process_mesh(group, 2) == mesh
    assert dist.get_pg_count() == made
    # torch shows a group's timeout by no public name.
    assert mesh.inter._get_backend(device()).options._timeout == timedelta(seconds=77)
    left = set()
    for _ in range(4):
        other = dist.new_group()
        process_mesh(other, 2)
        dist.destroy_process_group(other)
        del other
        left.add(groups_of_this_rank())
    assert len(left) == 1  # the subgroups of the last one, whatever their number
    process_mesh(group, 1)
    dist.all_reduce(total := torch.ones(1, device=device()), group=mesh.intra)
    assert total == 2
    assert process_mesh(group, 2) == mesh
    reference = weakref.ref(group)
    dist.destroy_process_group(group)
    del group, mesh
    gc.collect()
    assert reference() is None


def test_hops_are_made_once_a_layout_and_live_as_long_as_their_group(pool: Callable[[int], Pool]) -> None:
    pool(4).run(make_and_destroy_groups)


def meshes_of_a_part_of_the_job(rounds: int) -> list[float]:
    """In a worker: sums over the hops of meshes on halves of the ranks, made again and again beside other groups."""
    half = dist.get_rank() // 4
    pair, sums = dist.new_group([0, 4]), []
    for _ in range(rounds):
        halves = [dist.new_group(list(range(4))), dist.new_group(list(range(4, 8)))]
        for gpus_per_node in (2, 1) if half else (2,):  # so that halves have made different numbers of groups
            mesh = process_mesh(halves[half], gpus_per_node)
            for hop in filter(None, (mesh.intra, mesh.inter)):
                dist.all_reduce(total := torch.ones(1, device=device()), group=hop)
                sums.append(total.item())
        if half:
            own_rank()
        dist.destroy_process_group(halves[half])
        dist.all_reduce(total := torch.ones(1, device=device()), group=(everyone := dist.new_group()))
        sums.append(total.item())
        dist.destroy_process_group(everyone)
    if dist.get_rank() in (0, 4):
        dist.destroy_process_group(pair)
    return sums


def test_ranks_that_have_made_different_groups_make_a_mesh_together(pool: Callable[[int], Pool]) -> None:
    first, second = [2.0, 2.0, 8.0], [2.0, 2.0, 4.0, 8.0]
    assert pool(8).run(meshes_of_a_part_of_the_job, 3) == [first * 3] * 4 + [second * 3] * 4


@pytest.mark.parametrize("there", [True, False], ids=["there", "not there"])
def test_a_torch_built_for_an_accelerator_needs_one_to_use_it(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: there)
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert accelerator() == (torch.device("cuda") if there else None)
    assert compute_device(None, 1) == torch.device("cuda" if there else "cpu", 1)


# ---- what ranks must agree on


def test_many_differences_are_abridged_and_another_order_is_one(on_ranks: OnRanks) -> None:
    def differ() -> None:
        group, rank = dist.group.WORLD, dist.get_rank()
        with pytest.raises(ValueError, match="fact 3: 0 on ranks 0-1, 1 on ranks 2-3; and 5 more") as caught:
            check_agreement(group, "a call", {f"fact {i}": rank // 2 for i in range(9)})
        assert "fact 4" not in str(caught.value)
        with pytest.raises(ValueError, match="order: b, a on rank 0, a, b on ranks 1-3"):
            check_agreement(group, "a call", dict.fromkeys(["a", "b"] if rank else ["b", "a"], 1))

    on_ranks(1, 4, differ)


def test_addresses_of_objects_are_no_difference(on_ranks: OnRanks) -> None:
    on_ranks(1, 4, lambda: check_agreement(dist.group.WORLD, "a call", {"codec": object()}))


def test_errors_name_the_ranks(on_ranks: OnRanks) -> None:
    def disagree() -> list[str]:
        group, rank, texts = dist.group.WORLD, dist.get_rank(), []
        for attempt in (
            lambda: check_agreement(group, "a call", {"fact": rank == 3}),
            lambda: agree(group, lambda: [0][rank // 3]),
            lambda: agree(group, lambda: rank % 2, str, "read other files than"),
        ):
            with pytest.raises((ValueError, RuntimeError, IndexError)) as caught:
                attempt()
            texts.append(str(caught.value))
        return texts

    fact, failure, other = on_ranks(1, 4, disagree)[0]
    assert "fact: False on ranks 0-2, True on rank 3" in fact
    assert failure == "on rank 3: list index out of range"
    assert other == "ranks 1, 3 read other files than rank 0"


# ---- checksums of weights

VALUES = torch.randn(200_003, generator=torch.Generator().manual_seed(0))


def of(tensor: Tensor) -> tuple[str, int]:
    return checksums({"weight": tensor})["weight"]


def changed(place: int, value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    values = VALUES.to(dtype, copy=True)
    values[place] = value
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_value_and_the_order_make_a_difference(dtype: torch.dtype) -> None:
    for place in (0, 70_000, 200_002):
        last_bit = torch.nextafter(VALUES[place].to(dtype), torch.tensor(9.0, dtype=dtype)).item()
        assert of(changed(place, last_bit, dtype)) != of(VALUES.to(dtype))
    assert of(VALUES.flip(0)) != of(VALUES)
    assert of(VALUES.roll(1 << 16)) != of(VALUES)


def test_neither_shape_nor_strides_nor_the_sign_of_zero_nor_the_device_does() -> None:
    even = VALUES[:200_000]
    assert of(even.view(400, 500)) == of(even.view(400, 500).t().contiguous().t()) == of(even)
    assert of(changed(3, -0.0)) == of(changed(3, 0.0))
    assert of(VALUES.to(device())) == of(VALUES)
    assert checksums({"nothing": torch.empty(0)}) == {"nothing": ("torch.float32", 0)}
    assert checksums({}) == {}


# ---- ranks in one process (benchmarks/common/loopback.py) beside real ones

NUMEL, STEPS = 333, 3


def noise(seed: int, numel: int) -> Tensor:
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
    kept, shard = [], noise(0, NUMEL)
    for step in range(STEPS):
        shard += 0.01 * noise(step, NUMEL)
        gather.secondary.mark_stale(by_step=True)
        kept.append(torch.empty(world * NUMEL, device=device()))
        gather(shard, kept[-1])
        for reduce, parts in reductions:
            kept.append(torch.empty(NUMEL, device=device()))
            reduce(noise(step, parts * NUMEL), kept[-1])
        weight = noise(step, NUMEL)
        outer.send({"weight": weight})
        outer.receive({"weight": weight})
        kept.append(weight)
    return [each.cpu() for each in kept], traffic.sent


def test_ranks_in_one_process_compute_what_real_ones_do_bit_for_bit(
    pool: Callable[[int], Pool], on_ranks: OnRanks
) -> None:
    real = pool(4).run(as_nodes_of_two)
    for (ours, sent), (theirs, sent_by_theirs) in zip(on_ranks(2, 2, steps_of_all_kinds), real, strict=True):
        assert all(torch.equal(*each) for each in zip(ours, theirs, strict=True))
        assert sent == sent_by_theirs


def as_nodes_of_two() -> tuple[list[Tensor], dict[Any, int]]:
    """In a worker: the same on nodes of two."""
    with patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        return steps_of_all_kinds()


def trained(adapter: Adapter, case: Case, strategy: Strategy) -> tuple[list[float], list[Tensor]]:
    """On a rank: the losses of a training, and what the rank then holds of the weights."""
    model = adapter.make(case, strategy)
    optimizer, losses = make_optimizer(case.optimizer, model.parameters()), []
    for step in range(case.steps):
        losses.append(loss_of(model, batch(step, 0)))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    held = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [loss.item() for loss in losses], [each.detach().cpu().clone() for each in held]


def trained_on_nodes_of(gpus: int, *args: Any) -> tuple[list[float], list[Tensor]]:
    """In a worker: the same on nodes of so many ranks."""
    with patch.dict(os.environ, LOCAL_WORLD_SIZE=str(gpus)):
        return trained(*args)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("gpus", [1, 2])
@over_adapters
def test_ranks_in_one_process_train_as_real_ones_do(
    pool: Callable[[int], Pool], on_ranks: OnRanks, adapter: Adapter, gpus: int, dtype: torch.dtype | None
) -> None:
    case = Case(precision=Precision(dtype, dtype), optimizer="adamw-fused")
    for strategy in (Strategy.zeropp(weights=Int4Delta(64)), Strategy.zeropp(weights=Int2Delta(64)), Strategy.loco()):
        real = pool(2 * gpus).run(trained_on_nodes_of, gpus, adapter, case, strategy)
        simulated = on_ranks(2, gpus, trained, adapter, case, strategy)
        for (losses, weights), (losses_of_real, weights_of_real) in zip(simulated, real, strict=True):
            if dtype is None:
                assert losses == losses_of_real
                assert all(torch.equal(*each) for each in zip(weights, weights_of_real, strict=True))
            assert losses == pytest.approx(losses_of_real, rel=1e-3)


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
