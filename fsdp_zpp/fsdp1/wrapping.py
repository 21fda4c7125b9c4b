"""From ``FullyShardedDataParallel(..., sharding_strategy=strategy)`` to units that gather and reduce."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from .. import units
from ..activity import log_reduction
from ..agreement import check_agreement, described, parameter_facts
from ..comm_hook import QuantizedReduceState
from ..frozen.implied import quantize_for, warn_if_nothing_is_frozen
from ..frozen.owners import register_flattened
from ..frozen.quantize import device_of
from ..frozen.wrapped import follow_strategy
from ..managed_unit import ManagedUnit
from ..staleness import ModelEvents, watch
from ..strategy import Strategy
from ..strategy_unit import StrategyUnit
from ..support import (
    check_dtypes,
    check_instance,
    check_no_other_parallelism,
    mesh_for,
    model_name,
    strategy_facts,
    topology_for,
)
from . import _torch, _torch_backward, _torch_flat, _torch_handle

_EVENTS = "_fsdp_zpp_events"
U = TypeVar("U")


class HookedUnit:
    """An FSDP instance of a stock strategy with a :class:`QuantizedReduceState`, which counts its traffic."""

    def __init__(self, state: QuantizedReduceState) -> None:
        self.traffic = state.traffic
        self.errors, self.mesh = state.errors, state.mesh

    def invalidate(self, *, by_step: bool = False) -> None:
        """Stock FSDP keeps no secondary shard."""

    def discard_gradients(self) -> None:
        """Stock FSDP has them in ``.grad`` alone."""


def install() -> None:
    """Make FullyShardedDataParallel understand strategies. Changes nothing for those that are not ours."""
    _torch.intercept_construction(_construct)
    _torch.intercept_hook_registration(_adopt_hook_state)
    _torch.after_root_is_known(_watch)
    _torch_backward.reduce_in_turns()
    _torch_backward.reduce_in_every_backward()
    _torch_backward.shard_gradients_in_constant_time()
    _torch_backward.after_synchronizing_backward(_gradients_synchronized)
    _torch_handle.announce_writebacks()
    _torch.around_moves(_is_moved, _moved)
    _torch.summon_frozen_too()
    _torch.save_optimizer_states_in_any_group()
    register_flattened(lambda model: _torch_flat.flat_units(model, _readopt))


def _construct(construct: Callable[[], None], module: FullyShardedDataParallel, arguments: dict[str, Any]) -> None:
    _construct_with(construct, module, arguments)
    _torch_flat.constructed(module)


def _construct_with(construct: Callable[[], None], module: FullyShardedDataParallel, arguments: dict[str, Any]) -> None:
    strategy = arguments["sharding_strategy"]
    check_instance("sharding_strategy", strategy)
    if not isinstance(strategy, Strategy):
        construct()
        return
    _check_group(arguments)
    group = _group_of(arguments)
    if group is None:
        construct()  # to raise FSDP's own error
        return
    _check_agreement(strategy, group, arguments)
    topology_for(strategy, group)
    _check_parameters(strategy, arguments)
    _check_offload(arguments)
    unit = StrategyUnit(strategy, mesh_for(strategy, group))
    mixed_precision = arguments["mixed_precision"]
    quantize_for(
        strategy,
        arguments["module"],
        unit.mesh,
        ignored=_ignored_parameters(arguments["ignored_modules"], arguments["ignored_states"]),
        device=arguments["device_id"],
        dtype=None if mixed_precision is None else mixed_precision.param_dtype,
        broadcast=group if arguments["sync_module_states"] else None,
    )
    shard_groups = {"G": group, "I": unit.mesh.intra, "N": None}

    def wrap_frozen(others: set[nn.Parameter]) -> FullyShardedDataParallel:
        done = {"auto_wrap_policy": None, "param_init_fn": None, "sync_module_states": False, "ignored_modules": None}
        own = {name: value for name, value in arguments.items() if name != "self"}
        return FullyShardedDataParallel(**own | done | {"ignored_states": others})

    with ExitStack() as stack:
        stack.enter_context(_torch.sharding_over(module, strategy, shard_groups[unit.levels.optimizer]))
        if arguments["use_orig_params"]:  # without, FSDP refuses to mix them
            stack.enter_context(_torch.frozen_apart(module, wrap_frozen))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", ".*both parameters with requires_grad=True and False")
        construct()
    _adopt(module, unit)
    # A full or sharded state dict is loaded through a writeback; a local one is written to the shard directly.
    module.register_load_state_dict_post_hook(lambda module, incompatible_keys: unit.invalidate())
    if unit.levels.optimizer == "I":
        module.register_state_dict_pre_hook(_refuse_local_state_dict)
    units.attach(module, unit)


def _refuse_local_state_dict(module: FullyShardedDataParallel, *unused: Any) -> None:
    # torch looks for its global rank in the group of a node, under its own HYBRID_SHARD too: all nodes but one raise.
    if FullyShardedDataParallel.get_state_dict_type(module).state_dict_type == StateDictType.LOCAL_STATE_DICT:
        raise ValueError(
            "LOCAL_STATE_DICT can't hold weights that are sharded within nodes, as the third letter I has them; "
            "use SHARDED_STATE_DICT or FULL_STATE_DICT"
        )


def _adopt(module: FullyShardedDataParallel, unit: StrategyUnit) -> None:
    """Have the flat parameter that ``module`` has now, if any, gathered and reduced by ``unit``."""
    handle = _torch_handle.adopt_handle(
        module,
        unit.gather,
        lossy=unit.gather is not None and unit.gather.codec is not None,
        keep_unsharded=unit.keep_unsharded,
        reduce=unit.reduce,
        mesh=unit.mesh,
        written_back=unit.invalidate,
    )
    if unit.gather is not None:
        unit.gather.shard_ahead = None if handle is None else handle.shard_ahead
    if handle is None:
        unit.when_stale = unit.when_cleared = lambda: None  # not the flat parameter's that was there before
    else:
        unit.when_stale, unit.when_cleared = handle.drop_unsharded, handle.forget_gradients


def _readopt(module: FullyShardedDataParallel) -> None:
    """Adopt another flat parameter of an instance that may have a strategy."""
    if isinstance(unit := units.unit_of(module), StrategyUnit):
        _adopt(module, unit)


def _watch(root: nn.Module) -> None:
    """Start to watch the model under ``root``."""
    found = [
        _managed(_name_of(path), unit, module)
        for path, module in root.named_modules()
        if isinstance(module, FullyShardedDataParallel) and isinstance(unit := units.unit_of(module), StrategyUnit)
    ]
    _check_one_group(found)
    if found:
        name = model_name(root)
        setattr(root, _EVENTS, watch(name, found))
        warn_if_nothing_is_frozen(root, name, ((managed.unit.strategy, managed.unit.mesh) for managed in found))


def _managed(name: str, unit: U, instance: FullyShardedDataParallel) -> ManagedUnit[U]:
    parameters, shards = partial(_torch_handle.parameters_of, instance), partial(_torch_handle.shard_of, instance)
    return ManagedUnit(name, unit, parameters, shards, _torch_handle.handle_of(instance))


def _is_moved(instance: FullyShardedDataParallel) -> None:
    if (handle := _torch_handle.handle_of(instance)) is not None:
        handle.forget_cleared_gradients()


def _moved(instance: FullyShardedDataParallel) -> None:
    if (handle := _torch_handle.handle_of(instance)) is not None:
        handle.moved()


def _name_of(path: str) -> str:
    """A unit's name: the path to what it wraps, or, of a unit between that and its FSDP instance, what it holds."""
    name = path.replace("_fsdp_wrapped_module.", "")
    owner = name.removesuffix("_fsdp_wrapped_module").rstrip(".")
    return f"frozen of {owner or 'root'}" if name.endswith("_fsdp_wrapped_module") else name or "root"


def _check_one_group(found: Iterable[ManagedUnit[StrategyUnit]]) -> None:
    by_letter = {managed.unit.levels.optimizer: managed.name for managed in found}
    if "I" in by_letter and len(by_letter) > 1:
        other = next(name for letter, name in by_letter.items() if letter != "I")
        raise ValueError(
            f"{by_letter['I']} is sharded inside of nodes (the third letter of its strategy) and {other} is not, but "
            "FSDP clips gradients and saves optimizer states of a model over one group; give all parts of a model the "
            "third letter I, or none"
        )


def _gradients_synchronized(root: nn.Module) -> None:
    if (events := vars(root).get(_EVENTS)) is not None:
        events.gradients_synchronized()


def _check_group(arguments: dict[str, Any]) -> None:
    group, mesh = arguments["process_group"], arguments["device_mesh"]
    if isinstance(group, tuple):
        raise ValueError(
            "process_group is a pair of groups, as HYBRID_SHARD takes it; a Strategy takes the one group of all "
            "ranks and makes the groups of its hops itself (gpus_per_node)"
        )
    if isinstance(mesh, DeviceMesh) and mesh.ndim != 1:
        raise ValueError(
            f"a Strategy takes a 1-D device_mesh of all ranks to shard over, got {mesh.ndim} dimensions "
            f"{mesh.mesh_dim_names or tuple(mesh.shape)}; the split into nodes is gpus_per_node"
        )


def _group_of(arguments: dict[str, Any]) -> dist.ProcessGroup | None:
    """The ranks that the arguments name, all by default; None if there is no default group."""
    group, mesh = arguments["process_group"], arguments["device_mesh"]
    if isinstance(mesh, DeviceMesh):
        group = mesh.get_group(0)
    return group if group is not None else dist.group.WORLD


def _check_agreement(strategy: Strategy, group: dist.ProcessGroup, arguments: dict[str, Any]) -> None:
    module: nn.Module = arguments["module"]
    nested = {
        p
        for m in module.modules()
        if isinstance(m, FullyShardedDataParallel) and m is not module
        for p in m.parameters()
    }
    own = [(name, p) for name, p in _to_be_sharded(arguments) if p not in nested]
    facts = strategy_facts(strategy, group)
    facts |= {name: arguments[name] for name in ("mixed_precision", "use_orig_params", "sync_module_states")}
    call = f"FullyShardedDataParallel({model_name(module)})"
    device = device_of(group, arguments["device_id"])
    check_agreement(group, call, facts | parameter_facts(own), device)


def _to_be_sharded(arguments: dict[str, Any]) -> list[tuple[str, nn.Parameter]]:
    module: nn.Module = arguments["module"]
    for name in ("ignored_modules", "ignored_states"):
        if isinstance(arguments[name], Iterable):  # an iterator would be used up here, before FSDP sees it
            arguments[name] = list(arguments[name])
    ignored = _ignored_parameters(arguments["ignored_modules"], arguments["ignored_states"])
    return [(name, p) for name, p in module.named_parameters() if p not in ignored]


def _check_parameters(strategy: Strategy, arguments: dict[str, Any]) -> None:
    sharded = _to_be_sharded(arguments)
    check_dtypes(sharded, "pass others in ignored_states")
    check_no_other_parallelism(strategy, sharded)


def _ignored_parameters(ignored_modules: list[nn.Module] | None, ignored_states: list[Any] | None) -> set[nn.Parameter]:
    """The parameters that FSDP's constructor was told to leave alone."""
    ignored: set[nn.Parameter] = set()
    for item in (*(ignored_modules or ()), *(ignored_states or ())):
        ignored.update(item.parameters() if isinstance(item, nn.Module) else (item,))
    return ignored


def _check_offload(arguments: dict[str, Any]) -> None:
    offload = arguments["cpu_offload"]
    if offload is not None and offload.offload_params and not torch.accelerator.is_available():
        raise ValueError(f"{offload} needs an accelerator to offload from: FSDP pins the memory of the parameters")


def _adopt_hook_state(model: FullyShardedDataParallel, state: object) -> dict[FullyShardedDataParallel, object]:
    """Check that ``state`` reduces over the model's group, log what of it is active, and count its traffic.

    Returns:
        A state for each instance.
    """
    if not isinstance(state, QuantizedReduceState):
        return {}
    instances = {path: m for path, m in model.named_modules() if isinstance(m, FullyShardedDataParallel)}
    expected = dist.get_process_group_ranks(state.process_group)
    for instance in instances.values():
        ranks = dist.get_process_group_ranks(_torch.process_group_of(instance))
        if ranks != expected:
            raise ValueError(
                f"the QuantizedReduceState was made for the ranks {expected}, but this model is sharded over {ranks}; "
                "make the state with process_group= the model's group"
            )
    sizes = {_name_of(path): described(_torch_handle.shard_of(m)) for path, m in instances.items()}
    facts = {"codecs": state.codecs, "gpus_per_node": state.mesh.topology.gpus_per_node}
    call = f"register_comm_hook of {model_name(model)}"
    check_agreement(state.process_group, call, facts | {"error_feedback": state.error_feedback} | sizes)
    follow_strategy(model, state.mesh)
    states = {name: state.of_unit(name) for name in map(_name_of, instances)}
    hooked: list[ManagedUnit[HookedUnit]] = []
    error_nbytes = 0
    for (name, own), instance in zip(states.items(), instances.values(), strict=True):
        hooked.append(_managed(name, HookedUnit(own), instance))
        if units.unit_of(instance) is None:
            units.attach(instance, hooked[-1].unit)
        error_nbytes += sum(own.error_nbytes(shard.numel()) for shard in _torch_handle.shard_of(instance))
    log_reduction(state.codecs, state.error_feedback, state.mesh, model_name(model), len(instances), error_nbytes)
    if error_nbytes:
        setattr(model, _EVENTS, ModelEvents(hooked))
    return dict(zip(instances.values(), states.values(), strict=True))
