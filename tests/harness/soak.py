"""A long training to which everything happens that may happen between steps, and what it leaves in its process."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import optimizer as torch_optimizer

from fsdp_zpp import CodecState, Int4, Int4Delta, Int8, LoCo, Strategy, invalidate, method_hooks

from . import lora, models
from .adapter import Adapter, Case
from .fsdp2 import Fsdp2
from .pool import device_type
from .training import logits

STRATEGY = Strategy(
    "IGG",
    weights=Int4Delta(64),
    gradients=Int4(64),
    error_feedback=LoCo(reset_every=50),
    frozen=Int8(64),
    gpus_per_node=1,
)
"""With all that keeps something from step to step: a secondary shard, errors, a quantized base."""
HOOKED = (torch.optim.Optimizer, nn.Module, torch.amp.GradScaler, ShardedGradScaler)


class Training:
    """A net, one block of which is a frozen base with detours, on which two optimizers take turns, with a scaler."""

    def __init__(self, adapter: Adapter, strategy: Strategy, seed: int) -> None:
        self.adapter, self.strategy = adapter, strategy
        self.model = self.make()
        self.random = random.Random(seed)  # the same on all ranks
        self.scaler = ShardedGradScaler(device=device_type(), init_scale=2.0**10, growth_interval=5)
        self.renew_optimizers()
        self.steps = 0

    def make(self) -> Any:
        """The sharded net; with a row of each weight for each of four ranks, or FSDP1 can't load its checkpoints."""
        net = models.make_net(blocks=2, width=66, hidden=91)
        for name in ("up", "down"):
            detour = lora.LowRank(getattr(net.blocks[0], name).requires_grad_(False), rank=4)
            setattr(net.blocks[0], name, detour.to(models.device()))
        return self.adapter.shard(net, Case(), self.strategy)

    @property
    def block(self) -> nn.Module:
        """The one without a frozen base."""
        return self.model.blocks[1]

    def renew_optimizers(self) -> None:
        """Give the parameters to other optimizers."""
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
        """Clear all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()


# ---- what happens between steps


def evaluate(training: Training) -> None:
    """A forward in evaluation."""
    logits(training.model)


def infer(training: Training) -> None:
    """Likewise, in inference mode."""
    with torch.inference_mode():
        logits(training.model)


def skip_a_step(training: Training) -> None:
    """The scaler does."""
    training.step(overflows=True)


def drop_a_micro_batch(training: Training) -> None:
    """Accumulated gradients are cleared, by the model or by its optimizers."""
    with training.adapter.micro_batch(training.model, False, False):
        models.loss_of(training.model, models.batch(training.steps, 7)).backward()
    training.random.choice([training.model.zero_grad, training.zero_grad])()


def step_with_one_optimizer(training: Training) -> None:
    """The other's gradients are cleared."""
    models.loss_of(training.model, models.batch(training.steps, 8)).backward()
    training.random.choice(training.optimizers).step()
    training.model.zero_grad()


def abandon_a_forward(training: Training) -> None:
    """No backward follows it."""
    models.loss_of(training.model, models.batch(training.steps, 9))


def load_state_dict(training: Training) -> None:
    """The model's own."""
    kinds = [kind for kind in training.adapter.state_dict_kinds if kind != "LOCAL_STATE_DICT"]
    training.adapter.load_from(training.model, training.model, training.random.choice(kinds))


def assign(training: Training) -> None:
    """Other parameters, of which other optimizers are made."""
    if isinstance(training.adapter, Fsdp2):
        training.model.load_state_dict(training.model.state_dict(), assign=True)
        training.renew_optimizers()


def write(training: Training) -> None:
    """To the weights, with an announcement."""
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.mul_(0.99)
    invalidate(training.model)


def move(training: Training) -> None:
    """To other memory."""
    training.model._apply(torch.clone)


def look(training: Training) -> None:
    """At the full weights."""
    training.adapter.full_weights(training.model)


def renew_optimizers(training: Training) -> None:
    """Others take over."""
    training.renew_optimizers()


def freeze(training: Training) -> None:
    """A block, for a step; FullyShardedDataParallel, stock too, can't freeze what an abandoned forward has used."""
    training.step()
    training.block.requires_grad_(False)
    training.step()
    training.block.requires_grad_(True)


def resume(training: Training) -> None:
    """From state dicts of the model, its optimizers and its codecs."""
    training.adapter.before_load(training.model)
    state = get_state_dict(training.model, training.optimizers)
    codecs = CodecState(training.model).state_dict()
    set_state_dict(training.model, training.optimizers, model_state_dict=state[0], optim_state_dict=state[1])
    CodecState(training.model).load_state_dict(codecs)


def checkpoint(training: Training) -> None:
    """Save to files and go on from them, in a model that takes the place of this one."""
    # FullyShardedDataParallel, stock too, never frees a frozen unit whose last but one forward had no backward.
    training.step()
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    training.adapter.before_load(training.model)
    weights, states = get_state_dict(training.model, training.optimizers)
    dcp.save({"model": weights, "optimizer": states, "codecs": CodecState(training.model)}, checkpoint_id=folder[0])
    training.model = training.make()
    training.renew_optimizers()
    weights, states = get_state_dict(training.model, training.optimizers)
    state = {"model": weights, "optimizer": states, "codecs": CodecState(training.model)}
    dcp.load(state, checkpoint_id=folder[0])
    set_state_dict(
        training.model, training.optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


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


# ---- what is left


def left_behind(training: Training) -> dict[str, int]:
    """What a process has, at a moment at which the training holds as much as at any other such moment."""
    training.renew_optimizers()
    for _ in range(2):
        training.step()
    gc.collect()
    found = [each for each in gc.get_objects() if isinstance(each, Tensor)]
    # torch 2.11 caches operations on DTensors by the numbers in them, too, a step size or a coefficient to clip with:
    # each step of stock fully_shard, too, leaves objects behind.
    return {
        "process groups": len(c10d._world.pg_map),
        "threads": len(os.listdir("/proc/self/task")),
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "optimizer hooks": _optimizer_hooks(),
        "method hooks": _method_hooks(),
        "module hooks": sum(map(_hooks_of, training.model.modules())) + _global_module_hooks(),
        "tensor hooks": sum(len(p._backward_hooks or ()) + _after_hooks(p) for p in training.model.parameters()),
        "tensors": len(found),
        "tensor bytes": sum({s.data_ptr(): s.nbytes() for s in map(_storage, found) if s is not None}.values()),
        "objects": len(gc.get_objects()) if torch.__version__ >= (2, 13) else -1,
        "resident bytes": _resident_bytes(),
    }


def _optimizer_hooks() -> int:
    return len(torch_optimizer._global_optimizer_post_hooks) + len(torch_optimizer._global_optimizer_pre_hooks)


def _method_hooks() -> int:
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


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    try:
        storage = tensor.untyped_storage()
        storage.data_ptr()
    except (NotImplementedError, RuntimeError):  # that of a subclass or of a fake
        return None
    return storage


def _resident_bytes() -> int:
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # what is free goes back to the system
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def soak(adapter: Adapter, strategy: Strategy, steps: int, every: int, seed: int = 0) -> list[dict[str, int]]:
    """In a worker: what is left behind after each ``every`` of ``steps`` steps, with an event before each of them."""
    training = Training(adapter, strategy, seed)
    each_event_once(training)
    found = []
    for step in range(1, steps + 1):
        seldom = step % 50 == 0
        training.random.choice(SELDOM if seldom else OFTEN)(training)
        training.step(micro_batches=training.random.choice([1, 1, 2]))
        if step % every == 0:
            found.append(left_behind(training))
    return found


def rounds(adapter: Adapter, strategy: Strategy, n: int) -> list[dict[str, int]]:
    """In a worker: what is left behind after each of ``n`` rounds through all events."""
    training = Training(adapter, strategy, 0)
    found = []
    for _ in range(n):
        each_event_once(training)
        found.append(left_behind(training))
    return found


def each_event_once(training: Training) -> None:
    """With a step after each."""
    for event in (*OFTEN, *SELDOM):
        event(training)
        training.step()
