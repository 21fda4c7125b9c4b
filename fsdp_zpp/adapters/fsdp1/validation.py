"""Refuses what FullyShardedDataParallel can't do with a strategy: on every rank, before anything is sent or sharded."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor

from fsdp_zpp.adapters._torch_mesh import name_ranks
from fsdp_zpp.collectives.agreement import agree, check_agreement, parameter_facts
from fsdp_zpp.collectives.devices import compute_device
from fsdp_zpp.collectives.links import find_links
from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.frozen.from_strategy import left_to_shard
from fsdp_zpp.module_names import model_name
from fsdp_zpp.runtime.overrides import strategies_below, strategy_for
from fsdp_zpp.runtime.packed_weights import packed, packed_facts
from fsdp_zpp.runtime.rank_layout import RankLayout
from fsdp_zpp.runtime.shared_parameters import Shared, Units, held, hold
from fsdp_zpp.runtime.unit import StrategyUnit
from fsdp_zpp.runtime.validation import (
    check_dtypes,
    check_exchanges,
    check_instance,
    check_module,
    strategy_facts,
)

from ._torch_adoption import flattened_sites, is_flattened

Sites = dict[tuple[nn.Module, str], tuple[str, nn.Parameter]]
UNITS = Units(
    is_unit=lambda module: isinstance(module, FullyShardedDataParallel),
    is_torchs=lambda module, parameter: is_flattened(parameter),
)


def shared_error(shared: Shared, wrapped: nn.Module, root: nn.Module) -> ValueError:
    """Return the error that two instances of FSDP would have to flatten one parameter.

    Its attribute ``seen_from`` makes the same error with names in a module around ``root``.

    Args:
        shared: The parameter.
        wrapped: The module of the instance that found it.
        root: The outermost module that is known.
    """
    error = ValueError(
        f"FullyShardedDataParallel({model_name(root)}): {UNITS.explain(shared, root, [wrapped])}: it is shared by two "
        "units, but FullyShardedDataParallel flattens a parameter into one unit alone; wrap the module around both as "
        "one unit, and neither of the two by itself (leave their classes out of auto_wrap_policy)"
    )
    vars(error)["seen_from"] = functools.partial(shared_error, shared, wrapped)
    return error


def hold_flattened(instance: FullyShardedDataParallel, arguments: dict[str, Any], before: Sites) -> None:
    """Mark what ``instance`` has flattened, for the check of later ones.

    Args:
        instance: The instance.
        arguments: The arguments of its constructor.
        before: The parameters of the module that it wraps, with names, as they were before it was constructed.

    Raises:
        ValueError: If an instance that was made meanwhile, inside of it, has flattened one of them.
    """
    wrapped, own = arguments["module"], flattened_sites(instance)
    inner = instance._fsdp_wrapped_module
    apart = flattened_sites(inner) if isinstance(inner, FullyShardedDataParallel) else set()
    left_alone = ignored_parameters(arguments["ignored_modules"], arguments["ignored_states"])
    # A unit may share a parameter with itself, under other names.
    here = (module._parameters.get(name) for module, name in own | apart)
    left_alone |= {parameter for parameter in here if parameter is not None}
    shared = UNITS.find_shared([wrapped], left_alone, own | apart)
    own_parameters = {id(before[site][1]) for site in own if site in before}
    for site in own & before.keys():
        name, parameter = before[site]
        if (held_as := held(parameter)) is not None:
            shared = shared or Shared(site, name, parameter, held_as)
    if shared is not None:
        raise shared_error(shared, wrapped, wrapped)
    unit = model_name(wrapped)
    for site, (name, parameter) in before.items():
        if id(parameter) in own_parameters:
            hold(site, name, parameter, unit)


def check_arguments(
    strategy: object, group: dist.ProcessGroup | None, arguments: dict[str, Any]
) -> tuple[Strategy, RankLayout]:
    """Raise if a strategy can't shard by these arguments. Collective over ``group``.

    Args:
        strategy: How to shard. Ranks compare any other object, too, before they refuse it.
        group: The ranks to shard over; None if there is no process group.
        arguments: Those of FSDP's constructor; iterators among them become lists.

    Returns:
        The strategy of the module, without overrides, and where the ranks lie.

    Raises:
        TypeError, ValueError, NotImplementedError: Saying what to do instead.
    """
    own = [] if group is None else _check_agreement(strategy, group, arguments)
    if not isinstance(strategy, Strategy):
        check_instance("sharding_strategy", strategy)
        raise TypeError(
            "sharding_strategy must be a Strategy such as Strategy.zeropp(), or one of torch's ShardingStrategy, got "
            f"{strategy!r}"
        )
    assert group is not None
    by = strategy_for(arguments["module"], strategy) if strategy.overrides else strategy
    if by.gpus_per_node is None:
        find_links(group, compute_device(group, arguments["device_id"]))
    own = left_to_shard(by, [arguments["module"]], own)
    return by, agree(group, lambda: _check_what_is_sharded(by, group, own, arguments["cpu_offload"]))


def check_overrides(
    wrapped: nn.Module, own: Strategy, strategy: Strategy, flattened: Iterable[tuple[nn.Module, str]]
) -> None:
    """Raise if overrides give a module in an instance of FSDP another strategy than the instance has.

    Args:
        wrapped: What the instance wraps.
        own: The strategy of the instance.
        strategy: The strategy with the overrides.
        flattened: The modules of the parameters in its flat parameter, with the names there.

    Raises:
        ValueError: If so.
    """
    by_module = strategies_below(wrapped, own, strategy)
    for module, name in flattened:
        if by_module.get(module, own) not in (own, replace(own, gpus_per_node=None)):
            raise ValueError(
                f"overrides give {type(module).__name__}.{name} another strategy than the {type(wrapped).__name__} "
                "that it is in, but FullyShardedDataParallel flattens both into one parameter; wrap the modules that "
                "overrides name by themselves, as with auto_wrap_policy, or use fully_shard"
            )


def _check_what_is_sharded(
    strategy: Strategy, group: dist.ProcessGroup, own: list[tuple[str, nn.Parameter]], offload: CPUOffload | None
) -> RankLayout:
    layout = RankLayout.of(strategy, group)
    check_dtypes(own, "pass others in ignored_states")
    if strategy.local_steps is not None:
        check_exchanges(strategy.local_steps, own)
    _check_no_other_parallelism(strategy, own)
    _check_offload(offload)
    return layout


def _check_no_other_parallelism(strategy: Strategy, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Raise if another parallelism has sharded a parameter that FSDP is not to shard: FSDP can't write it back."""
    for name, parameter in parameters:
        if isinstance(parameter, DTensor) and strategy.optimizer == "N":
            raise NotImplementedError(
                f"{strategy.levels!r} is FullyShardedDataParallel's NO_SHARD, which can't be combined with another "
                f"parallelism, but {name} is sharded already; use another strategy, or fully_shard"
            )


def _check_group(arguments: dict[str, Any]) -> None:
    group, mesh = arguments["process_group"], arguments["device_mesh"]
    if isinstance(group, tuple):
        raise ValueError(
            "process_group is a pair of groups, as HYBRID_SHARD takes it; a Strategy takes the one group of all "
            "ranks and makes the groups of its hops itself (gpus_per_node)"
        )
    if isinstance(mesh, DeviceMesh) and mesh.ndim != 1:
        raise ValueError(
            "a Strategy takes a 1-D device_mesh of all ranks to shard over, or a 2-D one of nodes x ranks of a node "
            f"with names, got {mesh.ndim} dimensions {mesh.mesh_dim_names or tuple(mesh.shape)}"
        )


def group_of(arguments: dict[str, Any]) -> dist.ProcessGroup | None:
    """Return the ranks that the arguments name, all by default; None if there is no default group.

    Raises:
        ValueError: If they name several groups or a mesh of several dimensions.
    """
    _check_group(arguments)
    group, mesh = arguments["process_group"], arguments["device_mesh"]
    if isinstance(mesh, DeviceMesh):
        group = mesh.get_group(0)
        name_ranks(group, mesh)
    return group if group is not None else dist.group.WORLD


def _check_agreement(
    strategy: object, group: dist.ProcessGroup, arguments: dict[str, Any]
) -> list[tuple[str, nn.Parameter]]:
    """Raise unless all ranks shard the same module in the same way; return what it is to flatten, with names."""
    module: nn.Module = arguments["module"]
    if not isinstance(module, nn.Module):  # which differs from what other ranks have, if they have one
        check_agreement(group, f"FullyShardedDataParallel({module!r})", {})
        check_module(module)
    nested = {
        p
        for m in module.modules()
        if isinstance(m, FullyShardedDataParallel) and m is not module
        for p in m.parameters()
    }
    own = [(name, p) for name, p in _to_be_sharded(arguments) if p not in nested]
    ignored = ignored_parameters(arguments["ignored_modules"], arguments["ignored_states"])
    shared = UNITS.find_shared([module], ignored)
    if shared is not None:  # before the facts, since ranks hold shards of it in different sizes
        check_agreement(group, f"FullyShardedDataParallel({model_name(module)})", {"shared": shared.name})
        raise shared_error(shared, module, module)
    facts = strategy_facts(strategy, group)
    facts |= {name: arguments[name] for name in ("mixed_precision", "use_orig_params", "sync_module_states")}
    call = f"FullyShardedDataParallel({model_name(module)})"
    device = compute_device(group, arguments["device_id"])
    check_agreement(group, call, facts | packed_facts(packed(own)) | parameter_facts(own), device)
    return own


def _to_be_sharded(arguments: dict[str, Any]) -> list[tuple[str, nn.Parameter]]:
    module: nn.Module = arguments["module"]
    for name in ("ignored_modules", "ignored_states"):
        if isinstance(arguments[name], Iterable):  # an iterator would be used up here, before FSDP sees it
            arguments[name] = list(arguments[name])
    ignored = ignored_parameters(arguments["ignored_modules"], arguments["ignored_states"])
    return [(name, p) for name, p in module.named_parameters() if p not in ignored]


def ignored_parameters(
    ignored_modules: list[nn.Module] | None, ignored_states: list[nn.Module | nn.Parameter] | None
) -> set[nn.Parameter]:
    """Return the parameters that FSDP's constructor was told to leave alone."""
    ignored: set[nn.Parameter] = set()
    for item in (*(ignored_modules or ()), *(ignored_states or ())):
        ignored.update(item.parameters() if isinstance(item, nn.Module) else (item,))
    return ignored


def _check_offload(offload: CPUOffload | None) -> None:
    if offload is not None and offload.offload_params and not torch.accelerator.is_available():
        raise ValueError(f"{offload} needs an accelerator to offload from: FSDP pins the memory of the parameters")


def refuse_local_state_dict(module: FullyShardedDataParallel, *unused: object) -> None:
    """Raise if ``module`` is set to give local state dicts; a hook that torch calls before it makes one.

    Raises:
        ValueError: If it is.
    """
    # torch looks for its global rank in the group of a node, under its own HYBRID_SHARD too: all nodes but one raise.
    if FullyShardedDataParallel.get_state_dict_type(module).state_dict_type == StateDictType.LOCAL_STATE_DICT:
        raise ValueError(
            "LOCAL_STATE_DICT can't hold weights that are sharded inside nodes (optimizer scope I); use "
            "SHARDED_STATE_DICT or FULL_STATE_DICT"
        )


def check_one_group(units: Iterable[StrategyUnit]) -> None:
    """Raise if some units of a model are sharded within nodes and others are not.

    Raises:
        ValueError: Naming one of each.
    """
    by_scope = {unit.scopes.optimizer: unit.sharded.name for unit in units}
    if "I" in by_scope and len(by_scope) > 1:
        other = next(name for scope, name in by_scope.items() if scope != "I")
        raise ValueError(
            f"{by_scope['I']} is sharded inside nodes (optimizer scope I) and {other} is not, but FSDP clips gradients "
            "and saves optimizer states over one group for the whole model; use optimizer scope I for all parts of a "
            "model, or for none"
        )
