"""Data parallelism over two nodes of two, beside tensor parallelism over two ranks; an SPMD mesh may have both.

Parameters of such a mesh are DTensors already, and ``dp_mesh_dims`` names the data-parallel dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Adapter
from harness.covering import ADAPTERS, over_adapters, over_each
from harness.messages import attempt
from harness.pool import Pools, device_type
from harness.two_axes import DATA_PARALLEL, STEPS, TWO, Trained, batch, make, optimizer_of, trained
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_zpp import (
    Codec,
    Int4,
    Int8,
    LocalSteps,
    LoCo,
    Strategy,
    clip_grad_norm_,
    exchange_weights,
    fully_shard,
    traffic,
)
from fsdp_zpp.runtime.unit import named_units


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
    axes = {axis for unit in named_units(net.model) for axis in unit.sharded.model_parallel_groups()}
    assert axes == {net.mesh["tp"].get_group()}
    distances = []
    for name, value in get_model_state_dict(net.model).items():
        while isinstance(value, DTensor):  # sharded along one dimension of the mesh, and that along another one
            value = value.full_tensor()
        distances.append(float((value - trained_alone()[name]).abs().max()))
    return max(distances), copies_that_differ(net)


TRAININGS = {
    "fsdp1, exact": (ADAPTERS[0], Strategy("IGG", **TWO)),
    "fsdp2, exact": (ADAPTERS[1], Strategy("III", **TWO)),
    "fsdp1, LoCo": (ADAPTERS[0], Strategy("IIG", gradients=Int4(), error_feedback=LoCo(dtype=Int8(1024)), **TWO)),
    "fsdp2, LoCo": (ADAPTERS[1], Strategy("III", gradients=Int4(), error_feedback=LoCo(), **TWO)),
}


@over_each(rest=False, training=TRAININGS)
def test_training_is_as_on_one_rank_and_copies_are_equal_bit_for_bit(
    pool: Pools, training: tuple[Adapter, Strategy]
) -> None:
    for distance, differing in pool(8).run(outcome, *training):
        assert differing == {}
        assert distance <= 1e-6 or training[1].gradients is not None


def test_no_shard_of_what_is_sharded_already_is_refused(pool: Pools) -> None:
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
    axes = {axis for unit in named_units(net) for axis in unit.sharded.model_parallel_groups()}
    assert axes == {mesh_of_three()["tp"].get_group()}
    if strategy.local_steps is None:
        assert traffic(net)["reduce"]["inter"] > 0
        assert strategy.optimizer == "G" or traffic(net)["gather"]["inter"] == 0
    else:
        exchange_weights(net)
    weights = weights_of(net)
    first = weights.clone()
    dist.broadcast(first, 0)
    return float((weights - stock_weights()).abs().max()), not torch.equal(first, weights)


ON_MESH: dict[str, tuple[dict[str, Any], Strategy]] = {
    "shards, III": (BOTH, Strategy("III", **TWO)),
    "replicas, IIG": (REPLICAS, Strategy("IIG", **TWO)),
    "coded gradients": (BOTH, Strategy("III", gradients=Int4(), error_feedback=LoCo(), **TWO)),
    "local steps": (BOTH, Strategy("III", local_steps=LocalSteps(1, codec=Int4(32), error_feedback=LoCo()), **TWO)),
}


@needs_dims
@over_each(rest=False, training=ON_MESH)
def test_all_data_parallel_dimensions_are_sharded_over(pool: Pools, training: tuple[dict[str, Any], Strategy]) -> None:
    dims, strategy = training
    exact = strategy.gradients is None and strategy.local_steps is None
    for distance, differs in pool(8).run(outcome_on_mesh, strategy, dims):
        assert not differs
        assert distance <= 1e-6 or not exact


def sharded_on_one_dimension(levels: str) -> None:
    """In a worker: shard inside nodes of two where data parallelism has one dimension of four."""
    mesh = init_device_mesh(device_type(), (4, 2), mesh_dim_names=("dp", "tp"))
    dims = fsdp.DataParallelMeshDims(shard="dp")
    fully_shard(on_mesh(mesh), strategy=Strategy(levels, **TWO), mesh=mesh, dp_mesh_dims=dims)


@needs_dims
def test_meshes_without_a_dimension_of_nodes_or_over_all_of_them_are_refused(pool: Pools) -> None:
    pool(8).run(sharded_on_one_dimension, "NNN")
    with pytest.raises(Exception, match="'III' shards inside nodes of 2 ranks, which are no data-parallel dimensions"):
        pool(8).run(sharded_on_one_dimension, "III")
    with pytest.raises(Exception, match=r"use Strategy\('III'\) for HSDP"):
        pool(8).run(outcome_on_mesh, Strategy("GGG", **TWO), REPLICAS)


# ---- nodes that train on their own

ROUNDS = 6
LOCAL = {
    "int8": LocalSteps(2, codec=Int8(64)),
    "fragments, overlap": LocalSteps(3, codec=Int4(32), error_feedback=LoCo(dtype=Int8(128)), overlap=1, mix=0.5),
    "a start": LocalSteps(2, codec=Int4(512), spread=False, start=2),
}


def exchanged(adapter: Adapter, strategy: Strategy) -> tuple[dict[str, float], list[float]]:
    """In a worker: how far copies are apart after a training and a last exchange, and the losses of all ranks."""
    net = trained(adapter, strategy, ROUNDS, rate=0.1)
    before = copies_that_differ(net)
    exchange_weights(net.model)
    losses = torch.tensor(net.losses, device=models.device())
    dist.all_reduce(losses)
    return before | copies_that_differ(net), losses.tolist()


@over_each(adapter=ADAPTERS, name=list(LOCAL))
def test_copies_stay_equal_bit_for_bit(pool: Pools, adapter: Adapter, name: str) -> None:
    local = LOCAL[name]
    uncoded = replace(local, codec=None, error_feedback=None)
    coded, exact = (
        pool(8).run(exchanged, adapter, Strategy.diloco(local_steps=each, **TWO)) for each in (local, uncoded)
    )
    assert [differing for differing, _ in coded] == [{}] * 8
    losses, expected = coded[0][1], exact[0][1]
    assert losses == pytest.approx(expected, rel=2e-2)
    assert losses != expected


class Whole(Int8):
    """A codec that does not tell which values of a chunk depend on each other."""

    block_numel = Codec.block_numel


def without_blocks(adapter: Adapter) -> tuple[str, str]:
    """In a worker: the error of such a codec."""
    strategy = Strategy.diloco(local_steps=LocalSteps(2, codec=Whole(64)), **TWO)
    return attempt((partial(trained, adapter, strategy), NotImplementedError, ""))[:2]


@over_adapters
def test_a_codec_without_blocks_is_refused(pool: Pools, adapter: Adapter) -> None:
    for kind, text in pool(8).run(without_blocks, adapter):
        assert kind == "NotImplementedError", text
        assert "up.weight is sharded already: the codec's block_numel is 0" in text
