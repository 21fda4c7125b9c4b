"""Nets that tensor parallelism over two ranks splits, beside data parallelism over two nodes of two."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from harness import models
from harness.adapter import Adapter
from harness.pool import device_type
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_zpp import Strategy

WIDTH, HIDDEN, DATA_PARALLEL, STEPS = 40, 80, 4, 4
TWO: dict[str, Any] = {"gpus_per_node": 2}


class Block(nn.Module):
    """Two linears that tensor parallelism splits, and beside them a norm and matrices of which each rank has a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.latent = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.mixer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + self.down(torch.relu(self.up(x))) + self.mixer(self.latent(x))


def make() -> Any:
    """Make the net that all trainings start from."""
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).to(models.device())


def optimizer_of(net: nn.Module, rate: float = 0.3) -> torch.optim.Optimizer:
    """Make an optimizer that amplifies no difference of gradients, as Adam does near zero."""
    return torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9, foreach=False)


def batch(step: int, rank: int) -> Tensor:
    """Make the batch of a data-parallel rank."""
    torch.manual_seed(100 * step + rank)
    return torch.randn(4, WIDTH).to(models.device())


@dataclass
class Trained:
    """A net after its training."""

    model: Any
    mesh: DeviceMesh  # of data and tensor parallelism
    losses: list[float]  # this rank's


@cache
def mesh_of_two() -> DeviceMesh:
    """In a worker: the mesh of data x tensor parallelism, whose groups all trainings share."""
    return init_device_mesh(device_type(), (DATA_PARALLEL, 2), mesh_dim_names=("dp", "tp"))


def trained(adapter: Adapter, strategy: Strategy, steps: int = STEPS, rate: float = 0.3) -> Trained:
    """Train a net under a strategy beside tensor parallelism."""
    mesh, net = mesh_of_two(), make()
    for place, block in enumerate(net):
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        net[place] = adapter.wrap(block, strategy, **{adapter.mesh_argument: mesh["dp"]})
    model: Any = adapter.wrap(net, strategy, **{adapter.mesh_argument: mesh["dp"]})
    optimizer = optimizer_of(model, rate)
    losses = []
    for step in range(steps):
        loss = model(batch(step, mesh["dp"].get_local_rank())).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trained(model, mesh, losses)
