"""Bad input that only fully_shard takes is an error on every rank before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import messages, models
from harness.messages import Refusal, Reply, assert_refused
from harness.pool import Pool, device_type
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdp_zpp import Strategy, traffic
from fsdp_zpp.adapters.fsdp2 import fully_shard

TWO = Strategy(gpus_per_node=2)


def _mesh(*names: str) -> Any:
    return init_device_mesh(device_type(), (2,) * len(names), mesh_dim_names=names)


def _model_first(strategy: Strategy) -> Any:
    net = models.make_net()
    fully_shard(net, strategy=strategy)
    return fully_shard(net.blocks[0], strategy=strategy)


CALLS: dict[str, Refusal] = {
    "no strategy": (lambda: fully_shard(models.make_net(), strategy="IGG"), TypeError, "strategy must be a Strategy"),
    "reshard to a few": (
        lambda: fully_shard(models.make_net(), strategy=TWO, reshard_after_forward=2),
        ValueError,
        "use Strategy('IGG'",
    ),
    "reshard what is kept": (
        lambda: fully_shard(models.make_net(), strategy=Strategy("NNG", gpus_per_node=2), reshard_after_forward=True),
        ValueError,
        "reshard_after_forward=True contradicts 'NNG'",
    ),
    "dimensions of a mesh": (
        lambda: fully_shard(models.make_net(), strategy=TWO, mesh=_mesh("dp", "tp")),
        ValueError,
        "use Strategy('III') for HSDP",
    ),
    "a mesh for a parameter": (
        lambda: fully_shard(models.make_net(), strategy=TWO, shard_placement_fn=lambda p: "elsewhere"),
        ValueError,
        "must return a Shard or None",
    ),
    "the model before its layers": (lambda: _model_first(TWO), ValueError, "shard layers before the model"),
    "the model before its layers, inside nodes": (
        lambda: _model_first(Strategy("III", gpus_per_node=2)),
        ValueError,
        "norm.weight is sharded already",
    ),
    "unknown argument": (lambda: fully_shard(models.make_net(), strategy=TWO, mesch=1), TypeError, "mesch"),
}


def attempt(name: str) -> Reply:
    """In a worker: how one call is refused."""
    return messages.attempt(CALLS[name])


@pytest.mark.parametrize("name", CALLS)
def test_bad_input_to_fully_shard_is_refused_on_every_rank(pool: Callable[[int], Pool], name: str) -> None:
    assert_refused(pool(4).run(attempt, name), CALLS[name])


def pinned_offload() -> None:
    """In a worker: torch would only say that memory can't be pinned."""
    with pytest.raises(ValueError, match="pin_memory=False"):
        fully_shard(models.make_net(), strategy=TWO, offload_policy=CPUOffloadPolicy())


@pytest.mark.skipif(device_type() == "cuda", reason="there is an accelerator to pin memory for")
def test_pinned_offload_needs_an_accelerator(pool: Callable[[int], Pool]) -> None:
    pool(4).run(pinned_offload)


def module_without_parameters() -> int:
    """In a worker: a module that has nothing of its own to shard is left to torch."""
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    for layer in net:
        fully_shard(layer, strategy=TWO)
    assert fully_shard(net, strategy=TWO) is net
    net(torch.ones(2, 6, device=models.device())).sum().backward()
    assert fully_shard.state(net) is net._get_fsdp_state()
    return traffic(net)["gather"]["inter"]


def test_a_module_without_parameters_of_its_own_is_left_to_torch(pool: Callable[[int], Pool]) -> None:
    assert min(pool(4).run(module_without_parameters)) > 0
