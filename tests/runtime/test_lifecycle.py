"""Hooks by which models hear of optimizers and scalers are removed with their model, at any moment."""

from __future__ import annotations

import gc
import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdp_zpp.runtime.lifecycle import LifecycleHooks
from fsdp_zpp.runtime.method_hooks import register_method_post_hook
from fsdp_zpp.runtime.optimizer_modes import register_mode_hook


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def test_a_model_may_be_freed_in_the_middle_of_a_step() -> None:
    models = [LifecycleHooks([]), LifecycleHooks([])]
    alive = weakref.WeakSet(models)
    handle = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: (models.clear(), gc.collect()))
    another = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: None)
    try:
        sgd().step()
    finally:
        handle.remove()
        another.remove()
    assert len(alive) == 0


def test_hooks_run_until_they_are_removed() -> None:
    calls: list[object] = []
    remove = register_method_post_hook(torch.optim.Optimizer, "zero_grad", lambda optimizer, *args: calls.append(args))
    optimizer = sgd()
    optimizer.zero_grad(False)
    remove()
    remove()
    optimizer.zero_grad()
    assert calls == [(False,)]


class Averaging(torch.optim.SGD):
    """Has the methods of schedule-free optimizers."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


def test_a_change_of_mode_is_heard_once() -> None:
    calls: list[object] = []
    optimizer = Averaging([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    hook = calls.append
    remove = register_mode_hook(hook)
    for _ in range(3):
        optimizer.train()
    assert len(calls) == 1
    optimizer.eval()
    assert len(calls) == 2
    optimizer.load_state_dict(optimizer.state_dict())  # perhaps saved in the other mode
    optimizer.eval()
    assert len(calls) == 3
    Averaging([torch.nn.Parameter(torch.zeros(1))], lr=0.1).eval()  # another one is in a mode of its own
    assert len(calls) == 4
    remove()
    optimizer.train()
    assert len(calls) == 4
