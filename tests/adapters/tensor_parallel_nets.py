"""A net beside tensor parallelism over two ranks, of which data parallelism over two nodes of two knows nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Adapter
from harness.pool import device_type
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_zpp import Strategy

WIDTH, HIDDEN, DATA_PARALLEL = 40, 80, 4
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
    """A net after its training.

    Attributes:
        model: The net.
        mesh: The mesh of data and tensor parallelism.
        losses: This rank's.
    """

    model: Any
    mesh: DeviceMesh
    losses: list[float]


@cache
def mesh_of_two() -> DeviceMesh:
    """In a worker: the mesh of data x tensor parallelism, whose groups all trainings share."""
    return init_device_mesh(device_type(), (DATA_PARALLEL, 2), mesh_dim_names=("dp", "tp"))


def trained(adapter: Adapter, strategy: Strategy, steps: int = 4, rate: float = 0.3) -> Trained:
    """Train a net under a strategy beside tensor parallelism."""
    mesh = mesh_of_two()
    net = make()
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


def whole(value: Any) -> Tensor:
    """Gather a tensor that may be sharded along one dimension of a mesh, and what it shards along another one."""
    while isinstance(value, DTensor):
        value = value.full_tensor()
    return value


def copies_that_differ(trained_net: Trained) -> dict[str, float]:
    """Return how far the copies are apart that the ranks of tensor parallelism have, if they differ, by name."""
    differing = {}
    for name, value in get_model_state_dict(trained_net.model).items():
        if ".up." in name or name.endswith("down.weight"):
            continue
        local: Any = value
        while isinstance(local, DTensor):
            local = local.to_local()
        ranks = [torch.empty_like(local) for _ in range(2)]
        dist.all_gather(ranks, local.contiguous(), group=trained_net.mesh["tp"].get_group())
        if not torch.equal(*ranks):
            differing[name] = float((ranks[0] - ranks[1]).abs().max())
    return differing
