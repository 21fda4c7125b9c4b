"""Private names by which a strategy takes over the parameter group that fully_shard has made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from torch import nn

from fsdp_zpp.runtime.unit import StrategyUnit

from ._torch import FSDPParamGroup, groups_below, groups_of, state_of
from ._torch_group import StrategyGroup
from ._torch_mesh_info import FSDPMeshInfo
from .comms import StrategyAllReduce
from .sharded_by import MARK, as_mark


class StockGroup(StrategyGroup):
    """A parameter group of a strategy for which torch does everything, as it would without one."""

    def weights_changed(self, by_step: bool) -> None:
        """Leave what is unsharded as it is."""

    def drop_gradients(self) -> None:
        """Leave torch's accumulated gradients as they are, whatever is cleared."""


def adopt_groups(
    module: nn.Module,
    units: Sequence[StrategyUnit],
    paths: Sequence[str],
    infos: Sequence[FSDPMeshInfo],
    on_lazy_init: Callable[[nn.Module], None],
) -> list[StrategyGroup | None]:
    """Let torch gather and reduce the parameter groups of ``module`` through units, unless torch does everything.

    Args:
        module: A module on which torch's ``fully_shard`` was just called, alone or with others.
        units: The units, one for each part of the call.
        paths: Their paths within the module.
        infos: The meshes of the parts; empty if the call has one part.
        on_lazy_init: Called with the root when FSDP has initialized all groups below it lazily.

    Returns:
        The group of each unit, which has another class now; None where the module has no parameters of a unit.
    """
    state = state_of(module)
    # Without FSDPMeshInfo it is not sharded: dp_mesh_dims that replicate alone, which are left to torch.
    sharded = [group for group in groups_of(state) if isinstance(group.mesh_info, FSDPMeshInfo)]
    groups: list[FSDPParamGroup | None] = [*sharded] or [None]
    if infos:
        by_ranks = {cast(FSDPMeshInfo, group.mesh_info).shard_process_group: group for group in sharded}
        groups = [by_ranks.get(info.shard_process_group) for info in infos]
    adopted: list[StrategyGroup | None] = []
    for group, unit, path in zip(groups, units, paths, strict=True):
        if group is None:
            adopted.append(None)
            continue
        changed: Any = group
        changed.__class__ = StockGroup if unit.stock else StrategyGroup
        own: StrategyGroup = changed
        own.adopt(state, unit, path, on_lazy_init)
        adopted.append(own)
        for parameter in own.parameters():
            setattr(parameter, MARK, as_mark(unit.strategy))
        if unit.stock:
            continue
        unit.sharded = own
        # Not by the setters of the module, which are for modules of one group.
        if own.weights.comm is not None:
            group._all_gather_comm = own.weights.comm
        if isinstance(own.gradients.comm, StrategyAllReduce):
            group._all_reduce_hook = own.gradients.comm
        elif own.gradients.comm is not None:
            group._reduce_scatter_comm = own.gradients.comm
        # Loading a part of the model runs the hooks of that part only, so they are on whatever holds a parameter.
        for owner in {owner for owners in own.parameter_owners() for owner in owners}:
            owner.register_load_state_dict_post_hook(lambda module, incompatible_keys, unit=unit: unit.weights_loaded())
            # A partial, since torch sets an attribute on the hook, which a method does not take.
            owner.register_state_dict_post_hook(partial(own.weights.share_version_counters))
    return adopted


def strategy_groups_below(root: nn.Module) -> list[StrategyGroup]:
    """Return the groups of strategies below ``root``, outermost first."""
    return [group for group in groups_below(root) if isinstance(group, StrategyGroup)]
