"""A model may be built on the meta device and materialized after fully_shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import models
from harness.adapter import Case
from harness.fsdp2 import FULL, Fsdp2
from harness.pool import Pool
from harness.training import train
from torch.distributed.checkpoint.state_dict import set_model_state_dict

from fsdp_zpp import Strategy

TWO: Any = {"gpus_per_node": 2}


def meta_init(strategy: Strategy) -> None:
    """In a worker: a model that is built on the meta device, materialized sharded, then loaded."""
    adapter, full = Fsdp2(), models.make_net()
    with torch.device("meta"):
        net = models.Net()
    adapter.shard(net, Case(), strategy)
    net.to_empty(device=models.device())
    for module in net.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for block in net.blocks:
        block.shift.fill_(0.1)
    set_model_state_dict(net, full.state_dict(), options=FULL)
    reference = adapter.make(Case(), strategy)
    for model in (net, reference):
        train(adapter, model, Case(steps=2))
    assert models.distance(adapter.full_weights(net), adapter.full_weights(reference)) == 0


@pytest.mark.parametrize("strategy", [Strategy("IGG", **TWO), Strategy.zeropp(**TWO)], ids=["hpZ", "zeropp"])
def test_a_model_materialized_after_sharding_trains_as_one_that_had_values(
    pool: Callable[[int], Pool], strategy: Strategy
) -> None:
    pool(4).run(meta_init, strategy)
