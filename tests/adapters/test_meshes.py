"""Meshes of several dimensions: which of their ranks a strategy shards over, and where it says that nodes are."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import models
from harness.adapter import Adapter, Case
from harness.covering import over_adapters
from harness.messages import Refusal, Reply, assert_refused, attempt as attempt_call
from harness.pool import Pool, device_type
from harness.training import train
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_zpp import Strategy, traffic

STRATEGIES = [Strategy.zeropp(), Strategy.mics(), Strategy("IIG"), Strategy.zero2()]


def hsdp_mesh(nodes: int, gpus: int) -> DeviceMesh:
    """Make a mesh of nodes x GPUs, as HSDP takes it."""
    return init_device_mesh(device_type(), (nodes, gpus), mesh_dim_names=("replicate", "shard"))


def trained_on(adapter: Adapter, strategy: Strategy, mesh: DeviceMesh) -> tuple[dict[str, Tensor], Any]:
    """Train on a mesh; return the weights and the bytes that were sent."""
    net = models.make_net()
    for place, block in enumerate(net.blocks):
        net.blocks[place] = adapter.wrap(block, strategy, **{adapter.mesh_argument: mesh})
    model: Any = adapter.wrap(net, strategy, **{adapter.mesh_argument: mesh})
    train(adapter, model, Case())
    return adapter.full_weights(model), traffic(model)


def equals_one_dimension(adapter: Adapter, strategy: Strategy) -> bool:
    """In a worker: whether an HSDP mesh gives the weights and the bytes of the 1-D mesh with nodes of its size."""
    with patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        ours, sent = trained_on(adapter, strategy, hsdp_mesh(2, 2))
        flat, sent_flat = trained_on(adapter, strategy, init_device_mesh(device_type(), (4,)))
    assert sent["gather"]["inter"] + sent["reduce"]["inter"] > 0
    return sent == sent_flat and all(torch.equal(ours[name], flat[name]) for name in flat)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@over_adapters
def test_an_hsdp_mesh_is_read_as_nodes_and_their_ranks(
    pool: Callable[[int], Pool], adapter: Adapter, strategy: Strategy
) -> None:
    assert pool(4).run(equals_one_dimension, adapter, strategy) == [True] * 4


def nodes_of(adapter: Adapter, strategy: Strategy) -> bool:
    """In a worker: whether nodes are those of the mesh where a strategy says so, too, whatever has been launched."""
    with patch.dict(os.environ, LOCAL_WORLD_SIZE="4"):
        _, sent = trained_on(adapter, strategy, hsdp_mesh(2, 2))
    return bool(sent["reduce"]["inter"])


@over_adapters
def test_nodes_of_a_mesh_may_differ_from_those_that_were_launched(
    pool: Callable[[int], Pool], adapter: Adapter
) -> None:
    assert pool(4).run(nodes_of, adapter, Strategy.mics(gpus_per_node=2)) == [True] * 4


def refusals_of(adapter: Adapter) -> dict[str, Refusal]:
    """Meshes that contradict a strategy or the launcher, by name."""

    def sharded(strategy: Strategy, mesh: Callable[[], DeviceMesh]) -> Callable[[], Any]:
        return lambda: adapter.wrap(models.make_net(), strategy, **{adapter.mesh_argument: mesh()})

    def nameless() -> DeviceMesh:
        return init_device_mesh(device_type(), (2, 2))

    two, zeropp = (lambda: hsdp_mesh(2, 2)), Strategy.zeropp
    return {
        "the strategy's nodes": (sharded(zeropp(gpus_per_node=4), two), ValueError, "leave one out: pass the 1-D mesh"),
        "launched nodes": (sharded(zeropp(), two), ValueError, "4 of its ranks run on each node; pass gpus_per_node=2"),
        "all ranks": (sharded(Strategy(gpus_per_node=2), two), ValueError, "use Strategy('III') for HSDP"),
        "no names": (sharded(zeropp(gpus_per_node=2), nameless), ValueError, "with names, got 2 dimensions (2, 2)"),
    }


def attempt(adapter: Adapter, name: str) -> Reply:
    """In a worker: how one mesh is refused."""
    with patch.dict(os.environ, LOCAL_WORLD_SIZE="4"):
        return attempt_call(refusals_of(adapter)[name])


@pytest.mark.parametrize("name", ["the strategy's nodes", "launched nodes", "all ranks", "no names"])
@over_adapters
def test_a_mesh_that_contradicts_is_refused(pool: Callable[[int], Pool], adapter: Adapter, name: str) -> None:
    assert_refused(pool(4).run(attempt, adapter, name), refusals_of(adapter)[name])
