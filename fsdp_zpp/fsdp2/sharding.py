"""From ``fully_shard(module, strategy=strategy)`` to units that gather and reduce."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, overload

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard as torch_fully_shard

from .. import units
from ..accelerator import accelerator
from ..agreement import check_agreement, parameter_facts
from ..frozen.implied import quantize_for, warn_if_nothing_is_frozen
from ..frozen.owners import register_owners
from ..managed_unit import ManagedUnit
from ..staleness import watch, weights_moved
from ..strategy import Strategy
from ..strategy_unit import StrategyUnit
from ..support import mesh_for, model_name, strategy_facts
from ..topology import ProcessMesh, own_rank
from ..usage import used_by_any
from . import _torch, _torch_owned
from .comms import StrategyAllReduce, StrategyAllReduceAfter, StrategyReduceScatter, all_gather_of
from .validation import check_arguments, check_strategy, is_torchs_own, named_own_parameters


@overload
def fully_shard(
    module: nn.Module,
    *,
    strategy: Strategy,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | None = ...,
    **arguments: Any,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    strategy: Strategy,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | None = ...,
    **arguments: Any,
) -> list[FSDPModule]: ...


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    strategy: Strategy,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    **arguments: Any,
) -> FSDPModule | list[FSDPModule]:
    """Apply torch's ``fully_shard`` to ``module``, in place, and shard it by ``strategy``.

    Call it bottom-up, like torch's. Calls of one model may have different strategies, or be torch's own; to clip the
    gradients of all together, torch asks for one mesh, which is one third letter.

    Args:
        module: The module, or several that are gathered together.
        strategy: Where each model state lives and how each hop is encoded.
        mesh: The 1-D mesh of the data-parallel ranks; a dimension of a larger mesh will do. Default: all ranks.
            How they split into nodes is the strategy's ``gpus_per_node``.
        reshard_after_forward: As torch's, but for an int: keeping a secondary shard inside of each node is what
            the strategy's first letter ``I`` stands for. ``Strategy("GGG")`` on one node is torch's ``fully_shard``
            itself, and takes all that it takes.
        **arguments: As torch's: ``mp_policy``, ``offload_policy``, ``shard_placement_fn``, ``ignored_params``.

    Returns:
        ``module``, whose class is now torch's ``FSDPModule``.

    Raises:
        TypeError: If ``strategy`` is not a :class:`Strategy`, or a parameter has a dtype that none can shard.
        ValueError: If the mesh or another argument does not fit a strategy.
        NotImplementedError: If the strategy can't be combined with another parallelism that has sharded the module.

    Example:
        >>> for layer in model.layers:
        ...     fully_shard(layer, strategy=Strategy.zeropp())
        >>> fully_shard(model, strategy=Strategy.zeropp())
    """
    passed_on = {"mesh": mesh, "reshard_after_forward": reshard_after_forward, **arguments}
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    check_strategy(strategy)
    _check_agreement(modules, strategy, passed_on)
    check_arguments(modules, strategy, passed_on)
    unit = _unit_for(strategy, passed_on)
    policy = passed_on.get("mp_policy")
    for each in modules:
        ignored = passed_on.get("ignored_params") or ()
        dtype = None if policy is None else policy.param_dtype
        quantize_for(strategy, each, unit.mesh, ignored=ignored, dtype=dtype)
    sharded = torch_fully_shard(module, **passed_on)
    group = _torch.adopt_group(modules[0], _watch)
    if is_torchs_own(strategy):
        for each in modules:
            units.attach(each, unit)
    elif group is not None:  # else the module has no parameters of its own
        _apply(unit, modules, group)
    return sharded


_torch.after_moves(weights_moved)
register_owners(lambda model: _torch_owned.owned_parameters(model, _parameter_released))

# torch's function has its state under this name, and torch's users look it up there.
fully_shard.state = _torch.state_of  # type: ignore[attr-defined]


def _check_agreement(modules: list[nn.Module], strategy: Strategy, arguments: dict[str, Any]) -> None:
    mesh = arguments["mesh"]
    if mesh is None and not dist.is_initialized():
        dist.init_process_group()  # as torch would have done
    group = dist.group.WORLD if mesh is None else mesh.get_group() if getattr(mesh, "ndim", None) == 1 else None
    if group is None:
        return
    facts = strategy_facts(strategy, group)
    facts |= {name: arguments.get(name) for name in ("reshard_after_forward", "mp_policy")}
    ignored = arguments.get("ignored_params") or ()
    own = ((name, p) for name, p in named_own_parameters(modules) if p not in ignored)
    call = f"fully_shard({', '.join(model_name(module) for module in modules)})"
    check_agreement(group, call, facts | parameter_facts(own))


def _unit_for(strategy: Strategy, arguments: dict[str, Any]) -> StrategyUnit:
    """A unit on the ranks that ``arguments`` name; replaces their mesh by that of the ranks to shard over."""
    mesh = arguments["mesh"]
    if is_torchs_own(strategy) or mesh is None:
        assert dist.group.WORLD is not None
        unit = StrategyUnit(strategy, mesh_for(strategy, dist.group.WORLD))
    else:
        unit = StrategyUnit(strategy, mesh_for(strategy, mesh.get_group()))
    if unit.levels.optimizer != "G" and unit.mesh.topology.world > 1:
        group = unit.mesh.intra if unit.levels.optimizer == "I" else own_rank()
        assert group is not None
        device_type = _device_type() if mesh is None else mesh.device_type
        arguments["mesh"] = DeviceMesh.from_group(group, device_type)
    return unit


def _device_type() -> str:
    """The device of the mesh that torch makes by default."""
    found = accelerator()
    return "cpu" if found is None else found.type


def _apply(unit: StrategyUnit, modules: list[nn.Module], group: _torch.StrategyGroup) -> None:
    """Have ``group``, of ``modules``, gathered and reduced by ``unit``."""
    sharded = modules[0]
    assert isinstance(sharded, FSDPModule)
    world = unit.mesh.topology.world
    unit.when_stale, unit.when_cleared = group.drop_unsharded, group.forget_gradients
    if unit.gather is not None:
        unit.gather.shard_ahead = group.shard_ahead
        sharded.set_custom_all_gather(all_gather_of(unit.gather, group))
    if unit.keep_unsharded:
        group.kept = unit.gather
    if unit.reduce is not None:
        group.reduction = unit.reduce
        if unit.levels.optimizer == "N":
            group.own_all_reduce = StrategyAllReduce(unit.reduce, group, world)
            sharded.set_all_reduce_hook(group.own_all_reduce)
        else:
            reduce_scatter = StrategyReduceScatter(unit.reduce, group, world)
            sharded.set_custom_reduce_scatter(reduce_scatter)
            if unit.reduce.has_two_hops:
                group.completion = StrategyAllReduceAfter(reduce_scatter)
    # Loading a part of the model runs the hooks of that part only, so they are on whatever holds a parameter.
    for owner in {owner for owners in group.parameter_owners() for owner in owners}:
        owner.register_load_state_dict_post_hook(lambda module, incompatible_keys: unit.invalidate())
    for module in modules:
        units.attach(module, unit)


def _parameter_released(modules: tuple[nn.Module, ...], empty: bool) -> None:
    """What is left of a group is to be gathered anew; if nothing is, the unit of its ``modules`` has nothing to do."""
    for module in modules:
        if isinstance(unit := units.unit_of(module), StrategyUnit):
            unit.invalidate()
            if empty:
                units.detach(module)


def _watch(root: nn.Module) -> None:
    """Start to watch the model under ``root``."""
    found: dict[str, ManagedUnit[StrategyUnit]] = {}
    groups: list[tuple[_torch.StrategyGroup, ProcessMesh]] = []
    for module in root.modules():
        unit = units.unit_of(module)
        group = _torch.strategy_group_of(module) if isinstance(module, FSDPModule) else None
        if isinstance(unit, StrategyUnit) and group is not None:
            found[group.name] = ManagedUnit(
                group.name, unit, group.parameters, group.shards, group, group.parameter_owners
            )
            groups.append((group, unit.mesh))
    model, members = model_name(root), list(found.values())
    events = watch(model, members)
    warn_if_nothing_is_frozen(root, model, ((managed.unit.strategy, managed.unit.mesh) for managed in members))
    _torch.watch_backwards(root, events.gradients_synchronized, lambda: _agree_on_use(groups))


def _agree_on_use(groups: list[tuple[_torch.StrategyGroup, ProcessMesh]]) -> None:
    """Remove the gradients of parameters that no rank has used in the step that ends. Collective."""
    for mesh in dict.fromkeys(mesh for _, mesh in groups):
        used = {group: group.used_in_step() for group, its_mesh in groups if its_mesh == mesh}
        flags = [flag for of_group in used.values() for flag in of_group]
        if not flags:
            continue
        answer = functools.cache(used_by_any(flags, mesh))
        start = 0
        for group, of_group in used.items():
            group.spare_unused(functools.partial(_part_of, answer, start, len(of_group)))
            start += len(of_group)


def _part_of(answer: Callable[[], list[bool]], start: int, length: int) -> list[bool]:
    return answer()[start : start + length]
