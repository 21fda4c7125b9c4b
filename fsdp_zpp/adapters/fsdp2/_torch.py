"""Private names of torch's fully_shard: states of modules, their parameter groups, and moves of a model.

The other ``_torch_*.py`` files of this folder build on it; ``_needed.py`` lists the names that all of them use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import cast

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

__all__ = [
    "AllGather",
    "FSDPParam",
    "FSDPParamGroup",
    "FSDPState",
    "ReduceScatter",
    "after_moves",
    "groups_below",
    "groups_of",
    "init_groups_lazily",
    "is_managed",
    "names_in",
    "numel_of",
    "sizes_of_other_groups",
    "state_of",
]

state_of: Callable[[nn.Module], FSDPState] = fully_shard.state  # type: ignore[attr-defined]


def is_managed(module: nn.Module) -> bool:
    """Return whether a call of fully_shard, for ``module`` or one around it, has sharded its parameters."""
    return bool(vars(module).get("_is_fsdp_managed_module", False))


def groups_of(state: FSDPState) -> list[FSDPParamGroup]:
    """Return the parameter groups of a module."""
    # torch 2.12 allows for several groups a module; before, there was one or none.
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def init_groups_lazily(root: nn.Module) -> None:
    """Initialize the parameter groups of a model again, whose root torch takes for initialized, as torch allows."""
    for state in state_of(root)._state_ctx.all_states:
        for group in groups_of(state):
            group.lazy_init()


def numel_of(group: FSDPParamGroup) -> int:
    """Return the number of values of a group's parameters, on all ranks together."""
    return sum(param.sharded_param.numel() for param in group.fsdp_params)


def names_in(group: FSDPParamGroup) -> dict[FSDPParam, str]:
    """Return the names of a group's parameters in its modules.

    FQNs are known only from lazy initialization on, and a checkpoint may be loaded before that.
    """
    paths: dict[nn.Module, str] = {}
    for index, module in enumerate(group.modules):
        for path, part in module.named_modules(prefix=str(index)):
            paths.setdefault(part, path)
    infos = [(param, param._module_info) for param in group.fsdp_params]
    return {param: f"{paths[info.module]}.{info.param_name}" for param, info in infos}


def groups_below(root: nn.Module) -> list[FSDPParamGroup]:
    """Return the parameter groups of all modules below ``root``, outermost first; that of a list of modules once."""
    states = [module._get_fsdp_state() for module in root.modules() if isinstance(module, FSDPModule)]
    return list(dict.fromkeys(group for state in states for group in groups_of(state)))


def sizes_of_other_groups(root: nn.Module, groups: Collection[FSDPParamGroup]) -> list[int]:
    """Return the numbers of values of the parameter groups below ``root`` that are not among ``groups``."""
    return [numel_of(group) for group in groups_below(root) if group not in groups]


def after_moves(callback: Callable[[nn.Module], None]) -> None:
    """Run ``callback(module)`` after each move or cast of a sharded module's parameters: ``to()``, ``half()``.

    All of these go through ``_apply``, module by module.
    """
    original = FSDPModule._apply

    @functools.wraps(original)
    def _apply(self: FSDPModule, *args: object, **kwargs: object) -> FSDPModule:
        groups = groups_of(self._get_fsdp_state())
        before = [(p, dict(vars(p))) for group in groups for p in (param.sharded_param for param in group.fsdp_params)]
        moved = original(self, *args, **kwargs)
        for parameter, attributes in before:  # torch swaps a DTensor with a new one, which loses its attributes
            marks = {name: value for name, value in attributes.items() if name.startswith("_fsdp_zpp")}
            vars(parameter).update(marks)
        callback(cast(nn.Module, self))
        return moved

    FSDPModule._apply = _apply  # type: ignore[method-assign]
