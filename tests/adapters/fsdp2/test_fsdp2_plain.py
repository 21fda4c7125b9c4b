"""Where nothing tells the nodes, a plain strategy is torch's own fully_shard, with any of torch's arguments."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import models
from harness.pool import Pool, device_type
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_zpp import Strategy, fully_shard, traffic


def trained(shard: Callable[..., Any], arguments: dict[str, Any]) -> list[torch.Tensor]:
    """In a worker: the local shards after three steps."""
    if "mesh" in arguments:
        arguments = arguments | {"mesh": init_device_mesh(device_type(), (2, 2), mesh_dim_names=("r", "s"))}
    net = models.make_net()
    for module in (*net.blocks, net):
        shard(module, **arguments)
    optimizer = models.make_optimizer("sgd", net.parameters())
    for step in range(3):
        models.loss_of(net, models.batch(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if shard is not torch_fully_shard:
        assert traffic(net) == {kind: {"inter": 0, "intra": 0} for kind in ("gather", "reduce")}
    return [p.to_local().clone() for p in net.parameters()]


def equals_torch(arguments: dict[str, Any]) -> bool:
    """In a worker: whether ours gives torch's weights bit for bit."""

    def plain(module: Any, **arguments: Any) -> Any:
        return fully_shard(module, strategy=Strategy("GGG"), **arguments)

    with patch.dict(os.environ):
        del os.environ["LOCAL_WORLD_SIZE"]
        ours = trained(plain, arguments)
    return all(map(torch.equal, ours, trained(torch_fully_shard, arguments)))


@pytest.mark.parametrize(
    "arguments",
    [{}, {"reshard_after_forward": 2}, {"reshard_after_forward": False}, {"mesh": "2-D"}],
    ids=["default", "int reshard", "no reshard", "HSDP"],
)
def test_a_plain_strategy_trains_as_torchs_own_bit_for_bit(
    pool: Callable[[int], Pool], arguments: dict[str, Any]
) -> None:
    assert pool(4).run(equals_torch, arguments) == [True] * 4
