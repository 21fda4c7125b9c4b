"""Bad input is an error on every rank before any collective; a dead rank is an error on the others."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import messages, models
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, over_adapters
from harness.messages import Refusal, Reply, assert_refused
from harness.pool import Pool, WorkerError, device_type
from harness.training import train
from torch import nn

from fsdp_zpp import Strategy, invalidate, traffic

TWO: Any = {"gpus_per_node": 2}


def _integers() -> nn.Module:
    net = models.make_net()
    net.register_parameter("codes", nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False))
    return net


def refusals_of(adapter: Adapter) -> dict[str, Refusal]:
    """Calls that an adapter refuses, by name."""

    def sharded(strategy: Any, net: Callable[[], nn.Module] = models.make_net) -> Callable[[], Any]:
        return lambda: adapter.apply(net(), strategy)

    return {
        "indivisible": (sharded(Strategy(gpus_per_node=3)), ValueError, "allowed are [1, 2, 4]"),
        "the class": (sharded(Strategy), TypeError, "did you mean Strategy()"),
        "a method": (sharded(Strategy.zeropp), TypeError, "did you mean Strategy.zeropp()?"),
        "integers": (sharded(Strategy(**TWO), _integers), TypeError, "codes is torch.int8"),
        "doubles": (sharded(Strategy(**TWO), lambda: models.make_net().double()), TypeError, "is torch.float64"),
        "traffic of what": (lambda: traffic(models.make_net()), ValueError, "no part of this Net"),
        "invalidate what": (lambda: invalidate(models.make_net()), ValueError, "no part of this Net"),
    }


def attempt(adapter: Adapter, name: str) -> Reply:
    """In a worker: how one call is refused."""
    return messages.attempt(refusals_of(adapter)[name])


@pytest.mark.parametrize("name", refusals_of(ADAPTERS[0]))
@over_adapters
def test_bad_input_is_refused_on_every_rank_before_anything_is_sent(
    pool: Callable[[int], Pool], adapter: Adapter, name: str
) -> None:
    assert_refused(pool(4).run(attempt, adapter, name), refusals_of(adapter)[name])


def leave_in_step(adapter: Adapter, dies: bool) -> str:
    """In a worker: the last rank dies, or stays away, between two steps of two nodes of two."""
    case = Case(steps=1, clip=None)
    model = adapter.make(case, Strategy.zeropp(**TWO), dist.new_group(timeout=timedelta(seconds=5)))
    train(adapter, model, case)
    if dist.get_rank() == dist.get_world_size() - 1:
        if dies:
            os._exit(1)
        return "stayed away"
    with pytest.raises(RuntimeError) as caught:
        train(adapter, model, case)
    return type(caught.value).__name__


@pytest.mark.skipif(device_type() == "cuda", reason="NCCL's watchdog ends the process instead of raising")
@over_adapters
def test_a_dead_rank_is_an_error_on_the_others(adapter: Adapter) -> None:
    pool = Pool(4)
    with pytest.raises(WorkerError, match=r"failed on ranks \[3\] of 4, first on rank 3:\nthe process died"):
        pool.run(leave_in_step, adapter, True)


@pytest.mark.skipif(device_type() == "cuda", reason="NCCL's watchdog ends the process instead of raising")
@over_adapters
def test_an_absent_rank_is_an_error_within_the_timeout(adapter: Adapter) -> None:
    pool = Pool(4)
    assert pool.run(leave_in_step, adapter, False) == ["RuntimeError"] * 3 + ["stayed away"]
    pool.stop(kill=True)
