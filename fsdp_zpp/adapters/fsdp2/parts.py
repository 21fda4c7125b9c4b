"""Parts of a call of ``fully_shard``: the parameters that one strategy shards over one mesh.

torch makes a parameter group of each. A call has several if ``shard_placement_fn`` gives parameters a mesh of their
own, as torchtitan does with experts, or if the strategy has overrides for modules inside of the one that is sharded.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fsdp_zpp.collectives.agreement import agree
from fsdp_zpp.collectives.mesh import ranks_on_each_node
from fsdp_zpp.config.overrides import override_for
from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.frozen.resharding import holds_base
from fsdp_zpp.runtime.overrides import strategies_below, unwrapped

from ._torch_mesh_info import FSDPMeshInfo, arguments_of, placement_and_mesh, takes_mesh_per_parameter
from .data_parallel_mesh import DataParallelMesh, data_parallel_names, read_mesh

Named = list[tuple[str, nn.Parameter]]
_MeshKey = tuple[DeviceMesh, str]
"""A parameter's own mesh, and which of its dimensions are those of data parallelism."""


@dataclass(eq=False)
class Part:
    """Parameters that one strategy shards over one mesh.

    Attributes:
        over: The mesh, and the strategy, without overrides.
        own: The parameters, with names.
        arguments: What ``fully_shard`` is called with; ``mesh`` and ``dp_mesh_dims`` are those of the part.
        placements: What the ``shard_placement_fn`` of the call returns for them, without meshes.
        path: The part's path within the module, for its name; empty for the part that has the call's own mesh and
            strategy.
        mesh_info: How torch is to shard them, if it would not find that by the arguments.
    """

    over: DataParallelMesh
    own: Named
    arguments: dict[str, Any]
    placements: dict[nn.Parameter, Shard | None] = field(default_factory=dict)
    path: str = ""
    mesh_info: FSDPMeshInfo | None = None


def split(modules: list[nn.Module], strategy: Strategy, call: Part, given: dict[str, Any]) -> list[Part]:
    """Split a call by mesh and strategy. Collective over the call's ranks, then over those of each part.

    Args:
        modules: The modules.
        strategy: The strategy, with overrides.
        call: All parameters, with the strategy of the first of ``modules``.
        given: The arguments before the call's mesh was read.

    Raises:
        ValueError: If ``shard_placement_fn`` returns something other than a placement, if torch can't make several
            groups of a module, or if it is not known how the ranks of a parameter's mesh lie on nodes.
    """
    planned = agree(
        call.over.group if call.over.compared else None,
        lambda: _plan(modules, strategy, call, given),
        summary=lambda plan: str([each.summary() for each in plan]),
        difference="gave parameters other meshes or strategies than",
    )
    return [each.read(call) for each in planned] or [call]


@dataclass(eq=False)
class _PlannedPart:
    """A part whose mesh has not been read.

    Attributes:
        mesh: The arguments of ``fully_shard`` that its mesh stands for; None if they are the call's.
    """

    strategy: Strategy
    mesh: dict[str, Any] | None
    own: Named = field(default_factory=list)
    placements: dict[nn.Parameter, Shard | None] = field(default_factory=dict)
    path: str = ""

    def summary(self) -> tuple[object, ...]:
        """Return what must be the same on all ranks; they may have other ranks in the mesh."""
        mesh = None if self.mesh is None else self.mesh["mesh"]
        shape = None if mesh is None else (mesh.mesh_dim_names, mesh.shape)
        return self.path, self.strategy, shape, [name for name, _ in self.own], list(self.placements.values())

    def read(self, call: Part) -> Part:
        if self.mesh is None:
            over, arguments = replace(call.over, strategy=self.strategy), dict(call.arguments)
        else:
            arguments = call.arguments | self.mesh
            over = read_mesh(self.strategy, arguments)
        return Part(over, self.own, arguments, self.placements, self.path)


def _plan(modules: list[nn.Module], strategy: Strategy, call: Part, given: dict[str, Any]) -> list[_PlannedPart]:
    place = call.arguments.get("shard_placement_fn")
    outer, strategies = replace(strategy, overrides=(), gpus_per_node=None), dict[nn.Parameter, Strategy]()
    for module in modules:
        for each, own in strategies_below(module, outer, strategy).items():
            strategies |= dict.fromkeys(each.parameters(recurse=False), own)
    first = override_for(type(unwrapped(modules[0])), strategy.overrides) or outer
    # A mesh of nodes x ranks has said what a node is, unless an override does.
    gpus_per_node = strategy.gpus_per_node if first.gpus_per_node is not None else call.over.strategy.gpus_per_node
    parts: dict[tuple[_MeshKey | None, Strategy], _PlannedPart] = {}
    for name, parameter in call.own:
        placement, info = placement_and_mesh(None if place is None else place(parameter))
        if placement is not None and not isinstance(placement, Shard):
            raise ValueError(
                f"shard_placement_fn returned {placement!r} for {name}; it must return a Shard or None, or a "
                "ShardPlacementResult with one of them and a mesh"
            )
        mesh = _own_mesh(info, given)
        key = (None if mesh is None else (mesh["mesh"], str(mesh["dp_mesh_dims"])), strategies[parameter])
        if key not in parts:
            parts[key] = _PlannedPart(_with_nodes(key[1], gpus_per_node, call.over.group, mesh), mesh)
        parts[key].own.append((name, parameter))
        parts[key].placements[parameter] = placement
    if len(parts) > 1:
        _check_several(modules, call, [mesh for mesh, _ in parts])
        taken = {""}
        for key, part in parts.items():
            if key != (None, first):
                part.path = _unused(taken, _common_path(part.own))
    return list(parts.values())


def _check_several(modules: list[nn.Module], call: Part, meshes: list[_MeshKey | None]) -> None:
    """Raise if a module can't have several parts, over these meshes; None is that of the call."""
    name = type(modules[0]).__name__
    if any(holds_base(module) for module in modules):
        raise ValueError(
            f"{name} has weights that are quantized already, and is to be sharded over several meshes or by several "
            "strategies, so it is not known to which of them these weights belong; leave them unquantized and pass "
            "frozen= to the strategies"
        )
    by_themselves = "first shard each module that the overrides name by a call of its own"
    if not takes_mesh_per_parameter():
        raise ValueError(
            f"overrides give parameters of {name} different strategies, and torch makes several groups of a module "
            f"only from 2.12 on; {by_themselves}"
        )
    if meshes.count(None) > 1 and not call.over.compared:
        raise ValueError(
            f"overrides give parameters of {name} different strategies on a mesh of several dimensions; {by_themselves}"
        )


def _own_mesh(info: FSDPMeshInfo | None, call: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments that a parameter's mesh stands for; None if they are those of the call."""
    if info is None:
        return None
    own = arguments_of(info)
    if call["mesh"] is None:  # all ranks
        mesh: DeviceMesh = own["mesh"]
        of_all = mesh.ndim == 1 and dist.get_process_group_ranks(mesh.get_group()) == list(range(dist.get_world_size()))
        return None if of_all and own["dp_mesh_dims"] is None else own
    return None if all(own[name] == call.get(name) for name in own) else own


def _with_nodes(
    strategy: Strategy, gpus_per_node: int | None, group: dist.ProcessGroup, own: dict[str, Any] | None
) -> Strategy:
    """Return the strategy with the nodes of the call's ranks, as they lie in the part's own mesh, if it has no own."""
    if strategy.gpus_per_node is not None or gpus_per_node is None:
        return strategy
    if own is None:
        return replace(strategy, gpus_per_node=gpus_per_node)
    node_of = {rank: place // gpus_per_node for place, rank in enumerate(dist.get_process_group_ranks(group))}
    mesh: DeviceMesh = own["mesh"]
    dims = own["dp_mesh_dims"]
    ranks = (mesh if dims is None else mesh[data_parallel_names(mesh, dims)]).mesh.flatten().tolist()
    size = ranks_on_each_node([node_of.get(rank, -1) for rank in ranks])
    own_nodes = "leave gpus_per_node to torchrun, or give the overrides for these parameters one of their own"
    if not node_of.keys() >= set(ranks):
        raise ValueError(
            f"gpus_per_node={gpus_per_node} counts the ranks {list(node_of)}, and a parameter's mesh has others, "
            f"{ranks}; {own_nodes}"
        )
    if size is None:
        raise ValueError(
            f"gpus_per_node={gpus_per_node} puts the ranks of a parameter's mesh, {ranks}, on nodes in unequal shares "
            f"or out of order; {own_nodes}"
        )
    return replace(strategy, gpus_per_node=size)


def _common_path(own: Named) -> str:
    """Return the path of the innermost module that holds all of these parameters."""
    levels = zip(*(name.split(".")[:-1] for name, _ in own), strict=False)
    return ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))


def _unused(taken: set[str], path: str) -> str:
    free = path
    while free in taken:
        free = f"{path or 'part'} {len(taken) + 1}"
    taken.add(free)
    return free
