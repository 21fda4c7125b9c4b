"""Models that are freed, long trainings, jobs that restart and scripts that end leave nothing behind."""

from __future__ import annotations

import ctypes
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
from harness import lora, models
from harness.adapter import Adapter, Case, Fsdp2
from harness.covering import ADAPTERS, over_adapters, over_each
from harness.launch import groups_of_this_rank
from harness.pool import Pools, device_type, free_port, init_process_group, shared_folder, start_method
from harness.training import load, logits, save, train
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.multiprocessing.spawn import start_processes

from fsdp_zpp import (
    CodecState,
    Int4,
    Int4Delta,
    Int8,
    LocalSteps,
    LoCo,
    Strategy,
    gathered_weights,
    invalidate,
)

Held = dict[str, int]
"""The counts of a process."""


def least(look: Callable[[], Held]) -> Held:
    """The counts at each of three looks; gloo's thread may not yet have let go of its last tensor."""
    looks = [look() for _ in range(3)]
    return {name: min(each[name] for each in looks) for name in looks[0]}


def tensors_and_objects() -> Held:
    """Tensors and their bytes, objects of this package, and entries of what its functions keep."""
    dist.barrier()
    gc.collect()
    objects = gc.get_objects()
    tensors = [each for each in objects if isinstance(each, Tensor)]
    kept = [each for each in objects if isinstance(each, functools._lru_cache_wrapper)]
    return {
        "tensors": len(tensors),
        "tensor bytes": sum({s.data_ptr(): s.nbytes() for s in map(_storage_of, tensors) if s is not None}.values()),
        "objects of the package": sum(str(type(each).__module__).startswith("fsdp_zpp") for each in objects),
        "functions' results": sum(
            f.cache_info().currsize for f in kept if str(getattr(f, "__module__", "")).startswith("fsdp_zpp")
        ),
    }


def _storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    try:
        storage = tensor.untyped_storage()
        storage.data_ptr()
    except (NotImplementedError, RuntimeError):  # that of a subclass or of a fake
        return None
    return storage


# ---- ever other parameters

ONE_STEP = Case(steps=1, clip=None)
EXPERTS, STEPS = 6, 30
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


def held_over_subsets(adapter: Adapter, strategy: Strategy, freezes: bool) -> list[Held]:
    """In a worker: what there is after each of two times ``STEPS`` steps that each use, or train, other experts."""
    model = adapter.wrap(Mixture().to(models.device()), strategy)
    optimizer, choose, found = torch.optim.SGD(model.parameters(), lr=0.01), random.Random(1), []
    experts = {i: [p for n, p in model.named_parameters() if f"experts.{i}." in n] for i in range(EXPERTS)}
    for left in [*reversed(range(STEPS))] * 2:
        chosen = sorted(choose.sample(range(EXPERTS), choose.choice((2, 3, 4))))
        if left < 8:  # so that what is kept for the last few is of the same ones
            chosen = list(range(left % 4, EXPERTS, 4))
        if freezes:
            for i, parameters in experts.items():
                for parameter in parameters:
                    parameter.requires_grad_(i in chosen)
        used = list(range(EXPERTS)) if freezes else chosen
        model(torch.randn(2, 16, device=models.device()), used).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if left == 0:
            found.append(least(tensors_and_objects))
    return found


@over_each(
    rest=False,
    strategy=OF_SUBSETS,
    use={f"{adapter}{', frozen' * freezes}": (adapter, freezes) for freezes in (False, True) for adapter in ADAPTERS},
)
def test_ever_other_parameters_leave_nothing_behind(pool: Pools, strategy: Strategy, use: tuple[Adapter, bool]) -> None:
    adapter, freezes = use
    for before, after in pool(2).run(held_over_subsets, adapter, strategy, freezes):
        assert {name: (before[name], now) for name, now in after.items() if now > before[name]} == {}


# ---- a long training

STRATEGY = Strategy(
    "IGG",
    weights=Int4Delta(64),
    gradients=Int4(64),
    error_feedback=LoCo(reset_every=50),
    frozen=Int8(64),
    gpus_per_node=1,
)
"""With all that keeps something from step to step: a secondary shard, errors, a quantized base."""


class Training:
    """A net, one block of which is a frozen base with detours, on which two optimizers take turns."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.model = self.make()
        self.random = random.Random(0)  # the same on all ranks
        self.renew_optimizers()
        self.steps = 0

    def make(self) -> Any:
        """The sharded net; with a row of each weight for each of four ranks, or FSDP1 can't load its checkpoints."""
        net = models.make_net(blocks=2, width=66, hidden=91)
        for name in ("up", "down"):
            detour = lora.LowRank(getattr(net.blocks[0], name).requires_grad_(False), rank=4)
            setattr(net.blocks[0], name, detour.to(models.device()))
        return self.adapter.shard(net, Case(), STRATEGY)

    @property
    def block(self) -> nn.Module:
        """The one without a frozen base."""
        return self.model.blocks[1]

    def renew_optimizers(self) -> None:
        in_block = set(self.block.parameters())
        parts = [
            [p for p in self.model.parameters() if p.requires_grad and (p in in_block) == here]
            for here in (False, True)
        ]
        self.optimizers = [torch.optim.AdamW(part, lr=1e-3, foreach=False) for part in parts]

    def step(self) -> None:
        """One step of all optimizers."""
        with self.adapter.micro_batch(self.model, True, False):
            models.loss_of(self.model, models.batch(self.steps, 0)).backward()
        for optimizer in self.optimizers:
            if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                optimizer.step()
        self.zero_grad()
        self.steps += 1

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def evaluate(training: Training) -> None:
    logits(training.model)
    with torch.inference_mode():
        logits(training.model)


def drop_a_micro_batch(training: Training) -> None:
    with training.adapter.micro_batch(training.model, False, False):
        models.loss_of(training.model, models.batch(training.steps, 7)).backward()
    training.random.choice([training.model.zero_grad, training.zero_grad])()


def step_with_one_optimizer(training: Training) -> None:
    models.loss_of(training.model, models.batch(training.steps, 8)).backward()
    training.random.choice(training.optimizers).step()
    training.model.zero_grad()


def abandon_a_forward(training: Training) -> None:
    models.loss_of(training.model, models.batch(training.steps, 9))


def load_state_dict(training: Training) -> None:
    kinds = [kind for kind in training.adapter.state_dict_kinds if kind != "LOCAL_STATE_DICT"]
    training.adapter.load_from(training.model, training.model, training.random.choice(kinds))


def assign(training: Training) -> None:
    if isinstance(training.adapter, Fsdp2):
        training.model.load_state_dict(training.model.state_dict(), assign=True)
        training.renew_optimizers()


def write(training: Training) -> None:
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.mul_(0.99)
    invalidate(training.model)


def move(training: Training) -> None:
    training.model._apply(torch.clone)


def freeze(training: Training) -> None:
    """A block, for a step; FullyShardedDataParallel, stock too, can't freeze what an abandoned forward has used."""
    training.step()
    training.block.requires_grad_(False)
    training.step()
    training.block.requires_grad_(True)


def checkpoint(training: Training) -> None:
    """Save to files and go on from them, in a model that takes the place of this one."""
    # FullyShardedDataParallel, stock too, never frees a frozen unit whose last but one forward had no backward.
    training.step()
    with shared_folder() as folder:
        training.adapter.before_load(training.model)
        save(training.model, training.optimizers, CodecState(training.model), folder)
        training.model = training.make()
        training.renew_optimizers()
        load(training.model, training.optimizers, CodecState(training.model), folder)


EVENTS: list[Callable[[Training], None]] = [
    evaluate,
    drop_a_micro_batch,
    step_with_one_optimizer,
    abandon_a_forward,
    load_state_dict,
    assign,
    write,
    move,
    freeze,
    checkpoint,
]


def each_event_once(training: Training) -> None:
    """With a step after each."""
    for event in EVENTS:
        event(training)
        training.step()


def left_behind(training: Training) -> Held:
    """The counts of a process, at a moment at which the training holds as much as at any other such moment."""
    training.renew_optimizers()
    for _ in range(2):
        training.step()
    return least(_held)


def _held() -> Held:
    counts = tensors_and_objects()
    # torch 2.11 caches operations on DTensors by the numbers in them, too, a step size or a coefficient to clip with:
    # each step of stock fully_shard, too, leaves objects behind.
    return counts | {
        "process groups": len(c10d._world.pg_map),
        "threads": len(os.listdir("/proc/self/task")),
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "objects": len(gc.get_objects()) if torch.__version__ >= (2, 13) else -1,
        "resident bytes": _resident_bytes(),
    }


def _resident_bytes() -> int:
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # what is free goes back to the system
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


MEMORY = "resident bytes"


def rounds(adapter: Adapter, n: int) -> list[Held]:
    """In a worker: what is left behind after each of ``n`` rounds through all events."""
    training, found = Training(adapter), []
    for _ in range(n):
        each_event_once(training)
        found.append(left_behind(training))
    return found


@over_adapters
def test_three_rounds_of_all_events_leave_nothing_behind(pool: Pools, adapter: Adapter) -> None:
    for _, first, last in pool(2).run(rounds, adapter, 3):  # what is made once is there after the first round
        assert {name: last[name] for name in last if name != MEMORY and last[name] > first[name]} == {}
        assert last[MEMORY] <= first[MEMORY] + (16 << 20)


# ---- jobs that restart, scripts that end


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
        Strategy.mixzpp(gpus_per_node=1),
        Strategy.diloco(gpus_per_node=1, local_steps=LocalSteps(2)),
    ):
        model = adapter.make(Case(frozen=strategy.frozen is not None), strategy)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        for step in range(2):
            models.loss_of(model, models.batch(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = gathered_weights(model)
        kept += [model, optimizer, CodecState(model, optimizer), weights, next(weights)]
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
