"""Nodes as launched, and process groups of the hops: made once a layout, and freed with the group of which they are."""

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
from harness import models
from harness.launch import groups_of_this_rank
from harness.pool import Pool

from fsdp_zpp.collectives.devices import accelerator, compute_device
from fsdp_zpp.collectives.gradient_reduce import GradientReduce
from fsdp_zpp.collectives.hops import Traffic
from fsdp_zpp.collectives.launcher import launched_on_each_node
from fsdp_zpp.collectives.mesh import own_rank, process_mesh, topology_of
from fsdp_zpp.collectives.weight_gather import WeightGather

OnRanks = Callable[..., list[Any]]


# ---- nodes as launched: what torchrun says counts, then what srun says where its tasks are the ranks


def by_srun(nodes_of_ranks: list[int], tasks: str, others: dict[str, str]) -> int | str:
    """On a rank, which srun has started: the size of nodes, or the error.

    Args:
        nodes_of_ranks: The nodes on which it has put them.
        tasks: The tasks on its nodes as it writes them.
        others: Other variables.
    """
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
        ([0, 0, 1, 1], "2,2", {}, 2),
        ([0, 0, 0, 0], "4", {}, 4),
        ([0, 1, 2, 3], "1(x4)", {}, 1),
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
        ([0, 0, 1, 1], "", "gpus_per_node was not given"),
        ([0, 0, 1, 1], "two", "gpus_per_node was not given"),
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
    group, device = dist.new_group(timeout=timedelta(seconds=77)), models.device()
    mesh, made = process_mesh(group, 2), dist.get_pg_count()
    assert process_mesh(group, 2) == mesh
    assert dist.get_pg_count() == made
    # torch shows a group's timeout by no public name.
    assert mesh.inter._get_backend(device).options._timeout == timedelta(seconds=77)
    left = set()
    for _ in range(4):
        other = dist.new_group()
        process_mesh(other, 2)
        dist.destroy_process_group(other)
        del other
        left.add(groups_of_this_rank())
    assert len(left) == 1  # the subgroups of the last one, whatever their number
    process_mesh(group, 1)
    dist.all_reduce(total := torch.ones(1, device=device), group=mesh.intra)
    assert total == 2
    assert process_mesh(group, 2) == mesh
    reference = weakref.ref(group)
    dist.destroy_process_group(group)
    del group, mesh
    gc.collect()
    assert reference() is None


def test_hops_are_made_once_a_layout_and_live_as_long_as_their_group(pool: Callable[[int], Pool]) -> None:
    pool(4).run(make_and_destroy_groups)


def test_a_mesh_may_span_a_part_of_the_job(on_ranks: OnRanks) -> None:
    def gather_and_reduce() -> tuple[list[float], float]:
        halves, rank = [dist.new_group(list(range(4))), dist.new_group(list(range(4, 8)))], dist.get_rank()
        mesh, out, mean = process_mesh(halves[rank // 4], 2), torch.empty(4), torch.empty(1)
        WeightGather(mesh, None, False, Traffic())(torch.tensor([float(rank)]), out)
        GradientReduce(mesh, None, None, Traffic())(torch.full((4,), float(rank)), mean)
        return out.tolist(), mean.item()

    assert on_ranks(4, 2, gather_and_reduce) == [([0, 1, 2, 3], 1.5)] * 4 + [([4, 5, 6, 7], 5.5)] * 4


def meshes_of_a_part_of_the_job(rounds: int) -> list[float]:
    """In a worker: sums over the hops of meshes on halves of the ranks, made again and again beside other groups."""
    half = dist.get_rank() // 4
    pair, sums = dist.new_group([0, 4]), []
    for _ in range(rounds):
        halves = [dist.new_group(list(range(4))), dist.new_group(list(range(4, 8)))]
        for gpus_per_node in (2, 1) if half else (2,):  # so that halves have made different numbers of groups
            mesh = process_mesh(halves[half], gpus_per_node)
            for hop in filter(None, (mesh.intra, mesh.inter)):
                dist.all_reduce(total := torch.ones(1, device=models.device()), group=hop)
                sums.append(total.item())
        if half:
            own_rank()
        dist.destroy_process_group(halves[half])
        dist.all_reduce(total := torch.ones(1, device=models.device()), group=(everyone := dist.new_group()))
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
