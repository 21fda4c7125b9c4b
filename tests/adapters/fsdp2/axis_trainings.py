"""Trainings on meshes of several axes: where ranks lie, how a small mixture is split over them, and what it trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from harness import models
from harness.pool import device_type
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_zpp import clip_grad_norm_

WORLD, WIDTH, HIDDEN, EXPERTS, BLOCKS, ROWS, MICRO_BATCHES = 8, 24, 48, 4, 4, 4, 2
Wrap = Callable[..., Any]
"""``fully_shard``, by a strategy or torch's own."""


class Experts(nn.Module):
    """Fused experts; with expert parallelism a rank computes with its own, for the tokens of all."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)
        self.ranks: DeviceMesh | None = None

    def spread(self, ranks: DeviceMesh) -> None:
        """Keep this rank's experts alone."""
        self.ranks = ranks
        for name, parameter in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(distribute_tensor(parameter.detach(), ranks, [Shard(0)])))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        if self.ranks is None:
            return self._mix(x, weights, self.up, self.down)
        up: Any = self.up
        down: Any = self.down
        group, place = self.ranks.get_group(), self.ranks.get_local_rank()
        x, weights = (all_gather_tensor_autograd(each, 0, group) for each in (x, weights))
        mixed = self._mix(x, weights.chunk(self.ranks.size(), 1)[place], up.to_local(), down.to_local())
        return reduce_scatter_tensor_autograd(mixed, "sum", 0, group)

    @staticmethod
    def _mix(x: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return (weights.T.unsqueeze(-1) * (torch.tanh(x @ up) @ down)).sum(0)


class Block(nn.Module):
    """A norm, an MLP, a router and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(torch.tanh(self.up(h))) + self.experts(h, self.router(h).softmax(-1))


@dataclass(frozen=True)
class Axis:
    """A mesh, by the names of its dimensions.

    Attributes:
        shape: Sizes of its dimensions, by name.
        data: The dimensions over which weights are sharded: ranks with data of their own.
        gpus_per_node: Ranks of a node among these.
        hsdp: Whether the strategy is given nodes x ranks of a node, and torch all of them.
    """

    shape: tuple[tuple[str, int], ...]
    data: tuple[str, ...]
    gpus_per_node: int
    hsdp: bool = False

    def has(self, name: str) -> bool:
        """Tell whether the mesh has a dimension."""
        return name in dict(self.shape)


AXES = {
    "tp": Axis((("dp", 4), ("tp", 2)), ("dp",), 2),
    "cp": Axis((("dp", 4), ("cp", 2)), ("dp", "cp"), 4),
    "pp": Axis((("pp", 2), ("dp", 4)), ("dp",), 2),
    "ep": Axis((("efsdp", 4), ("ep", 2)), ("efsdp", "ep"), 4),
    "tp x ep": Axis((("efsdp", 2), ("ep", 2), ("tp", 2)), ("efsdp", "ep"), 2),
    "hsdp": Axis((("replicate", 2), ("shard", 4)), ("replicate", "shard"), 4, hsdp=True),
    "subset": Axis((("half", 2), ("dp", 4)), ("dp",), 2),
}


@cache  # DTensors remember meshes of these ranks, so that their groups must stay
def meshes(axis: Axis) -> tuple[DeviceMesh, DeviceMesh]:
    """In a worker: the mesh of an axis, and the 1-D one of its data-parallel ranks."""
    names, sizes = zip(*axis.shape, strict=True)
    mesh = init_device_mesh(device_type(), sizes, mesh_dim_names=names)
    return mesh, mesh[axis.data] if len(axis.data) == 1 else mesh[axis.data]._flatten("_".join(axis.data))


class Training:
    """A small mixture on a mesh.

    Args:
        axis: Its mesh.
        wrap: Shards a module.
        ours: Whether that is by a strategy.
    """

    def __init__(self, axis: Axis, wrap: Wrap, ours: bool) -> None:
        self.mesh, self.data = meshes(axis)
        self.ours_over = self.mesh if axis.hsdp and ours else self.data
        self.pp = self.mesh["pp"] if axis.has("pp") else None
        torch.manual_seed(self.mesh["half"].get_local_rank() if axis.has("half") else 0)
        blocks = [Block().to(models.device()) for _ in range(BLOCKS)]
        if self.pp is not None:
            blocks = blocks[self.pp.get_local_rank() * 2 :][:2]
        self.model: Any = nn.Sequential(*blocks)
        for block in self.model:
            self._split(axis, block)
            experts = self._placement(axis, block)
            wrap(block, mesh=self.ours_over, **({} if experts is None else {"shard_placement_fn": experts}))
            if axis.has("ep"):  # experts have seen the tokens of all ranks, so losses are divided instead
                block.set_gradient_divide_factor(1.0)
                block.set_force_sum_reduction_for_comms(True)  # gloo knows no other
        wrap(self.model, mesh=self.ours_over)
        self.divisor = MICRO_BATCHES * (self.data.size() if axis.has("ep") else 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, eps=1e-4, foreach=False)
        self.schedule = None if self.pp is None else self._schedule(self.pp)

    def _split(self, axis: Axis, block: Block) -> None:
        if axis.has("tp"):
            parallelize_module(block, self.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if axis.has("ep"):
            block.experts.spread(self.mesh["ep"])

    def _placement(self, axis: Axis, block: Block) -> Callable[[nn.Parameter], Any] | None:
        if not axis.has("ep"):
            return None
        info = _fsdp_common.FSDPMeshInfo(self.mesh["efsdp"], shard_mesh_dim=0)
        experts = set(block.experts.parameters())
        return lambda p: _fsdp_common.ShardPlacementResult(Shard(1), info) if p in experts else None

    def _schedule(self, pp: DeviceMesh) -> Any:
        stage = PipelineStage(self.model, pp.get_local_rank(), pp.size(), models.device(), group=pp.get_group())
        return Schedule1F1B(stage, MICRO_BATCHES, loss_fn=lambda output, target: (output - target).square().mean())

    def step(self, step: int) -> list[float]:
        """Make a step of two micro-batches; return the losses that this rank knows."""
        generator = torch.Generator().manual_seed(1000 * step + self.data.get_local_rank())
        x, target = torch.randn(2, MICRO_BATCHES * ROWS, WIDTH, generator=generator).to(models.device()).unbind()
        losses: list[Tensor] = []
        if self.schedule is not None and self.pp is not None:
            first, last = self.pp.get_local_rank() == 0, self.pp.get_local_rank() == 1
            self.schedule.step(*([x] if first else []), **({"target": target, "losses": losses} if last else {}))
        else:
            for i, (rows, aim) in enumerate(zip(x.chunk(MICRO_BATCHES), target.chunk(MICRO_BATCHES), strict=True)):
                self.model.set_requires_gradient_sync(i == MICRO_BATCHES - 1)
                losses.append((self.model(rows) - aim).square().mean())
                (losses[-1] / self.divisor).backward()
        clip_grad_norm_(self.model.parameters(), 0.5, pp_mesh=self.pp)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [loss.item() for loss in losses]

    def weights(self) -> Tensor:
        """Gather all weights of this rank's part of the model, from its own copies on other axes."""
        return torch.cat([_whole(p).flatten() for p in self.model.parameters()])

    def copies_differ(self, axis: Axis) -> bool:
        """Tell whether ranks that should have the same weights have others. Collective."""
        weights = self.weights()
        same = next((self.mesh[name] for name in ("pp", "half") if axis.has(name)), None)
        group = dist.group.WORLD if same is None else self.data.get_group()
        first = weights.clone()
        dist.broadcast(first, dist.get_process_group_ranks(group)[0], group=group)
        return not torch.equal(first, weights)


def _whole(value: Any) -> Tensor:
    while isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach()
