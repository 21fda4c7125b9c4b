"""An SPMD mesh, on which parameters are DTensors already: ``dp_mesh_dims`` names its data-parallel dimensions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import models
from harness.pool import Pool, device_type
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp_zpp import Int4, Int8, LocalSteps, LoCo, Strategy, clip_grad_norm_, exchange_weights, fully_shard, traffic

pytestmark = pytest.mark.skipif(not hasattr(fsdp, "DataParallelMeshDims"), reason="torch has no dp_mesh_dims")
TENSOR_PARALLEL = {"0.weight": Shard(0), "0.bias": Shard(0), "2.weight": Shard(1)}


def on_mesh(mesh: DeviceMesh) -> Any:
    """Make a net of which tensor parallelism shards two matrices and a bias, and copies the others."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.Linear(16, 24)).to(models.device())
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


def trained(
    wrap: Callable[..., Any], clip: Callable[..., Any] = clip_grad_norm_, **dims: Any
) -> tuple[list[Tensor], Any]:
    """Train on the mesh; return the weights and the net."""
    mesh = mesh_of_three()
    net = on_mesh(mesh)
    wrap(net, mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(**dims))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(step)
        batch = distribute_tensor(torch.randn(16, 16).to(models.device()), mesh, [Shard(0), Shard(0), Replicate()])
        net(batch).square().mean().backward()
        clip(net.parameters(), 0.02)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor() for parameter in net.parameters()], net


def by(strategy: Strategy) -> Callable[..., Any]:
    """Return ``fully_shard`` by a strategy."""
    return lambda module, **arguments: fully_shard(module, strategy=strategy, **arguments)


@cache
def stock_weights() -> list[Tensor]:
    """Train by torch's own ``fully_shard`` over all data-parallel ranks; return the weights."""
    return trained(fsdp.fully_shard, nn.utils.clip_grad_norm_, shard=("replicate", "shard"))[0]


def distance_to_stock(strategy: Strategy, dims: dict[str, Any]) -> float:
    """In a worker: how far weights are from those of torch's own ``fully_shard`` over all data-parallel ranks."""
    weights, net = trained(by(strategy), **dims)
    assert traffic(net)["reduce"]["inter"] > 0
    assert strategy.optimizer == "G" or traffic(net)["gather"]["inter"] == 0
    return max(
        float((weight - expected).abs().max()) for weight, expected in zip(weights, stock_weights(), strict=True)
    )


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


CODED = [
    Strategy("III", gradients=Int4(), error_feedback=LoCo(), gpus_per_node=2),
    Strategy("IIG", weights=Int8(64), gradients=Int4(32), gpus_per_node=2),
    Strategy("NNN", gradients=Int4(32), gpus_per_node=2),
    Strategy.diloco(local_steps=LocalSteps(1, codec=Int4(32), error_feedback=LoCo()), gpus_per_node=2),
]


def differs_from_first_rank(strategy: Strategy) -> bool:
    """In a worker: whether this rank's copies of the trained weights are others than those of rank 0."""
    weights, net = trained(by(strategy), shard=("replicate", "shard"))
    if strategy.local_steps is not None:
        exchange_weights(net)
        weights = [parameter.full_tensor() for parameter in net.parameters()]
    own = torch.cat([weight.detach().flatten() for weight in weights])
    first = own.clone()
    dist.broadcast(first, 0)
    return not torch.equal(first, own)


@pytest.mark.parametrize("strategy", CODED, ids=lambda each: f"{each.levels} {each.local_steps or each.gradients}")
def test_all_copies_are_equal_bit_for_bit(pool: Callable[[int], Pool], strategy: Strategy) -> None:
    assert pool(8).run(differs_from_first_rank, strategy) == [False] * 8


def differs_after_loading(saved_by: Strategy, loaded_by: Strategy, path: Path) -> bool:
    """In a worker: whether a net that loads what another strategy has saved has other weights."""
    weights, net = trained(by(saved_by), shard=("replicate", "shard"))
    dcp.save({"model": get_model_state_dict(net)}, checkpoint_id=path)
    other = on_mesh(mesh_of_three())
    by(loaded_by)(other, mesh=mesh_of_three(), dp_mesh_dims=fsdp.DataParallelMeshDims(shard=("replicate", "shard")))
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(other, state["model"])
    pairs = zip(weights, other.parameters(), strict=True)
    return any(not torch.equal(weight, loaded.full_tensor()) for weight, loaded in pairs)


@pytest.mark.parametrize(("saved", "loaded"), [("III", "IGG"), ("IGG", "NNN"), ("NNN", "III")])
def test_a_checkpoint_is_loaded_under_another_scope(
    pool: Callable[[int], Pool], tmp_path: Path, saved: str, loaded: str
) -> None:
    strategies = (Strategy(levels, gpus_per_node=2) for levels in (saved, loaded))
    assert pool(8).run(differs_after_loading, *strategies, tmp_path) == [False] * 8
