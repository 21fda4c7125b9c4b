"""Full-precision weights come back everywhere: summon_full_params, state dicts, optimizer state; and go in again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import models
from harness.models import Case
from harness.pool import Pool
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullyShardedDataParallel as FSDP,
    ShardingStrategy,
    StateDictType,
)

from fsdp_zpp import Strategy

ZEROPP = Strategy.zeropp(gpus_per_node=2)
TYPES = [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT]


def logits(model: FSDP) -> torch.Tensor:
    """Logits of one batch that is the same on every rank."""
    model.eval()
    with torch.no_grad():
        out = model(models.batch(99, 0, rank=0)[:, :-1] % 61)
    model.train()
    return out.float().cpu()


def summon_at_every_moment(case: Case) -> None:
    """In a worker: what is summoned are the true weights, whatever FSDP keeps unsharded at the time."""
    model = models.wrap(case, ZEROPP)
    truth = {name: p.detach().cpu().clone() for name, p in models.make_net().named_parameters()}
    moments: dict[str, Any] = {"before any forward": models.full_weights(model)}
    loss = models.loss_of(model, models.batch(0, 0))
    moments["between forward and backward"] = models.full_weights(model)
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    logits(model)
    moments["after a forward without backward"] = models.full_weights(model)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        moments["state dict"] = model.state_dict()
    for moment, weights in moments.items():
        for name, expected in truth.items():
            assert torch.equal(weights[name].float().cpu(), expected), f"{name} {moment}"
    model.zero_grad()
    models.loss_of(model, models.batch(0, 0)).backward()
    for undisturbed, summoned in zip(
        [p.grad for p in model.parameters() if p.grad is not None], gradients, strict=True
    ):
        assert torch.equal(undisturbed, summoned)


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
def test_summon_gives_full_precision(pool: Callable[[int], Pool], use_orig_params: bool) -> None:
    pool(4).run(summon_at_every_moment, Case(fsdp=(("use_orig_params", use_orig_params),)))


def writeback(case: Case, strategy: Strategy) -> None:
    """In a worker: what is written in summon_full_params is what the next forward computes with."""
    used, fresh = models.wrap(case, strategy), models.wrap(case, strategy)
    stock = models.wrap(case, ShardingStrategy.FULL_SHARD)
    before = logits(used)  # so that there is a secondary shard to become stale
    for model in (used, fresh, stock):
        with torch.no_grad(), FSDP.summon_full_params(model):
            model.head.weight.mul_(3)
            model.blocks[1].up.bias.fill_(0.5)
    assert models.distance(models.full_weights(used), models.full_weights(stock)) == 0
    after = logits(used)
    assert torch.equal(after, logits(fresh))
    assert not torch.equal(after, before)
    if strategy.weights is None:
        assert torch.equal(after, logits(stock))


@pytest.mark.parametrize("strategy", [Strategy("IGG", gpus_per_node=2), ZEROPP], ids=["hpZ", "zeropp"])
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
def test_writeback(pool: Callable[[int], Pool], strategy: Strategy, use_orig_params: bool) -> None:
    pool(4).run(writeback, Case(fsdp=(("use_orig_params", use_orig_params),)), strategy)


def save_and_load(case: Case, kind: StateDictType, source: Any, target: Any) -> None:
    """In a worker: a trained model's state dict, loaded into another model that has trained already."""
    first = models.wrap(case, source)
    models.train(first, case)
    second = models.wrap(case, target)
    models.train(second, case, first_step=50)
    with FSDP.state_dict_type(first, kind), FSDP.state_dict_type(second, kind):
        second.load_state_dict(first.state_dict())
    assert models.distance(models.full_weights(second), models.full_weights(first)) == 0
    if source == target:
        assert torch.equal(logits(first), logits(second))


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("source", "target"),
    [(ZEROPP, ZEROPP), (ZEROPP, ShardingStrategy.FULL_SHARD), (ShardingStrategy.FULL_SHARD, ZEROPP)],
    ids=["ours to ours", "ours to stock", "stock to ours"],
)
def test_state_dicts(
    pool: Callable[[int], Pool], kind: StateDictType, source: Any, target: Any, use_orig_params: bool
) -> None:
    if kind is StateDictType.LOCAL_STATE_DICT and use_orig_params:
        pytest.skip("torch can't load a local state dict with use_orig_params=True, with its own strategies either")
    pool(4).run(save_and_load, Case(steps=2, fsdp=(("use_orig_params", use_orig_params),)), kind, source, target)


def resume(case: Case, kind: StateDictType) -> None:
    """In a worker: training resumed from model and optimizer state equals the uninterrupted run, bit for bit."""
    full = kind is StateDictType.FULL_STATE_DICT
    everywhere = (kind, None, FullOptimStateDictConfig(rank0_only=False, offload_to_cpu=False)) if full else (kind,)
    straight = models.wrap(case, ZEROPP)
    optimizer = models.make_optimizer(case.optimizer, straight.parameters())
    models.train(straight, case, optimizer=optimizer)
    with FSDP.state_dict_type(straight, *everywhere):
        model_state = {name: value.clone() for name, value in straight.state_dict().items()}
        optimizer_state = FSDP.optim_state_dict(straight, optimizer)
    expected = models.train(straight, case, optimizer=optimizer, first_step=case.steps)

    resumed = models.wrap(case, ZEROPP)
    fresh = models.make_optimizer(case.optimizer, resumed.parameters())
    with FSDP.state_dict_type(resumed, *everywhere):
        resumed.load_state_dict(model_state)
        fresh.load_state_dict(FSDP.optim_state_dict_to_load(resumed, fresh, optimizer_state))
    assert models.train(resumed, case, optimizer=fresh, first_step=case.steps) == expected
    assert models.distance(models.full_weights(resumed), models.full_weights(straight)) == 0


@pytest.mark.parametrize("kind", TYPES[:2], ids=lambda kind: kind.name)
def test_resume_is_exact(pool: Callable[[int], Pool], kind: StateDictType) -> None:
    pool(4).run(resume, Case(optimizer="adamw", steps=3), kind)
