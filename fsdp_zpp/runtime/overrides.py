"""Strategies of the modules of a model, as the overrides of one strategy give them."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fsdp_zpp.config.overrides import override_for
from fsdp_zpp.config.strategy import Strategy


def strategy_for(module: object, strategy: Strategy) -> Strategy:
    """Return the strategy of a module that is sharded by a call of its own, without overrides and with nodes."""
    own = override_for(type(module), strategy.overrides)
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
