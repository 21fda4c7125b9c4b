"""An SPMD mesh, on which parameters are DTensors already: ``dp_mesh_dims`` names its data-parallel dimensions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from harness import models
from harness.pool import Pool, device_type
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp_zpp import Strategy, fully_shard, traffic

pytestmark = pytest.mark.skipif(not hasattr(fsdp, "DataParallelMeshDims"), reason="torch has no dp_mesh_dims")
TENSOR_PARALLEL = {"0.weight": Shard(0), "0.bias": Shard(0), "2.weight": Shard(1)}


def on_mesh(mesh: DeviceMesh) -> Any:
    """Make a net of which tensor parallelism shards all but one bias."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).to(models.device())
    for name, parameter in list(net.named_parameters()):
        owner, _, own_name = name.rpartition(".")
        placements = [Replicate(), Replicate(), TENSOR_PARALLEL.get(name, Replicate())]
        whole = distribute_tensor(parameter.detach(), mesh, placements)
        setattr(net.get_submodule(owner), own_name, nn.Parameter(whole))
    return net


@cache  # torch compares meshes by identity here, and DTensors of equal meshes may share the first one
def mesh_of_three() -> DeviceMesh:
    """In a worker: the mesh of replicas x shards x tensor parallelism."""
    return init_device_mesh(device_type(), (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))


def trained(wrap: Callable[..., Any], **dims: Any) -> tuple[list[Tensor], Any]:
    """Train on the mesh; return the weights and the net."""
    mesh = mesh_of_three()
    net = on_mesh(mesh)
    wrap(net, mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(**dims))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(step)
        batch = distribute_tensor(torch.randn(16, 16).to(models.device()), mesh, [Shard(0), Shard(0), Replicate()])
        net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor() for parameter in net.parameters()], net


def distance_to_stock(strategy: Strategy, dims: dict[str, Any]) -> float:
    """In a worker: how far weights are from those of torch's own ``fully_shard`` over all data-parallel ranks."""

    def ours(module: nn.Module, **arguments: Any) -> Any:
        return fully_shard(module, strategy=strategy, **arguments)

    stock, _ = trained(fsdp.fully_shard, shard=("replicate", "shard"))
    weights, net = trained(ours, **dims)
    assert traffic(net)["reduce"]["inter"] > 0
    assert strategy.optimizer == "G" or traffic(net)["gather"]["inter"] == 0
    return max(float((weight - expected).abs().max()) for weight, expected in zip(weights, stock, strict=True))


@pytest.mark.parametrize("levels", ["GGG", "IGG", "NNG", "III", "IIG", "INI", "NNN"])
@pytest.mark.parametrize(
    "dims",
    [{"shard": ("replicate", "shard")}, {"shard": "shard", "replicate": "replicate"}],
    ids=["shards", "replicas"],
)
def test_all_data_parallel_dimensions_are_sharded_over(
    pool: Callable[[int], Pool], levels: str, dims: dict[str, Any]
) -> None:
    if levels == "GGG" and "replicate" in dims:
        with pytest.raises(Exception, match="use Strategy\\('III'\\) for HSDP"):
            pool(8).run(distance_to_stock, Strategy(levels, gpus_per_node=2), dims)
        return
    assert max(pool(8).run(distance_to_stock, Strategy(levels, gpus_per_node=2), dims)) <= 1e-6


def sharded_on_one_dimension(levels: str) -> None:
    """In a worker: shard inside nodes of two where data parallelism has one dimension of four."""
    mesh = init_device_mesh(device_type(), (4, 2), mesh_dim_names=("dp", "tp"))
    net = nn.Linear(16, 32).to(models.device())
    for name, parameter in list(net.named_parameters()):
        placed = distribute_tensor(parameter.detach(), mesh, [Replicate(), Shard(0)])
        setattr(net, name, nn.Parameter(placed))
    strategy = Strategy(levels, gpus_per_node=2)
    fully_shard(net, strategy=strategy, mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(shard="dp"))


def test_nodes_that_are_no_dimension_are_refused(pool: Callable[[int], Pool]) -> None:
    with pytest.raises(Exception, match="'III' shards inside nodes of 2 ranks, which are no data-parallel dimensions"):
        pool(8).run(sharded_on_one_dimension, "III")
    pool(8).run(sharded_on_one_dimension, "NNN")
