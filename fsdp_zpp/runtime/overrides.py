"""Strategies of the modules of a model, as the overrides of one strategy give them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from fsdp_zpp.config.overrides import override_for
from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.suggestions import did_you_mean

logger = logging.getLogger("fsdp_zpp")


def unwrapped(module: object) -> object:
    """Return the module inside of torch.compile's and checkpointing's wrappers, whose class is a user's."""
    for name in ("_orig_mod", "_checkpoint_wrapped_module"):
        if isinstance(module, nn.Module) and (inner := module._modules.get(name)) is not None:
            return unwrapped(inner)
    return module


def strategy_for(module: object, strategy: Strategy) -> Strategy:
    """Return the strategy of a module that is sharded by a call of its own, without overrides and with nodes."""
    own = override_for(type(unwrapped(module)), strategy.overrides)
    if own is None:
        return replace(strategy, overrides=())
    return own if own.gpus_per_node is not None else replace(own, gpus_per_node=strategy.gpus_per_node)


def strategies_below(module: nn.Module, outer: Strategy, strategy: Strategy) -> dict[nn.Module, Strategy]:
    """Return the strategies of a module and of all below it.

    Args:
        module: The module.
        outer: The strategy of what is around it.
        strategy: The strategy with the overrides.
    """
    own = override_for(type(module), strategy.overrides) or outer
    found = {module: own}
    for child in module.children():
        found = strategies_below(child, own, strategy) | found
    return found


def warn_of_unmatched(root: nn.Module, model: str, patterns: Iterable[str]) -> None:
    """Warn of patterns of overrides that match the class of no module.

    Args:
        root: The model.
        model: Its name.
        patterns: The patterns.
    """
    names = {type(module).__name__ for module in root.modules()}
    own = {name.removeprefix("FSDP") for name in names}  # fully_shard has renamed them
    classes = names | own
    for pattern in dict.fromkeys(patterns):
        if not any(fnmatchcase(name, pattern) for name in classes):
            hint = did_you_mean(pattern.strip("*"), own, before="; ", most=3)
            logger.warning("%s: overrides for %r apply to no module: no class has such a name%s", model, pattern, hint)
