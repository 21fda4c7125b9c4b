"""Process groups of the hops: made once a layout, usable in a part of a job, freed with the group they were made of."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from datetime import timedelta
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
from fsdp_zpp.collectives.mesh import own_rank, process_mesh
from fsdp_zpp.collectives.weight_gather import WeightGather


def count_groups() -> int:
    """In a worker: how many groups three meshes of one layout make."""
    before = dist.get_pg_count()
    meshes = [process_mesh(dist.group.WORLD, 2) for _ in range(3)]
    assert meshes[0] == meshes[1] == meshes[2]
    return dist.get_pg_count() - before


def test_process_groups_are_made_once_for_each_layout(pool: Callable[[int], Pool]) -> None:
    assert max(pool(4).run(count_groups)) <= 4  # two nodes and two local indices; none if a test before made them
    assert pool(4).run(count_groups) == [0] * 4


def errors_of_bad_launchers(values: list[str]) -> list[str]:
    """In a worker: what is messages of values that a launcher may have set."""
    messages = []
    for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        for value in values:
            with patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"} | {name: value}):
                try:
                    process_mesh(dist.group.WORLD)
                    messages.append("nothing")
                except ValueError as error:
                    messages.append(str(error))
    return messages


def test_what_a_launcher_says_of_nodes_must_be_a_positive_number(pool: Callable[[int], Pool]) -> None:
    for messages in pool(4).run(errors_of_bad_launchers, ["0", "abc", "", "-2", "2.0"]):
        assert all(
            "in the environment is not a positive number" in each and "pass gpus_per_node" in each for each in messages
        )


def groups_left() -> tuple[bool, timedelta]:
    """In a worker: whether a group outlives its last user here, and the timeout of its hops."""
    group = dist.new_group(timeout=timedelta(seconds=77))
    mesh = process_mesh(group, 2)
    # torch shows a group's timeout by no public name.
    timeout = mesh.inter._get_backend(models.device()).options._timeout
    reference = weakref.ref(group)
    dist.destroy_process_group(group)
    del group, mesh
    gc.collect()
    return reference() is not None, timeout


def test_hops_have_the_timeout_of_their_group_and_are_freed_with_it(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(groups_left) == [(False, timedelta(seconds=77))] * 4


def gather_in_a_part_of_the_job() -> bool:
    """In a worker: half of the ranks are a mesh of their own."""
    halves = [dist.new_group(list(range(4))), dist.new_group(list(range(4, 8)))]
    half = dist.get_rank() // 4
    mesh = process_mesh(halves[half], 2)
    out = torch.empty(4, device=models.device())
    WeightGather(mesh, None, False, Traffic())(torch.tensor([float(dist.get_rank())], device=models.device()), out)
    mean = torch.empty(1, device=models.device())
    GradientReduce(mesh, None, None, Traffic())(torch.full((4,), float(dist.get_rank()), device=models.device()), mean)
    return out.tolist() == [4.0 * half + i for i in range(4)] and mean.item() == 4 * half + 1.5


def test_a_mesh_may_span_a_part_of_the_job(pool: Callable[[int], Pool]) -> None:
    assert all(pool(8).run(gather_in_a_part_of_the_job))


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


def groups_after_rounds() -> list[int]:
    """In a worker: how many groups there are after each of several groups was made, used and destroyed."""
    counts = []
    for _ in range(4):
        group = dist.new_group()
        mesh = process_mesh(group, 2)
        assert mesh.intra is not None
        assert mesh.inter is not None
        dist.destroy_process_group(group)
        del group, mesh
        counts.append(groups_of_this_rank())
    return counts


def test_subgroups_do_not_outlive_their_group(pool: Callable[[int], Pool]) -> None:
    for counts in pool(4).run(groups_after_rounds):
        assert len(set(counts)) == 1


def subgroups_of_a_living_group() -> tuple[bool, int]:
    """In a worker: whether a mesh stays the same while others of its group's siblings come and go."""
    group = dist.new_group()
    mesh = process_mesh(group, 2)
    other = dist.new_group()
    process_mesh(other, 2)
    dist.destroy_process_group(other)
    process_mesh(group, 1)
    total = torch.ones(1, device=models.device())
    dist.all_reduce(total, group=mesh.intra)
    same = process_mesh(group, 2) == mesh
    dist.destroy_process_group(group)
    return same, int(total)


def test_subgroups_of_other_groups_stay(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(subgroups_of_a_living_group) == [(True, 2)] * 4


@pytest.mark.parametrize("there", [True, False], ids=["there", "not there"])
def test_a_torch_built_for_an_accelerator_needs_one_to_use_it(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: there)
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert accelerator() == (torch.device("cuda") if there else None)
    assert compute_device(None, 1) == torch.device("cuda" if there else "cpu", 1)
