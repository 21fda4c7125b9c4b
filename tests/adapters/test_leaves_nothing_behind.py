"""Models that are freed, jobs that restart and scripts that end leave nothing behind."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, over_each
from harness.launch import groups_of_this_rank
from harness.live_bytes import tensors_and_objects
from harness.pool import Pools, device_type, free_port, init_process_group, start_method
from harness.training import train
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes

from fsdp_zpp import CodecState, Int4, LocalSteps, LoCo, Strategy, gathered_weights, monitor

ONE_STEP = Case(steps=1, clip=None)
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
    """In a worker: what there is after 50 and after 100 steps that each use, or train, other experts."""
    model = adapter.wrap(Mixture().to(models.device()), strategy)
    optimizer, choose, found = torch.optim.SGD(model.parameters(), lr=0.01), random.Random(1), []
    experts = {i: [p for n, p in model.named_parameters() if f"experts.{i}." in n] for i in range(EXPERTS)}
    for step in range(1, 101):
        chosen = sorted(choose.sample(range(EXPERTS), choose.choice((3, 6, 9))))
        if step % 50 > 40 or step % 50 == 0:  # so that what is kept for the last few is of the same ones
            chosen = list(range(step % 4, EXPERTS, 4))
        if freezes:
            for i, parameters in experts.items():
                for parameter in parameters:
                    parameter.requires_grad_(i in chosen)
        used = list(range(EXPERTS)) if freezes else chosen
        model(torch.randn(2, 16, device=models.device()), used).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            looks = [
                tensors_and_objects() for _ in range(3)
            ]  # gloo's thread may not yet have let go of the last tensor
            found.append({name: min(look[name] for look in looks) for name in looks[0]})
    return found


@over_each(
    strategy=OF_SUBSETS,
    use={f"{adapter}{', frozen' * freezes}": (adapter, freezes) for freezes in (False, True) for adapter in ADAPTERS},
)
def test_ever_other_parameters_leave_nothing_behind(pool: Pools, strategy: Strategy, use: tuple[Adapter, bool]) -> None:
    adapter, freezes = use
    for before, after in pool(2).run(held_over_subsets, adapter, strategy, freezes):
        assert {name: (before[name], now) for name, now in after.items() if now > before[name]} == {}


def start_again(rank: int, world: int, folder: str) -> None:
    """A process that starts and ends a job several times: what is left grows no more after the first."""
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_WORLD_SIZE": str(world)}
    left = []
    for i in range(3):
        dist.init_process_group("gloo", init_method=f"file://{folder}/{i}", rank=rank, world_size=world)
        for adapter, levels in zip(ADAPTERS, ("IGG", "III"), strict=True):
            train(adapter, adapter.make(ONE_STEP, Strategy(levels, gpus_per_node=1)), ONE_STEP)
        gc.collect()
        groups = groups_of_this_rank()
        dist.destroy_process_group()
        gc.collect()
        left.append(
            (groups, groups_of_this_rank(), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))
        )
    assert all(now <= then for now, then in zip(left[2], left[1], strict=True)), left


@pytest.mark.skipif(device_type() == "cuda" or not Path("/proc/self").exists(), reason="counts a CPU job's threads")
def test_a_job_that_starts_again_leaves_nothing_behind(tmp_path: Path) -> None:
    start_processes(start_again, (2, str(tmp_path)), nprocs=2, start_method=start_method().get_start_method())


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


ENDS = ("late", "with the group alive", "after the modules")
SCRIPT = """
import gc, {module} as own

end, rank, port = own.fork_for_each_rank({ports})
kept = own.to_the_end(rank, port, destroys=end == "late")
if end == "after the modules":
    own.without_globals()
    del kept
    gc.collect()
"""


def fork_for_each_rank(ports: dict[str, int]) -> tuple[str, int, int]:
    """Return in new processes: the end, the rank and the port of each; imports take longer than all else."""
    children = []
    for end, port in ports.items():
        for rank in range(2):
            if not (child := os.fork()):
                return end, rank, port
            children.append(child)
    os._exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children))


def to_the_end(rank: int, port: int, destroys: bool) -> list[Any]:
    """A whole script, except for its end."""
    init_process_group(rank, 2, port)
    kept = [kept_at_the_end(adapter) for adapter in ADAPTERS]
    dist.barrier()
    if destroys:
        dist.destroy_process_group()
    return kept


def test_a_script_ends_without_a_word() -> None:
    # Workers of a pool end without the interpreter's shutdown. CUDA survives no fork once it has been asked for GPUs.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    script = SCRIPT.format(module=__name__, ports={end: free_port() for end in ENDS})
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "Exception ignored" not in ended.stderr, ended.stderr
