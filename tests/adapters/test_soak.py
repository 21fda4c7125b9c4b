"""A long training to which everything happens that may happen between steps leaves nothing behind in its process."""

from __future__ import annotations

import ctypes
import gc
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import lora, models
from harness.adapter import Adapter, Case
from harness.covering import over_adapters
from harness.fsdp2 import Fsdp2
from harness.impatient_pool import ImpatientPool
from harness.live_bytes import tensors_and_objects
from harness.pool import Pool, device_type, shared_folder
from harness.training import load, logits, save
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import optimizer as torch_optimizer

from fsdp_zpp import CodecState, Int4, Int4Delta, Int8, LoCo, Strategy, invalidate
from fsdp_zpp.runtime import method_hooks

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
    """A net, one block of which is a frozen base with detours, on which two optimizers take turns, with a scaler."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.model = self.make()
        self.random = random.Random(0)  # the same on all ranks
        self.scaler = ShardedGradScaler(device=device_type(), init_scale=2.0**10, growth_interval=5)
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

    def step(self, overflows: bool = False, micro_batches: int = 1) -> None:
        """One step of all optimizers, which the scaler skips if a gradient overflows."""
        for micro_batch in range(micro_batches):
            last = micro_batch == micro_batches - 1
            with self.adapter.micro_batch(self.model, last, False):
                loss = models.loss_of(self.model, models.batch(self.steps, micro_batch))
                loss = loss * torch.inf if overflows and last else loss
                self.scaler.scale(loss).backward()
        for optimizer in self.optimizers:
            if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                self.scaler.step(optimizer)
        self.scaler.update()
        self.zero_grad()
        self.steps += 1

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


# ---- events


def evaluate(training: Training) -> None:
    logits(training.model)


def infer(training: Training) -> None:
    with torch.inference_mode():
        logits(training.model)


def skip_a_step(training: Training) -> None:
    training.step(overflows=True)


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


def look(training: Training) -> None:
    training.adapter.full_weights(training.model)


def renew_optimizers(training: Training) -> None:
    training.renew_optimizers()


def freeze(training: Training) -> None:
    """A block, for a step; FullyShardedDataParallel, stock too, can't freeze what an abandoned forward has used."""
    training.step()
    training.block.requires_grad_(False)
    training.step()
    training.block.requires_grad_(True)


def resume(training: Training) -> None:
    training.adapter.before_load(training.model)
    state = get_state_dict(training.model, training.optimizers)
    codecs = CodecState(training.model).state_dict()
    set_state_dict(training.model, training.optimizers, model_state_dict=state[0], optim_state_dict=state[1])
    CodecState(training.model).load_state_dict(codecs)


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


OFTEN: list[Callable[[Training], None]] = [
    evaluate,
    infer,
    skip_a_step,
    drop_a_micro_batch,
    step_with_one_optimizer,
    abandon_a_forward,
    load_state_dict,
    assign,
    write,
    move,
    look,
    renew_optimizers,
    freeze,
    resume,
]
SELDOM: list[Callable[[Training], None]] = [checkpoint]


def each_event_once(training: Training) -> None:
    """With a step after each."""
    for event in (*OFTEN, *SELDOM):
        event(training)
        training.step()


# ---- what a process holds

HOOKED = (torch.optim.Optimizer, nn.Module, torch.amp.GradScaler, ShardedGradScaler)


def left_behind(training: Training) -> dict[str, int]:
    """What a process has, at a moment at which the training holds as much as at any other such moment."""
    training.renew_optimizers()
    for _ in range(2):
        training.step()
    # The scaler's last all-reduce has ended, but gloo's thread may not yet have let go of its tensor, for which it
    # needs this thread to wait; what has leaked is there every time.
    looks = [_held(training) for _ in range(3)]
    return {name: min(look[name] for look in looks) for name in looks[0]}


def _held(training: Training) -> dict[str, int]:
    counts = tensors_and_objects()
    # torch 2.11 caches operations on DTensors by the numbers in them, too, a step size or a coefficient to clip with:
    # each step of stock fully_shard, too, leaves objects behind.
    return counts | {
        "process groups": len(c10d._world.pg_map),
        "threads": len(os.listdir("/proc/self/task")),
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "optimizer hooks": _optimizer_hooks(),
        "method hooks": _method_hooks(),
        "module hooks": sum(map(_hooks_of, training.model.modules())) + _global_module_hooks(),
        "tensor hooks": sum(len(p._backward_hooks or ()) + _after_hooks(p) for p in training.model.parameters()),
        "objects": len(gc.get_objects()) if torch.__version__ >= (2, 13) else -1,
        "resident bytes": _resident_bytes(),
    }


def _optimizer_hooks() -> int:
    return len(torch_optimizer._global_optimizer_post_hooks) + len(torch_optimizer._global_optimizer_pre_hooks)


def _method_hooks() -> int:
    # Counted where they are kept, since a hook that is left behind shows nowhere else.
    tables = {
        id(hooks): hooks
        for owner in HOOKED
        for method in vars(owner).values()
        if (hooks := getattr(method, method_hooks._HOOKS, None)) is not None
    }
    return len(getattr(torch.optim.Optimizer, method_hooks._STEP_HOOKS)) + sum(map(len, tables.values()))


def _hooks_of(module: nn.Module) -> int:
    return sum(len(hooks) for name, hooks in vars(module).items() if name.endswith("_hooks") and hooks)


def _global_module_hooks() -> int:
    registry = vars(nn.modules.module)
    return sum(len(hooks) for name, hooks in registry.items() if name.startswith("_global") and isinstance(hooks, dict))


def _after_hooks(parameter: Tensor) -> int:
    return len(parameter._post_accumulate_grad_hooks or ())


def _resident_bytes() -> int:
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # what is free goes back to the system
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- tests

MEMORY = "resident bytes"


def rounds(adapter: Adapter, n: int) -> list[dict[str, int]]:
    """In a worker: what is left behind after each of ``n`` rounds through all events."""
    training, found = Training(adapter), []
    for _ in range(n):
        each_event_once(training)
        found.append(left_behind(training))
    return found


def soak(adapter: Adapter, steps: int, every: int) -> list[dict[str, int]]:
    """In a worker: what is left behind after each ``every`` of ``steps`` steps, with an event before each of them."""
    training, found = Training(adapter), []
    each_event_once(training)
    for step in range(1, steps + 1):
        training.random.choice(OFTEN if step % 50 else SELDOM)(training)
        training.step(micro_batches=training.random.choice([1, 1, 2]))
        if step % every == 0:
            found.append(left_behind(training))
    return found


def check(found: list[list[dict[str, int]]], growth: int) -> None:
    """Fail if a process had more at the end than at the beginning; of memory, ``growth`` bytes more."""
    for first, *_, last in found:
        assert {name: last[name] for name in last if name != MEMORY and last[name] > first[name]} == {}
        assert last[MEMORY] <= first[MEMORY] + growth


@over_adapters
def test_three_rounds_of_all_events_leave_nothing_behind(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    found = pool(2).run(rounds, adapter, 3)
    check([after[1:] for after in found], growth=16 << 20)  # what is made once is there after the first round


@pytest.mark.slow
@over_adapters
def test_ten_thousand_steps_leave_nothing_behind(adapter: Adapter) -> None:
    pool = ImpatientPool(2, patience=60)
    try:
        found = pool.run(soak, adapter, 10_000, 1000)
    finally:
        pool.stop(kill=True)
    check(found, growth=8 << 20)
