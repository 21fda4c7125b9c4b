"""What a process holds: hooks, tensors, groups, threads, descriptors, memory."""

from __future__ import annotations

import ctypes
import gc
import os

import torch
import torch.distributed as dist
from soak_training import Training
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import optimizer as torch_optimizer

from fsdp_zpp.runtime import method_hooks

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
    dist.barrier()
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
