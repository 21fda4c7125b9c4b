"""Private names by which a strategy takes over the parameter group that fully_shard has made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_zpp.runtime.unit import StrategyUnit

from ._torch import groups_of, state_of
from ._torch_group import StrategyGroup
from .comms import StrategyAllReduce


class StockGroup(StrategyGroup):
    """A parameter group of a strategy for which torch does everything, as it would without one."""

    def weights_changed(self, by_step: bool) -> None:
        """Leave what is unsharded as it is."""

    def drop_gradients(self) -> None:
        """Leave torch's accumulated gradients as they are, whatever is cleared."""


def adopt_group(
    module: nn.Module, unit: StrategyUnit, on_lazy_init: Callable[[nn.Module], None]
) -> StrategyGroup | None:
    """Let torch gather and reduce the parameter group of ``module`` through ``unit``, unless torch does everything.

    Args:
        module: A module on which torch's ``fully_shard`` was just called, alone or with others.
        unit: Its unit.
        on_lazy_init: Called with the root when FSDP has initialized all groups below it lazily.

    Returns:
        The group; None if torch has not made just one.
    """
    assert isinstance(module, FSDPModule)
    state = state_of(module)
    groups = groups_of(state)
    if len(groups) != 1:
        return None
    adopted: Any = groups[0]
    adopted.__class__ = StockGroup if unit.stock else StrategyGroup
    group: StrategyGroup = adopted
    group.adopt(state, unit, on_lazy_init)
    if unit.stock:
        return group
    unit.sharded = group
    if unit.gather is not None and group.weights.comm is not None:
        unit.gather.secondary.source = group.weights
        module.set_custom_all_gather(group.weights.comm)
    if isinstance(group.gradients.comm, StrategyAllReduce):
        module.set_all_reduce_hook(group.gradients.comm)
    elif group.gradients.comm is not None:
        module.set_custom_reduce_scatter(group.gradients.comm)
    # Loading a part of the model runs the hooks of that part only, so they are on whatever holds a parameter.
    for owner in {owner for owners in group.parameter_owners() for owner in owners}:
        owner.register_load_state_dict_post_hook(lambda module, incompatible_keys: unit.weights_loaded())
    return group


def strategy_group_of(module: FSDPModule) -> StrategyGroup | None:
    """Return the group of a module, if it was adopted."""
    groups = [group for group in groups_of(module._get_fsdp_state()) if isinstance(group, StrategyGroup)]
    return groups[0] if groups else None
