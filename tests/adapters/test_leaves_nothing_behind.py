"""Models that are freed, jobs that restart, thousands of steps and scripts that end leave nothing behind."""

from __future__ import annotations

import functools
import gc
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, over_adapters, over_pairs
from harness.impatient_pool import ImpatientPool
from harness.launch import groups_of_this_rank
from harness.pool import Pool, device_type, free_port, init_process_group, start_method
from harness.training import logits, train
from soak import rounds, soak
from soak_training import STRATEGY
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from torch.optim import optimizer as torch_optimizer

from fsdp_zpp import CodecState, Int4, LocalSteps, LoCo, Strategy, gathered_weights, monitor

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
    """Experts; a forward uses some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 16)) for _ in range(EXPERTS))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        return self.out(x + sum(self.experts[i](self.norm(x)) for i in used))


def held_over_subsets(adapter: Adapter, strategy: Strategy, freezes: bool) -> list[dict[str, int]]:
    """In a worker: what there is after 100 and after 200 steps that each use, or train, other experts."""
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


def without_globals() -> None:
    """Clear the globals of the package, as the interpreter does before it frees what is left."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "fsdp_zpp":
            vars(module).update(dict.fromkeys(vars(module)))


def kept_at_the_end(adapter: Adapter) -> list[Any]:
    """Objects that a script may still hold when it ends."""
    kept: list[Any] = []
    for strategy in (
        Strategy.zeropp(gpus_per_node=1),
        Strategy("NNN", gpus_per_node=1),
        Strategy.mixzpp(gpus_per_node=1),
        Strategy.diloco(gpus_per_node=1, local_steps=LocalSteps(2)),
    ):
        model = adapter.make(Case(frozen=strategy.frozen is not None), strategy)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        watch = monitor(model)
        for step in range(2):
            models.loss_of(model, models.batch(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step()
        weights = gathered_weights(model)
        kept += [model, optimizer, watch, CodecState(model, optimizer), weights, next(weights)]
        kept.append(models.loss_of(model, models.batch(2, 0)))  # with a graph, whose hooks are of the model
    return kept


def to_the_end(rank: int, port: int, destroys: bool) -> list[Any]:
    """A whole script, except for its end."""
    init_process_group(rank, 2, port)
    kept = [kept_at_the_end(adapter) for adapter in ADAPTERS]
    dist.barrier()
    if destroys:
        dist.destroy_process_group()
    return kept


@pytest.mark.parametrize("freed", ["late", "with the group alive", "after the modules"])
def test_a_script_ends_without_a_word(freed: str) -> None:
    # Workers of a pool end without the interpreter's shutdown.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    port = free_port()
    script = f"import gc, {__name__} as own; kept = own.to_the_end({{}}, {port}, {freed == 'late'})"
    if freed == "after the modules":
        script += "; own.without_globals(); del kept; gc.collect()"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script.format(rank)], env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, said = rank.communicate(timeout=100)
        assert rank.returncode == 0, said
        assert "Exception ignored" not in said, said
