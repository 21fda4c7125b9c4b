"""What adapters ask of a strategy: whether they can carry it out, and on which mesh; errors come before any traffic."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from .strategy import Strategy
from .topology import ProcessMesh, Topology, process_mesh, topology_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_instance(name: str, value: object) -> None:
    """Raise if the class Strategy was passed where an instance was meant.

    Raises:
        TypeError: If ``value`` is the class.
    """
    if isinstance(value, type) and issubclass(value, Strategy):
        raise TypeError(f"{name} is the class Strategy itself, not an instance; did you mean Strategy()?")


def model_name(model: nn.Module) -> str:
    """The name of a model's class, sharded or not."""
    if isinstance(model, FullyShardedDataParallel):
        model = model.module
    name = type(model).__name__
    return name.removeprefix("FSDP") if isinstance(model, FSDPModule) else name  # which fully_shard puts before it


def topology_for(strategy: Strategy, group: dist.ProcessGroup) -> Topology:
    """The layout of ``group`` under ``strategy``; does not communicate. Errors as :func:`topology_of`."""
    return topology_of(group, _node_size(strategy, group))


def mesh_for(strategy: Strategy, group: dist.ProcessGroup) -> ProcessMesh:
    """The mesh of ``group`` under ``strategy``. Collective over ``group``. Errors as :func:`process_mesh`."""
    return process_mesh(group, _node_size(strategy, group))


def _node_size(strategy: Strategy, group: dist.ProcessGroup) -> int | None:
    """``gpus_per_node`` for ``group``; None leaves it to torchrun's environment.

    A plain strategy does the same on any layout, so it must not fail where nothing tells the layout: all ranks then
    count as one node, and torch's own collectives do the work.
    """
    if strategy.gpus_per_node is None and strategy.is_plain and "LOCAL_WORLD_SIZE" not in os.environ:
        return dist.get_world_size(group)
    return strategy.gpus_per_node


def strategy_facts(strategy: Strategy, group: dist.ProcessGroup) -> dict[str, object]:
    """What must be the same on all ranks about a strategy, by name; see [Note: Agreement] in agreement.py."""
    facts = {field.name: getattr(strategy, field.name) for field in dataclasses.fields(strategy)}
    return facts | {"gpus_per_node": _node_size(strategy, group) or launched_node_size(group)}


def launched_node_size(group: dist.ProcessGroup) -> object:
    """``gpus_per_node`` of ``group`` as launched; if its nodes are of unequal size, LOCAL_WORLD_SIZE as text."""
    try:
        return topology_of(group).gpus_per_node
    except ValueError:
        return f"LOCAL_WORLD_SIZE={os.environ.get('LOCAL_WORLD_SIZE')}"


def check_dtypes(parameters: Iterable[tuple[str, Tensor]], remedy: str) -> None:
    """Raise for a parameter that no codec takes.

    Raises:
        TypeError: Naming it.
    """
    for name, parameter in parameters:
        if parameter.dtype not in DTYPES:
            raise TypeError(
                f"parameter {name} is {parameter.dtype}; a Strategy shards {', '.join(map(str, DTYPES))}; {remedy}"
            )


def check_no_other_parallelism(strategy: Strategy, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Raise for a parameter that is sharded already, if ``strategy`` can't be combined with that.

    Raises:
        NotImplementedError: Naming it.
    """
    for name, parameter in parameters if strategy.optimizer != "G" else ():
        if isinstance(parameter, DTensor):
            raise NotImplementedError(
                f"{strategy.levels!r} shards over a part of the data-parallel ranks, which can't be combined with "
                f"another parallelism, but {name} is sharded already; choose a strategy whose third letter is G"
            )
