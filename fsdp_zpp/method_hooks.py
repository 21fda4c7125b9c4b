"""Hooks after methods of torch's optimizers and gradient scalers; torch itself has them for ``Optimizer.step`` only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

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

    def remove(hooks: dict[int, Hook] = hooks, key: int = id(hook)) -> None:
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
