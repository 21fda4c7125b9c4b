"""Data parallelism over two nodes of two, beside tensor parallelism over two ranks.

Neither knows of the other, or an SPMD mesh has both: parameters are DTensors already, and ``dp_mesh_dims`` names the
data-parallel dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import models
from harness.adapter import Adapter
from harness.covering import ADAPTERS, SCOPES
from harness.pool import Pool, device_type
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_zpp import (
    Int4,
    Int4Delta,
    Int8,
    LocalSteps,
    LoCo,
    Strategy,
    clip_grad_norm_,
    exchange_weights,
    fully_shard,
    traffic,
)

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


@cache
def trained_alone() -> dict[str, Tensor]:
    """Train a net on this rank alone, on the batches of all data-parallel ranks."""
    net = make()
    optimizer = optimizer_of(net)
    for step in range(STEPS):
        for rank in range(DATA_PARALLEL):
            (net(batch(step, rank)).square().mean() / DATA_PARALLEL).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


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


def outcome(adapter: Adapter, strategy: Strategy) -> tuple[float, dict[str, float]]:
    """In a worker: how far trained weights are from those of a training on one rank, and copies from each other."""
    net = trained(adapter, strategy)
    distances = []
    for name, value in get_model_state_dict(net.model).items():
        while isinstance(value, DTensor):  # sharded along one dimension of the mesh, and that along another one
            value = value.full_tensor()
        distances.append(float((value - trained_alone()[name]).abs().max()))
    return max(distances), copies_that_differ(net)


CODED = {
    "zeropp": Strategy.zeropp(**TWO),
    "delta": Strategy.zeropp(weights=Int4Delta(), **TWO),
    "LoCo": Strategy("IIG", gradients=Int4(), error_feedback=LoCo(dtype=Int8(1024)), **TWO),
    "LoCo within nodes": Strategy("III", gradients=Int4(), error_feedback=LoCo(), **TWO),
    "kept": Strategy("NNG", weights=Int8(64), gradients=Int8(1024), intra_gradients=None, **TWO),
    "replicas": Strategy("NNN", gradients=Int4(32), **TWO),
}
BY_DEFAULT = ("fsdp1, IGG", "fsdp2, III", "fsdp1, LoCo", "fsdp2, LoCo within nodes")


@pytest.mark.parametrize(
    ("adapter", "strategy"),
    [
        pytest.param(adapter, strategy, id=row, marks=() if row in BY_DEFAULT else pytest.mark.wide)
        for adapter in ADAPTERS
        for name, strategy in ({each: Strategy(each, **TWO) for each in SCOPES} | CODED).items()
        if (row := f"{adapter}, {name}") not in ("fsdp1, NNN", "fsdp1, replicas")  # which are refused
    ],
)
def test_training_is_as_on_one_rank_and_copies_are_equal_bit_for_bit(
    pool: Callable[[int], Pool], adapter: Adapter, strategy: Strategy
) -> None:
    for distance, differing in pool(8).run(outcome, adapter, strategy):
        assert differing == {}
        assert distance <= 1e-6 or strategy in CODED.values()


def test_no_shard_of_what_is_sharded_already_is_refused(pool: Callable[[int], Pool]) -> None:
    with pytest.raises(Exception, match="NO_SHARD, which can't be combined with another parallelism"):
        pool(8).run(outcome, ADAPTERS[0], Strategy("NNN", **TWO))


# ---- an SPMD mesh

needs_dims = pytest.mark.skipif(not hasattr(fsdp, "DataParallelMeshDims"), reason="torch has no dp_mesh_dims")
PLACEMENTS = {"0.weight": Shard(0), "0.bias": Shard(0), "2.weight": Shard(1)}
BOTH: dict[str, Any] = {"shard": ("replicate", "shard")}
REPLICAS: dict[str, Any] = {"shard": "shard", "replicate": "replicate"}


def on_mesh(mesh: DeviceMesh) -> Any:
    """Make a net of which tensor parallelism shards two matrices and a bias, and copies the others."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.Linear(16, 24)).to(models.device())
    for name, parameter in list(net.named_parameters()):
        owner, _, own_name = name.rpartition(".")
        placements = [Replicate()] * (mesh.ndim - 1) + [PLACEMENTS.get(name, Replicate())]
        whole = distribute_tensor(parameter.detach(), mesh, placements)
        setattr(net.get_submodule(owner), own_name, nn.Parameter(whole))
    return net


@cache  # torch compares meshes by identity here, and DTensors of equal meshes may share the first one
def mesh_of_three() -> DeviceMesh:
    """In a worker: the mesh of replicas x shards x tensor parallelism."""
    return init_device_mesh(device_type(), (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))


def trained_on_mesh(wrap: Callable[..., Any], clip: Callable[..., Any], dims: dict[str, Any]) -> Any:
    """Train on the mesh; return the net."""
    mesh = mesh_of_three()
    net = on_mesh(mesh)
    wrap(net, mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(**dims))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(step)
        inputs = distribute_tensor(torch.randn(16, 16).to(models.device()), mesh, [Shard(0), Shard(0), Replicate()])
        net(inputs).square().mean().backward()
        clip(net.parameters(), 0.02)
        optimizer.step()
        optimizer.zero_grad()
    return net


def weights_of(net: Any) -> Tensor:
    """Gather all weights."""
    return torch.cat([parameter.full_tensor().detach().flatten() for parameter in net.parameters()])


@cache
def stock_weights() -> Tensor:
    """Train by torch's own ``fully_shard`` over all data-parallel ranks; return the weights."""
    return weights_of(trained_on_mesh(fsdp.fully_shard, nn.utils.clip_grad_norm_, BOTH))


def outcome_on_mesh(strategy: Strategy, dims: dict[str, Any]) -> tuple[float, bool]:
    """In a worker: how far weights are from stock's, and whether they are others than those of rank 0."""
    net = trained_on_mesh(partial(fully_shard, strategy=strategy), clip_grad_norm_, dims)
    if strategy.local_steps is None:
        assert traffic(net)["reduce"]["inter"] > 0
        assert strategy.optimizer == "G" or traffic(net)["gather"]["inter"] == 0
    else:
        exchange_weights(net)
    weights = weights_of(net)
    first = weights.clone()
    dist.broadcast(first, 0)
    return float((weights - stock_weights()).abs().max()), not torch.equal(first, weights)


def of_mesh(dims: dict[str, Any], levels: str, by_default: bool = False, **arguments: Any) -> Any:
    """Return the parameters of a test."""
    strategy = Strategy(levels, gpus_per_node=2, **arguments)
    name = f"{'shards' if dims is BOTH else 'replicas'}, {levels}, {', '.join(arguments) or 'exact'}"
    return pytest.param(dims, strategy, id=name, marks=() if by_default else pytest.mark.wide)


@needs_dims
@pytest.mark.parametrize(
    ("dims", "strategy"),
    [
        *(of_mesh(BOTH, levels, levels == "III") for levels in ("GGG", "IGG", "NNG", "III", "IIG", "INI", "NNN")),
        *(of_mesh(REPLICAS, levels, levels == "IIG") for levels in ("IGG", "NNG", "III", "IIG", "INI", "NNN")),
        of_mesh(BOTH, "III", True, gradients=Int4(), error_feedback=LoCo()),
        of_mesh(BOTH, "IIG", weights=Int8(64), gradients=Int4(32)),
        of_mesh(BOTH, "NNN", gradients=Int4(32)),
        of_mesh(BOTH, "III", True, local_steps=LocalSteps(1, codec=Int4(32), error_feedback=LoCo())),
    ],
)
def test_all_data_parallel_dimensions_are_sharded_over(
    pool: Callable[[int], Pool], dims: dict[str, Any], strategy: Strategy
) -> None:
    exact = strategy.gradients is None and strategy.local_steps is None
    for distance, differs in pool(8).run(outcome_on_mesh, strategy, dims):
        assert not differs
        assert distance <= 1e-6 or not exact


def sharded_on_one_dimension(levels: str) -> None:
    """In a worker: shard inside nodes of two where data parallelism has one dimension of four."""
    mesh = init_device_mesh(device_type(), (4, 2), mesh_dim_names=("dp", "tp"))
    fully_shard(
        on_mesh(mesh),
        strategy=Strategy(levels, **TWO),
        mesh=mesh,
        dp_mesh_dims=fsdp.DataParallelMeshDims(shard="dp"),
    )


@needs_dims
def test_meshes_without_a_dimension_of_nodes_or_over_all_of_them_are_refused(pool: Callable[[int], Pool]) -> None:
    pool(8).run(sharded_on_one_dimension, "NNN")
    with pytest.raises(Exception, match="'III' shards inside nodes of 2 ranks, which are no data-parallel dimensions"):
        pool(8).run(sharded_on_one_dimension, "III")
    with pytest.raises(Exception, match=r"use Strategy\('III'\) for HSDP"):
        pool(8).run(outcome_on_mesh, Strategy("GGG", **TWO), REPLICAS)


def differs_after_loading(saved_by: Strategy, loaded_by: Strategy, path: Path) -> bool:
    """In a worker: whether a net that loads what another strategy has saved has other weights."""
    net = trained_on_mesh(partial(fully_shard, strategy=saved_by), clip_grad_norm_, BOTH)
    dcp.save({"model": get_model_state_dict(net)}, checkpoint_id=path)
    other = on_mesh(mesh_of_three())
    fully_shard(other, strategy=loaded_by, mesh=mesh_of_three(), dp_mesh_dims=fsdp.DataParallelMeshDims(**BOTH))
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(other, state["model"])
    return not torch.equal(weights_of(net), weights_of(other))


@needs_dims
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("III", "IGG"), *(pytest.param(*each, marks=pytest.mark.wide) for each in (("IGG", "NNN"), ("NNN", "III")))],
)
def test_a_checkpoint_is_loaded_under_another_scope(
    pool: Callable[[int], Pool], tmp_path: Path, saved: str, loaded: str
) -> None:
    strategies = (Strategy(levels, **TWO) for levels in (saved, loaded))
    assert pool(8).run(differs_after_loading, *strategies, tmp_path) == [False] * 8
