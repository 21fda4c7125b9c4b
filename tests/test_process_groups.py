"""The groups of the hops go after the group that they were made of, and jobs that start again leave none behind."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Adapter, Case
from harness.adapters import ADAPTERS
from harness.fake_world import groups_of_this_rank
from harness.pool import Pool, device_type, start_method
from harness.training import train
from torch.multiprocessing.spawn import start_processes

from fsdp_zpp import Strategy
from fsdp_zpp.topology import process_mesh

ONE_STEP = Case(steps=1, clip=None)


def trained_once(adapter: Adapter, strategy: Strategy, group: dist.ProcessGroup | None = None) -> None:
    train(adapter, adapter.make(ONE_STEP, strategy, group), ONE_STEP)


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


def start_again(rank: int, world: int, folder: str) -> None:
    """A process that starts and ends a job several times: what is left grows no more after the first."""
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_WORLD_SIZE": str(world)}
    left = []
    for i in range(4):
        dist.init_process_group("gloo", init_method=f"file://{folder}/{i}", rank=rank, world_size=world)
        for adapter in ADAPTERS:
            trained_once(adapter, Strategy.zeropp(gpus_per_node=1))
            trained_once(adapter, Strategy("III", gpus_per_node=1))
        gc.collect()
        groups = groups_of_this_rank()
        dist.destroy_process_group()
        gc.collect()
        left.append(
            (groups, groups_of_this_rank(), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))
        )
    assert all(now <= then for later in left[2:] for now, then in zip(later, left[1], strict=True)), left


@pytest.mark.skipif(device_type() == "cuda" or not Path("/proc/self").exists(), reason="counts a CPU job's threads")
def test_a_job_that_starts_again_leaves_nothing_behind(tmp_path: Path) -> None:
    start_processes(start_again, (2, str(tmp_path)), nprocs=2, start_method=start_method().get_start_method())
