"""load_state_dict(assign=True): a model computes with, and hears of, the parameters that it was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import models
from harness.adapter import STOCK, Case
from harness.covering import SCOPES
from harness.fsdp2 import Fsdp2
from harness.pool import Pool
from harness.training import logits, train
from harness.wiretap import sent_in
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fsdp_zpp import Int4Delta, Strategy


def reshard(model: Any) -> None:
    """Have a model show its sharded parameters: a forward leaves some unsharded, its root at least."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def assign(model: Any, source: Any) -> None:
    """Give ``model`` the parameters of another one's state dict."""
    reshard(model)
    model.load_state_dict({name: value.clone() for name, value in source.state_dict().items()}, assign=True)


def trained_after_assignment(strategy: Strategy | None, dropped: bool) -> dict[str, Tensor]:
    """In a worker: weights after steps with assigned parameters, and logits after one that no backward announces.

    Args:
        strategy: How the model is sharded.
        dropped: Whether there are gradients before each step that ``zero_grad`` drops.
    """
    adapter = Fsdp2()
    model, source = adapter.make(Case(), strategy), adapter.make(Case(), strategy)
    train(adapter, model, Case(steps=1))
    train(adapter, source, Case(steps=1), first_step=9)
    assign(model, source)
    optimizer = models.make_optimizer("sgd", model.parameters())
    for step in range(2):
        if dropped:
            with adapter.micro_batch(model, False, False):
                (1000 * models.loss_of(model, models.batch(step, 5))).backward()
            optimizer.zero_grad()
        train(adapter, model, Case(steps=1, micro_batches=2, clip=None), optimizer=optimizer, first_step=step)
    logits(model)
    reshard(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return {"logits": logits(model), **adapter.full_weights(model)}


@pytest.mark.parametrize("scopes", SCOPES)
def test_training_assigned_parameters_equals_stock(pool: Callable[[int], Pool], scopes: str) -> None:
    """FullyShardedDataParallel, stock too, ignores what is assigned; fully_shard's own zero_grad drops nothing."""
    ours = pool(4).run(trained_after_assignment, Strategy(scopes, gpus_per_node=2), True)
    stock = pool(4).run(trained_after_assignment, STOCK, False)
    assert max(map(models.distance, ours, stock)) <= 1e-6


def sent_after_a_step(assigned: bool) -> list[int]:
    """In a worker: bytes of weights between nodes in a forward, and in one after a step of the parameters of now."""
    adapter = Fsdp2()
    strategy = Strategy.zeropp(weights=Int4Delta(), gpus_per_node=2)
    model = adapter.make(Case(), strategy)
    logits(model)
    if assigned:
        assign(model, adapter.make(Case(), strategy))
        logits(model)
    sent = []
    for step in (lambda: None, torch.optim.SGD(model.parameters(), lr=0.1).step):
        reshard(model)
        step()
        _, counted = sent_in(lambda: logits(model), model, 2)
        sent.append(counted["gather"]["inter"])
    return sent


def test_a_step_of_assigned_parameters_makes_secondary_shards_stale(pool: Callable[[int], Pool]) -> None:
    """And, as after a step of any parameters, changes alone are sent."""
    expected = pool(4).run(sent_after_a_step, False)
    assert pool(4).run(sent_after_a_step, True) == expected
    for fresh, stale in expected:
        assert fresh == 0 < stale
