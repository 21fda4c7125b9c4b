"""Meshes that some of a job's ranks are in: of two axes that are folded into one, and of halves of a job."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Adapter
from harness.covering import ADAPTERS, over_each
from harness.pool import Pool, device_type
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_zpp import Strategy

STEPS, MICRO_BATCHES, RANKS, CLIP = 4, 2, 4, 0.5


@cache  # so that all trainings share their groups
def mesh_of(where: str) -> DeviceMesh | None:
    """In a worker of eight: the mesh to shard over; None if this rank is in none."""
    if where == "folded":  # as of data and context parallelism, with another axis between them: not consecutive ranks
        mesh = init_device_mesh(device_type(), (2, 2, 2), mesh_dim_names=("dp", "tp", "cp"))
        return mesh["dp", "cp"]._flatten()
    groups, half = [dist.new_group(ranks) for ranks in ([0, 1, 2, 3], [4, 5, 6, 7])], dist.get_rank() // RANKS
    return DeviceMesh.from_group(groups[half], device_type()) if half or where == "halves" else None


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """Make an optimizer; its eps keeps a rounding error of a gradient near zero from becoming a whole step."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


@cache
def trained_alone(seed: int) -> dict[str, Tensor]:
    """Train a net on this rank alone, on the batches of all ranks of a mesh."""
    net = models.make_net(seed)
    optimizer = optimizer_of(net.parameters())
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            for rank in range(RANKS):
                loss = models.loss_of(net, models.batch(step, micro_batch, rank))
                (loss / RANKS / MICRO_BATCHES).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach().cpu() for name, parameter in net.named_parameters()}


def distance_to_one_rank(adapter: Adapter, levels: str, where: str) -> float:
    """In a worker: how far the weights of a mesh's net are from those of a training on one rank."""
    mesh = mesh_of(where)
    if mesh is None:
        return 0.0
    seed = dist.get_rank() // RANKS if where == "halves" else 0  # of a net for each half
    net: Any = models.make_net(seed)
    arguments = {adapter.mesh_argument: mesh}
    for place, block in enumerate(net.blocks):
        net.blocks[place] = adapter.wrap(block, Strategy(levels, gpus_per_node=2), **arguments)
    model: Any = adapter.wrap(net, Strategy(levels, gpus_per_node=2), **arguments)
    optimizer = optimizer_of(model.parameters())
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            with adapter.micro_batch(model, micro_batch == MICRO_BATCHES - 1, False):
                loss = models.loss_of(model, models.batch(step, micro_batch, mesh.get_local_rank()))
                (loss / MICRO_BATCHES).backward()
        adapter.clip(model, CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return models.distance(adapter.full_weights(model), trained_alone(seed))


@over_each(
    times=2,
    adapter=ADAPTERS,
    levels=["GGG", "IGG", "IIG", "III", "NNG"],
    where=["folded", "halves", "second half"],
)
def test_a_mesh_of_some_ranks_trains_as_one_rank(
    pool: Callable[[int], Pool], adapter: Adapter, levels: str, where: str
) -> None:
    assert max(pool(8).run(distance_to_one_rank, adapter, levels, where)) <= 1e-6
