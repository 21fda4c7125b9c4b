"""Private names of torch's fully_shard: states, parameter groups, and how a strategy adopts a group.

The other ``_torch_*.py`` files of this folder build on it; ``_needed.py`` lists the names that all of them use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from fsdp_zpp.collectives.exact_places import sent_exactly
from fsdp_zpp.runtime.sharded import Sharded

from ._torch_gradients import divided_by
from ._torch_trained import shows_trained
from ._torch_unshard import GatheringGroup, ShardGather

__all__ = [
    "AllGather",
    "FSDPParam",
    "FSDPParamGroup",
    "FSDPState",
    "ReduceScatter",
    "ShardGather",
    "StrategyGroup",
    "adopt_group",
    "after_moves",
    "divided_by",
    "groups_of",
    "state_of",
    "strategy_group_of",
]

state_of: Callable[[nn.Module], FSDPState] = fully_shard.state  # type: ignore[attr-defined]


class StrategyGroup(GatheringGroup, Sharded):
    """A parameter group that a strategy gathers and reduces. Made by :func:`adopt_group` from the one torch built."""

    _state: FSDPState
    _on_lazy_init: Callable[[nn.Module], None] | None
    _known_names: Mapping[FSDPParam, str] = MappingProxyType({})

    def lazy_init(self) -> None:
        super().lazy_init()
        states = self._state._state_ctx.all_states  # empty as long as there was no forward
        if states:
            self._name_what_was_unsharded(states[0]._modules[0])
        groups = [group for state in states for group in groups_of(state) if isinstance(group, StrategyGroup)]
        # Lazy initialization may replace the parameters of a group, so this must wait for the last group's.
        if groups and groups[-1] is self and self._on_lazy_init is not None:
            callback, self._on_lazy_init = self._on_lazy_init, None
            callback(states[0]._modules[0])  # the root's state comes first

    def _name_what_was_unsharded(self, root: nn.Module) -> None:
        """Give parameters their FQNs that torch has not found, since ``unshard()`` came before the first forward."""
        if all(param._param_fqn is not None for param in self.fsdp_params):
            return
        paths = {module: path for path, module in root.named_modules()}
        for param in self.fsdp_params:
            info = param._module_info
            param._param_fqn = ".".join(filter(None, (paths[info.module], info.param_name)))
        self._plan, self._layouts = None, {}  # which go by these names

    def adopt(self) -> None:
        """Initialize the attributes of the classes that it builds on, and put small parameters last."""
        super().adopt()
        # Among the others they would shift these, so that blocks straddled two of them.
        exact = sent_exactly([param._orig_size for param in self.fsdp_params])
        places = sorted(range(len(exact)), key=exact.__getitem__)
        self.fsdp_params = [self.fsdp_params[place] for place in places]

    @property
    def name(self) -> str:
        """The group's modules, by their paths from the root."""
        return self._module_fqn or "root"

    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters, as an optimizer holds them."""
        return [param.sharded_param for param in self.fsdp_params]

    def shards(self) -> list[Tensor]:
        """What this rank holds of the parameters."""
        return [param._sharded_param_data for param in self.fsdp_params]

    def numel(self) -> int:
        """The number of values of its parameters, on all ranks together."""
        return _numel_of(self)

    def named_shards(self) -> dict[str, Tensor]:
        """What this rank holds of the parameters, by their names in the group's modules."""
        return {name: param._sharded_param_data for name, param in zip(self._names(), self.fsdp_params, strict=True)}

    def trained_names(self) -> list[str]:
        """The names of those that require a gradient, as modules show them now, or have one."""
        named = zip(self._names(), self.fsdp_params, strict=True)
        return [name for name, param in named if shows_trained(param) or param.sharded_param.grad is not None]

    def _names(self) -> list[str]:
        if not all(param in self._known_names for param in self.fsdp_params):
            self._known_names = dict(zip(self.fsdp_params, self._find_names(), strict=True))
        return [self._known_names[param] for param in self.fsdp_params]

    def _find_names(self) -> list[str]:
        # FQNs are known only from lazy initialization on, and a checkpoint may be loaded before that.
        paths: dict[nn.Module, str] = {}
        for index, module in enumerate(self.modules):
            for path, part in module.named_modules(prefix=str(index)):
                paths.setdefault(part, path)
        infos = [param._module_info for param in self.fsdp_params]
        return [f"{paths[info.module]}.{info.param_name}" for info in infos]

    def parameter_owners(self) -> list[tuple[nn.Module, ...]]:
        """For each parameter, the modules on which it is registered."""
        infos = [param._module_info for param in self.fsdp_params]
        return [(info.module, *info.shared_modules) for info in infos]


class StockGroup(StrategyGroup):
    """A parameter group of a strategy for which torch does everything, as it would without one."""

    def weights_changed(self, by_step: bool) -> None:
        """Leave what is unsharded as it is."""

    def drop_gradients(self) -> None:
        """Leave torch's accumulated gradients as they are, whatever is cleared."""


def adopt_group(module: nn.Module, on_lazy_init: Callable[[nn.Module], None], stock: bool) -> StrategyGroup | None:
    """The parameter group that ``fully_shard`` just made for ``module``, ready for a strategy, if it made just one.

    Args:
        module: A module on which torch's ``fully_shard`` was called.
        on_lazy_init: Called with the root when FSDP has initialized all groups below it lazily.
        stock: Whether torch does everything.
    """
    state = state_of(module)
    groups: list[Any] = groups_of(state)
    if len(groups) != 1:
        return None
    (group,) = groups
    group.__class__ = StockGroup if stock else StrategyGroup
    group._state, group._on_lazy_init = state, on_lazy_init
    group.adopt()
    return group


def strategy_group_of(module: FSDPModule) -> StrategyGroup | None:
    """The group of a module, if it was adopted."""
    groups = [group for group in groups_of(module._get_fsdp_state()) if isinstance(group, StrategyGroup)]
    return groups[0] if groups else None


def sizes_of_other_groups(root: nn.Module, groups: Collection[StrategyGroup]) -> list[int]:
    """The numbers of values of the parameter groups below ``root`` that are not among ``groups``."""
    below = {
        id(group): group
        for module in root.modules()
        if isinstance(module, FSDPModule)
        for group in groups_of(module._get_fsdp_state())
    }
    return [_numel_of(group) for group in below.values() if group not in groups]


def _numel_of(group: FSDPParamGroup) -> int:
    return sum(param.sharded_param.numel() for param in group.fsdp_params)


def after_moves(callback: Callable[[nn.Module], None]) -> None:
    """Have ``callback(module)`` run after the parameters of a sharded module were moved or cast: ``to()``, ``half()``.

    Whatever moves a model goes through ``_apply``, module by module.
    """
    original = FSDPModule._apply

    @functools.wraps(original)
    def _apply(self: FSDPModule, *args: Any, **kwargs: Any) -> Any:
        groups = groups_of(self._get_fsdp_state())
        before = [(p, dict(vars(p))) for group in groups for p in (param.sharded_param for param in group.fsdp_params)]
        moved = original(self, *args, **kwargs)
        for parameter, attributes in before:  # torch swaps a DTensor with a new one, which loses its attributes
            ours = {name: value for name, value in attributes.items() if name.startswith("_fsdp_zpp")}
            vars(parameter).update(ours)
        callback(cast(nn.Module, self))
        return moved

    FSDPModule._apply = _apply  # type: ignore[method-assign]


def groups_of(state: FSDPState) -> list[FSDPParamGroup]:
    """The parameter groups of a module."""
    # torch 2.12 allows for several groups a module; before, there was one or none.
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
