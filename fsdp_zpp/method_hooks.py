"""Hooks after methods of torch's optimizers and gradient scalers, which may come and go at any time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

_STEP_HOOKS = "_fsdp_zpp_step_hooks"
_HOOKS = "_fsdp_zpp_hooks"

Hook = Callable[..., None]


def register_method_post_hook(owner: type, method: str, hook: Hook) -> Callable[[], None]:
    """Have ``hook(instance, *args, **kwargs)`` run after every call of a class's method; returns what removes it.

    A subclass that overrides the method without calling it is not seen.
    """
    hooks: dict[int, Hook] | None = getattr(getattr(owner, method), _HOOKS, None)
    if hooks is None:
        hooks = _install(owner, method)
    hooks[id(hook)] = hook
    return _remover(hooks, hook)


def register_step_hook(hook: Hook) -> Callable[[], None]:
    """Have ``hook(optimizer)`` run after every step of torch's optimizers; returns what removes it, at any time.

    torch's own hooks must not be removed while an optimizer runs them, which a garbage collection could do to those of
    a model that is gone. So torch gets one hook, for good, which runs all of ours.
    """
    hooks: dict[int, Hook] | None = getattr(Optimizer, _STEP_HOOKS, None)
    if hooks is None:
        hooks = {}
        setattr(Optimizer, _STEP_HOOKS, hooks)

        def run_all(optimizer: Optimizer, args: Any, kwargs: Any, hooks: dict[int, Hook] = hooks) -> None:
            for hook in list(hooks.values()):
                hook(optimizer)

        register_optimizer_step_post_hook(run_all)
    hooks[id(hook)] = hook
    return _remover(hooks, hook)


def _remover(hooks: dict[int, Hook], hook: Hook) -> Callable[[], None]:
    def remove(key: int = id(hook)) -> None:  # by its number, to keep nothing alive
        hooks.pop(key, None)

    return remove


def _install(owner: type, method: str) -> dict[int, Hook]:
    """Wrap the method; the hooks are kept on it, as torch keeps its step hooks with the class."""
    original = getattr(owner, method)
    hooks: dict[int, Hook] = {}

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        for hook in list(hooks.values()):
            hook(self, *args, **kwargs)
        return result

    setattr(wrapped, _HOOKS, hooks)
    setattr(owner, method, wrapped)
    return hooks
