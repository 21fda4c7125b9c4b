"""The hooks by which models hear of optimizers and scalers are removed with their model, at any moment."""

from __future__ import annotations

import gc
import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdp_zpp.runtime.lifecycle import LifecycleHooks
from fsdp_zpp.runtime.method_hooks import register_method_post_hook


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
    heard: list[object] = []
    remove = register_method_post_hook(torch.optim.Optimizer, "zero_grad", lambda optimizer, *args: heard.append(args))
    optimizer = sgd()
    optimizer.zero_grad(False)
    remove()
    remove()
    optimizer.zero_grad()
    assert heard == [(False,)]
