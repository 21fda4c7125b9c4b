"""Staleness that only fully_shard can cause: by hand, in the backward, with a strategy on a part of a model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness import models
from harness.adapter import STOCK, Case
from harness.covering import SCOPES, over_each
from harness.fsdp2 import Fsdp2
from harness.pool import Pool
from harness.steps_in_backward import stepped
from harness.training import logits, train

from fsdp_zpp import Strategy, invalidate

HPZ = Strategy("IGG", gpus_per_node=2)


def manual_unshard() -> None:
    """In a worker: unshard() by hand, before and after the first forward, gathers the weights of the moment."""
    adapter = Fsdp2()
    model = adapter.make(Case(), HPZ)
    block = model.blocks[0]
    initial = {name: p.detach().clone() for name, p in models.make_net().blocks[0].named_parameters()}
    block.unshard()
    assert all(torch.equal(p, initial[name]) for name, p in block.named_parameters())
    block.reshard()
    train(adapter, model, Case(steps=2))
    expected = {name: p.full_tensor() for name, p in block.named_parameters()}
    block.unshard(async_op=True).wait()
    assert all(torch.equal(p, expected[name]) for name, p in block.named_parameters())
    assert not torch.equal(expected["up.weight"], initial["up.weight"])
    before = logits(model)
    model.blocks[1].unshard(async_op=True)  # of the weights of now, while the next forward needs the changed ones
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(2)
    invalidate(model)
    assert not torch.equal(logits(model), before)


def test_unshard_by_hand_gathers_the_weights_of_the_moment(pool: Callable[[int], Pool]) -> None:
    pool(4).run(manual_unshard)


def mixed_with_stock(optimizer: str) -> float:
    """In a worker: only the blocks have a strategy, and the root is torch's own."""
    adapter = Fsdp2()
    mixed = models.make_net()
    for block in mixed.blocks[:2]:
        adapter.apply(block, HPZ)
    adapter.shard(mixed, Case(wrap_blocks=False), STOCK)
    weights = []
    for model in (mixed, adapter.make(Case(), STOCK)):
        train(adapter, model, Case(steps=3), optimizer=models.PlainSgd(model) if optimizer == "plain" else None)
        weights.append(adapter.full_weights(model))
    return models.distance(*weights)


@pytest.mark.parametrize("optimizer", ["torch", "plain"])
def test_a_model_sharded_in_part_by_a_strategy_equals_stock(pool: Callable[[int], Pool], optimizer: str) -> None:
    assert max(pool(4).run(mixed_with_stock, optimizer)) <= 1e-6


@over_each(scopes=SCOPES, micro_batches=[1, 2])
def test_steps_in_hooks_of_the_backward_equal_stock(
    pool: Callable[[int], Pool], scopes: str, micro_batches: int
) -> None:
    ours = pool(4).run(stepped, Fsdp2(), Strategy(scopes, gpus_per_node=2), micro_batches)
    assert max(map(models.distance, ours, pool(4).run(stepped, Fsdp2(), STOCK, micro_batches))) <= 1e-6
