"""Models that are freed, jobs that restart and thousands of steps leave nothing behind."""

from __future__ import annotations

import functools
import gc
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, over_adapters, over_pairs
from harness.impatient_pool import ImpatientPool
from harness.launch import groups_of_this_rank
from harness.pool import Pool, device_type, start_method
from harness.training import logits, train
from soak import rounds, soak
from soak_training import STRATEGY
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from torch.optim import optimizer as torch_optimizer

from fsdp_zpp import Int4, LoCo, Strategy

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


EXPERTS = 12
OF_SUBSETS = {
    "zeropp": Strategy.zeropp(gpus_per_node=1),
    "IIG": Strategy("IIG", gpus_per_node=1),
    "III": Strategy("III", gradients=Int4(32), error_feedback=LoCo(), gpus_per_node=1),
    "loco": Strategy.loco(gpus_per_node=1),
}


class Mixture(nn.Module):
    """Experts, of which a forward uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 16)) for _ in range(EXPERTS))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        return self.out(x + sum(self.experts[i](self.norm(x)) for i in used))


def held_over_subsets(adapter: Adapter, strategy: Strategy, freezes: bool) -> list[dict[str, int]]:
    """In a worker: what there is after 100, and after 200 steps, each of which uses, or trains, other experts."""
    model = adapter.wrap(Mixture().to(models.device()), strategy)
    optimizer, choose, found = torch.optim.SGD(model.parameters(), lr=0.01), random.Random(1), []
    experts = {i: [p for n, p in model.named_parameters() if f"experts.{i}." in n] for i in range(EXPERTS)}
    for step in range(1, 201):
        chosen = sorted(choose.sample(range(EXPERTS), choose.choice((3, 6, 9))))
        if step % 100 > 90 or step % 100 == 0:  # so that what is kept for the last few is of the same ones
            chosen = list(range(step % 4, EXPERTS, 4))
        if freezes:
            for i, parameters in experts.items():
                for parameter in parameters:
                    parameter.requires_grad_(i in chosen)
        used = list(range(EXPERTS)) if freezes else chosen
        model(torch.randn(2, 16, device=models.device()), used).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            looks = [held() for _ in range(3)]  # gloo's thread may not yet have let go of the last tensor
            found.append({name: min(look[name] for look in looks) for name in looks[0]})
    return found


def held() -> dict[str, int]:
    """Objects of this package, tensors and their bytes, and entries of what functions keep."""
    dist.barrier()
    gc.collect()
    objects = gc.get_objects()
    tensors = [each for each in objects if isinstance(each, Tensor)]
    kept = [each for each in objects if isinstance(each, functools._lru_cache_wrapper)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if type(t) is Tensor}
    return {
        "objects of the package": sum(str(type(each).__module__).startswith("fsdp_zpp") for each in objects),
        "tensors": len(tensors),
        "tensor bytes": sum(storages.values()),
        "functions' results": sum(
            each.cache_info().currsize for each in kept if getattr(each, "__module__", "").startswith("fsdp_zpp")
        ),
    }


@over_pairs(rest=False, adapter=ADAPTERS, strategy=OF_SUBSETS, freezes=(False, True))
def test_ever_other_parameters_leave_nothing_behind(
    pool: Callable[[int], Pool], adapter: Adapter, strategy: Strategy, freezes: bool
) -> None:
    for after_100, after_200 in pool(2).run(held_over_subsets, adapter, strategy, freezes):
        assert {name: (after_100[name], now) for name, now in after_200.items() if now > after_100[name]} == {}


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
