"""From ``FullyShardedDataParallel(..., sharding_strategy=strategy)`` to units that gather and reduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel

from .. import units
from ..comm_hook import QuantizedReduceState
from ..strategy import Strategy
from ..topology import process_mesh, topology_of
from . import _torch, events
from .unit import HookedUnit, StrategyUnit

_BUILT_LEVELS = ("GGG", "IGG")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def install() -> None:
    """Make FullyShardedDataParallel understand strategies. Changes nothing for those that are not ours."""
    _torch.intercept_construction(_construct)
    _torch.intercept_hook_registration(_check_hook_state)
    _torch.after_root_is_known(events.start)
    _torch.after_synchronizing_backward(events.gradients_synchronized)
    _torch.after_writeback(lambda gather: gather.invalidate())


def _construct(construct: Callable[[], None], module: FullyShardedDataParallel, arguments: dict[str, Any]) -> None:
    strategy = arguments["sharding_strategy"]
    if isinstance(strategy, type) and issubclass(strategy, Strategy):
        raise TypeError("sharding_strategy is the class Strategy itself, not an instance; did you mean Strategy()?")
    if not isinstance(strategy, Strategy):
        construct()
        return
    _check_built(strategy)
    _check_layout(strategy, arguments)
    _check_dtypes(arguments)
    _check_offload(arguments)
    _torch.treat_as_full_shard(strategy)
    construct()
    unit = StrategyUnit(strategy, process_mesh(_torch.process_group_of(module), strategy.gpus_per_node))
    if unit.gather is not None:
        unit.handle = _torch.use_gather(module, unit.gather, lossy=strategy.weights is not None)
    if unit.reduce is not None:
        _torch.use_reduce(module, unit.reduce)
    # A full or sharded state dict is loaded through a writeback; a local one is written to the shard directly.
    module.register_load_state_dict_post_hook(lambda module, incompatible_keys: unit.invalidate())
    units.attach(module, unit)


def _check_built(strategy: Strategy) -> None:
    missing = []
    if strategy.levels not in _BUILT_LEVELS:
        missing.append(f"levels {strategy.levels!r} (built are {', '.join(_BUILT_LEVELS)})")
    if strategy.error_feedback is not None:
        missing.append(f"error_feedback={strategy.error_feedback}")
    if strategy.frozen is not None:
        missing.append(f"frozen={strategy.frozen}")
    if missing:
        raise NotImplementedError(
            f"legal, but not built yet under FullyShardedDataParallel: {'; '.join(missing)}; of {strategy}"
        )


def _check_layout(strategy: Strategy, arguments: dict[str, Any]) -> None:
    group, mesh = arguments["process_group"], arguments["device_mesh"]
    if isinstance(group, tuple):
        raise ValueError(
            "process_group is a pair of groups, as HYBRID_SHARD takes it; a Strategy takes the one group of all "
            "ranks and makes the groups of its hops itself (gpus_per_node)"
        )
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(
                f"a Strategy takes a 1-D device_mesh of all ranks to shard over, got {mesh.ndim} dimensions "
                f"{mesh.mesh_dim_names or tuple(mesh.shape)}; the split into nodes is gpus_per_node"
            )
        group = mesh.get_group(0)
    group = group if group is not None else dist.group.WORLD
    if group is not None:  # else FSDP says itself that there is no default group
        topology_of(group, strategy.gpus_per_node)


def _check_dtypes(arguments: dict[str, Any]) -> None:
    module: nn.Module = arguments["module"]
    ignored = _torch.ignored_parameters(arguments["ignored_modules"], arguments["ignored_states"])
    for name, parameter in module.named_parameters():
        if parameter.dtype not in _DTYPES and parameter not in ignored:
            raise TypeError(
                f"parameter {name} is {parameter.dtype}; a Strategy shards {', '.join(map(str, _DTYPES))}; "
                "pass others in ignored_states"
            )


def _check_offload(arguments: dict[str, Any]) -> None:
    offload = arguments["cpu_offload"]
    if offload is not None and offload.offload_params and not torch.accelerator.is_available():
        raise ValueError(f"{offload} needs an accelerator to offload from: FSDP pins the memory of the parameters")


def _check_hook_state(model: FullyShardedDataParallel, state: object) -> None:
    """A state reduces over the group it was made for; FSDP would only find out inside of the backward."""
    if not isinstance(state, QuantizedReduceState):
        return
    instances = [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]
    expected = dist.get_process_group_ranks(state.process_group)
    for instance in instances:
        ranks = dist.get_process_group_ranks(_torch.process_group_of(instance))
        if ranks != expected:
            raise ValueError(
                f"the QuantizedReduceState was made for the ranks {expected}, but this model is sharded over {ranks}; "
                "make the state with process_group= the model's group"
            )
    for instance in instances:
        if units.unit_of(instance) is None:
            units.attach(instance, HookedUnit(state.traffic))
