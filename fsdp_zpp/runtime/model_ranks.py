"""Ranks of a model where a user does not name them: a job may train several models, each on a part of its ranks."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from .unit import COMMUNICATORS, named_units


def ranks_of(model: nn.Module, process_group: dist.ProcessGroup | None = None) -> dist.ProcessGroup | None:
    """Return the ranks of ``model``: the largest group that a part of it is sharded over. Does not communicate.

    Args:
        model: The model. Any other object is accepted, since a caller refuses it on all ranks.
        process_group: The ranks that the user gave.

    Returns:
        The ranks; for a model that is not sharded, or over a mesh of several dimensions, all ranks of the job. None if
        this process is alone.
    """
    if process_group is not None or not dist.is_initialized() or not isinstance(model, nn.Module):
        return process_group if process_group is not None else dist.group.WORLD
    meshes = [parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)]
    if any(mesh.ndim > 1 for mesh in meshes):
        return dist.group.WORLD
    groups = _unit_groups(model) or _instance_groups(model) or [mesh.get_group() for mesh in meshes]
    return max(groups, key=dist.get_world_size) if groups else dist.group.WORLD


def _unit_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    # First, since what torch sees under the optimizer scopes I and N is a node or a rank.
    groups = [unit.ranks.group for unit in named_units(model)]
    groups += [
        group for module in model.modules() for part in getattr(module, COMMUNICATORS, ()) for group in part.groups
    ]
    return [group for group in groups if group is not None]


def _instance_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    instances = [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]
    if any("HYBRID" in instance.sharding_strategy.name for instance in instances):  # whose group is that of a node
        return []
    return [instance.process_group for instance in instances if instance.process_group is not None]
