"""Private names of torch's fully_shard: optimizers in the backward that step on offloaded parameters.

From torch 2.13 on, torch copies the gradient of a parameter with hooks to the CPU while the CPU waits; before, its
hooks saw gradients that were still on their way. Here hooks are taken off while torch reduces, so that it copies
without a wait, and run as collectives/arriving_gradients.py says.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from fsdp_zpp.collectives.arriving_gradients import ArrivingGradients

from ._torch_use import Hooks, set_hooks


@contextmanager
def stepping_on_arrival(group: FSDPParamGroup, arriving: ArrivingGradients, left_out: Container[int]) -> Iterator[None]:
    """Return a context in which torch reduces gradients of ``group``, whose hooks then run when these have arrived.

    Args:
        group: The group, whose parameters are offloaded.
        arriving: Where its steps wait.
        left_out: Parameters, by id, whose hooks are postponed for another reason.
    """
    hooked: list[tuple[FSDPParam, Hooks, object]] = []
    for param in group.fsdp_params:
        hooks: Hooks | None = getattr(param.sharded_param, "_post_accumulate_grad_hooks", None)
        if hooks and id(param) not in left_out:
            hooked.append((param, hooks, _state_of_gradient(param)))
            set_hooks(param, None)
    if not hooked:
        yield
        return
    try:
        yield
    finally:
        for param, hooks, _ in hooked:
            set_hooks(param, hooks)
    stepping = [(param, hooks) for param, hooks, before in hooked if _state_of_gradient(param) != before]
    if stepping:
        events = [param.grad_offload_event for param, _ in stepping if param.grad_offload_event is not None]
        # All gradients of a group are copied in one stream, so that the last one's copy is the last.
        arriving.step_on_arrival(events[-1] if events else None, partial(_run, stepping))


def _state_of_gradient(param: FSDPParam) -> object:
    """Return a value that changes when torch sets the sharded gradient of a parameter, or adds to it."""
    gradient: Any = param.sharded_param.grad
    return None if gradient is None else (id(gradient), gradient._local_tensor._version)


def _run(stepping: list[tuple[FSDPParam, Hooks]]) -> None:
    for param, hooks in stepping:
        for hook in hooks.values():
            hook(param.sharded_param)
