"""Small mixtures of experts, sharded over one mesh or with experts on a mesh of their own, and how they are trained."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from harness import models
from harness.pool import device_type
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Shard

from fsdp_zpp import Strategy, fully_shard

WIDTH, HIDDEN, EXPERTS, STEPS = 36, 60, 4, 4


class Experts(nn.Module):
    """Fused weights of experts, each rank of expert parallelism having a part of them."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(experts, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.up) @ self.down  # [experts, tokens, width]


class Mixture(nn.Module):
    """A norm, a router and experts, which all see all tokens."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, experts)
        self.experts = Experts(experts)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        weights = self.router(h).softmax(-1).T.unsqueeze(-1)
        return x + (weights * self.experts(h)).sum(0)


@cache
def mesh_of(name: str) -> DeviceMesh:
    """In a worker: the mesh of experts, of four ranks: ranks with the same experts x ranks with different ones.

    The same experts are on both nodes of two if the first of these is "efsdp", else within a node.
    """
    return init_device_mesh(
        device_type(), (2, 2), mesh_dim_names=("efsdp", "ep") if name == "across" else ("ep", "efsdp")
    )


def make(experts_of: int | None) -> Any:
    """Make the net; with ``experts_of``, this rank's part of its experts."""
    torch.manual_seed(0)
    net = nn.Sequential(Mixture(EXPERTS), Mixture(EXPERTS)).to(models.device())
    if experts_of is not None:
        for block in net:
            for name, value in list(block.experts.named_parameters()):
                setattr(block.experts, name, nn.Parameter(value.detach().chunk(2)[experts_of].clone()))
            block.router = nn.Linear(WIDTH, EXPERTS // 2).to(models.device())
    return net


def on_experts_mesh(module: Mixture, mesh: DeviceMesh) -> Callable[[nn.Parameter], Any]:
    """Return the ``shard_placement_fn`` that shards experts over a mesh of their own."""
    info = _fsdp_common.FSDPMeshInfo(mesh["efsdp"], shard_mesh_dim=0)
    experts = set(module.experts.parameters())
    return lambda p: _fsdp_common.ShardPlacementResult(Shard(1), info) if p in experts else None


def wrapped(wrap: Callable[..., Any], layout: str | None) -> Any:
    """Shard a net, the experts over their own mesh if ``layout`` says which."""
    mesh = None if layout is None else mesh_of(layout)
    net = make(None if mesh is None else mesh["ep"].get_local_rank())
    for block in net:
        wrap(block, **({} if mesh is None else {"shard_placement_fn": on_experts_mesh(block, mesh)}))
    wrap(net)
    return net


def batch(step: int, micro_batch: int) -> Tensor:
    """Make a batch of this rank."""
    torch.manual_seed(100 * step + 10 * micro_batch + 7919 * dist.get_rank())
    return torch.randn(5, WIDTH).to(models.device())


def train(net: Any, steps: range = range(STEPS), optimizer: torch.optim.Optimizer | None = None) -> list[float]:
    """Train with two micro-batches a step; return the losses."""
    optimizer = optimizer or torch.optim.AdamW(net.parameters(), lr=3e-3, foreach=False)
    losses = []
    for step in steps:
        for micro_batch in range(2):
            net.set_requires_gradient_sync(micro_batch == 1)
            loss = net(batch(step, micro_batch)).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def weights_of(net: nn.Module) -> list[Tensor]:
    """Gather all weights over the ranks that they are sharded over."""
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in net.parameters()]


def by(strategy: Strategy) -> Callable[..., Any]:
    """Return ``fully_shard`` with a strategy."""
    return lambda module, **arguments: fully_shard(module, strategy=strategy, **arguments)
