"""Models that are freed, jobs that restart and thousands of steps leave nothing behind."""

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
from harness.covering import ADAPTERS, over_adapters
from harness.impatient_pool import ImpatientPool
from harness.launch import groups_of_this_rank
from harness.pool import Pool, device_type, start_method
from harness.training import logits, train
from soak import rounds, soak
from soak_training import STRATEGY
from torch.multiprocessing.spawn import start_processes
from torch.optim import optimizer as torch_optimizer

from fsdp_zpp import Strategy

MEMORY = "resident bytes"
HPZ = Strategy("IGG", gpus_per_node=2)
ONE_STEP = Case(steps=1, clip=None)


def check(found: list[list[dict[str, int]]], growth: int) -> None:
    """Fail if a process had more at the end than at the beginning; of memory, ``growth`` bytes more."""
    for first, *_, last in found:
        assert {name: last[name] for name in last if name != MEMORY and last[name] > first[name]} == {}
        assert last[MEMORY] <= first[MEMORY] + growth


@over_adapters
def test_three_rounds_of_all_events_leave_nothing_behind(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    found = pool(2).run(rounds, adapter, STRATEGY, 3)
    check([after[1:] for after in found], growth=16 << 20)  # what is made once is there after the first round


@pytest.mark.slow
@over_adapters
def test_ten_thousand_steps_leave_nothing_behind(adapter: Adapter) -> None:
    pool = ImpatientPool(2, patience=60)
    try:
        found = pool.run(soak, adapter, STRATEGY, 10_000, 1000)
    finally:
        pool.stop(kill=True)
    check(found, growth=8 << 20)


def trained_once(adapter: Adapter, strategy: Strategy) -> None:
    train(adapter, adapter.make(ONE_STEP, strategy), ONE_STEP)


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


def leftovers(adapter: Adapter) -> int:
    """In a worker: optimizer hooks, which torch keeps in a table of its own, that outlive their models."""
    before = len(torch_optimizer._global_optimizer_post_hooks)
    for _ in range(3):
        model = adapter.make(Case(), HPZ)
        models.loss_of(model, models.batch(0, 0)).backward()
        del model
        gc.collect()
    return len(torch_optimizer._global_optimizer_post_hooks) - before


@over_adapters
def test_models_leave_no_hooks_behind(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    assert max(pool(2).run(leftovers, adapter)) <= 1  # the last model may still be alive


def groups_made(adapter: Adapter, blocks: int) -> int:
    """In a worker: process groups that a model adds."""
    before = groups_of_this_rank()
    logits(adapter.make(Case(model=(("blocks", blocks),)), HPZ))
    return groups_of_this_rank() - before


@over_adapters
def test_process_groups_do_not_grow_with_layers(adapter: Adapter) -> None:
    pool = Pool(4)
    try:
        first, second = pool.run(groups_made, adapter, 2), pool.run(groups_made, adapter, 6)
    finally:
        pool.stop()
    assert max(first) <= 4
    assert second == [0] * 4
