"""Hooks that run after methods of torch's classes, and that may be removed at any time."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

_STEP_HOOKS = "_fsdp_zpp_step_hooks"
_HOOKS = "_fsdp_zpp_hooks"

Hook = Callable[..., None]


def register_method_post_hook(owner: type, method: str, hook: Hook) -> Callable[[], None]:
    """Run ``hook(instance, *args, **kwargs)`` after each call of a class's method; return a function that removes it.

    It does not run for a subclass that overrides the method without calling it.
    """
    hooks: dict[int, Hook] | None = getattr(getattr(owner, method), _HOOKS, None)
    if hooks is None:
        hooks = _install(owner, method)
    hooks[id(hook)] = hook
    return _remover(hooks, hook)


def register_step_hook(hook: Hook) -> Callable[[], None]:
    """Run ``hook(optimizer)`` after each step of a torch optimizer; return a function that removes it at any time."""
    # torch iterates over its step hooks as it runs them, so removing one meanwhile raises; a garbage collection could
    # do that to the hook of a model that is gone. So torch gets one hook, for good, which runs all that are added here.
    if not hasattr(Optimizer, _STEP_HOOKS):
        register_optimizer_step_post_hook(lambda optimizer, args, kwargs: run_hooks(Optimizer, _STEP_HOOKS, optimizer))
    return add_hook(Optimizer, _STEP_HOOKS, hook)


def add_hook(owner: type, name: str, hook: Hook) -> Callable[[], None]:
    """Add a hook to those that a class has under ``name``; return a function that removes it at any time."""
    # On torch's class, where torch's own hooks are, rather than in a global of this module.
    if not hasattr(owner, name):
        setattr(owner, name, {})
    hooks: dict[int, Hook] = getattr(owner, name)
    hooks[id(hook)] = hook
    return _remover(hooks, hook)


def run_hooks(owner: type, name: str, *args: object, **kwargs: object) -> None:
    """Run the hooks that :func:`add_hook` has added."""
    hooks: dict[int, Hook] = getattr(owner, name, {})
    for hook in list(hooks.values()):  # a copy, since a hook may be removed meanwhile
        hook(*args, **kwargs)


def _remover(hooks: dict[int, Hook], hook: Hook) -> Callable[[], None]:
    def remove(key: int = id(hook)) -> None:  # by id, so that it keeps nothing alive
        hooks.pop(key, None)

    return remove


def _install(owner: type, method: str) -> dict[int, Hook]:
    """Wrap the method, once for all hooks; they are kept on the wrapper."""
    original = getattr(owner, method)
    hooks: dict[int, Hook] = {}

    @functools.wraps(original)
    def wrapped(self: object, *args: object, **kwargs: object) -> object:
        result: object = original(self, *args, **kwargs)
        for hook in list(hooks.values()):  # a copy, since a hook may be removed meanwhile
            hook(self, *args, **kwargs)
        return result

    setattr(wrapped, _HOOKS, hooks)
    setattr(owner, method, wrapped)
    return hooks
