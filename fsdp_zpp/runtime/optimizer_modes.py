"""Optimizers whose ``train`` and ``eval`` write to the weights, as schedule-free ones do.

They train other weights than they evaluate, and parameters hold one kind at a time. torch's own optimizers have no such
methods. Trainer calls ``train`` before each micro-batch, so a call that repeats the last one changes nothing; every
other one is an event, which all ranks see, like a step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch.optim.optimizer import Optimizer

from .method_hooks import Hook, add_hook, register_method_post_hook, run_hooks

_HOOKS = "_fsdp_zpp_mode_hooks"
_MODE = "_fsdp_zpp_mode"


def register_mode_hook(hook: Hook) -> Callable[[], None]:
    """Run ``hook(optimizer)`` after ``train`` or ``eval`` may have changed weights; return a function that removes it.

    It runs for optimizers that are torch's or derived from it.
    """
    return add_hook(Optimizer, _HOOKS, hook)


def watch_modes(optimizer: Optimizer) -> None:
    """Wrap ``train`` and ``eval`` of this optimizer's class, if it has them, so that they run the hooks."""
    for mode, hook in _CALLED.items():
        if callable(getattr(type(optimizer), mode, None)):
            register_method_post_hook(type(optimizer), mode, hook)


def _called(mode: str, optimizer: Optimizer, *args: object, **kwargs: object) -> None:
    if vars(optimizer).get(_MODE) != mode:
        setattr(optimizer, _MODE, mode)
        run_hooks(Optimizer, _HOOKS, optimizer)


def _forget(optimizer: Optimizer, *args: object, **kwargs: object) -> None:
    """Forget the mode, since the state that was loaded may have been saved in the other one."""
    vars(optimizer).pop(_MODE, None)


_CALLED: dict[str, Hook] = {mode: partial(_called, mode) for mode in ("train", "eval")}
register_method_post_hook(Optimizer, "load_state_dict", _forget)
