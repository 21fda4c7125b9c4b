"""Every way to change weights that an event announces is seen by the next forward; any other is an error."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.models import Case
from harness.pool import Pool
from harness.wiretap import wiretap
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy

from fsdp_zpp import Strategy, invalidate
from fsdp_zpp.weight_gather import StaleSecondaryError

HPZ = Strategy("IGG", gpus_per_node=2)


def steps_of(kind: str, strategy: Strategy | ShardingStrategy) -> dict[str, torch.Tensor]:
    """In a worker: the weights after a few steps of some unusual kind."""
    case = Case(steps=3)
    model = models.wrap(case, strategy)
    if kind == "not a torch optimizer":
        models.train(model, case, optimizer=models.PlainSgd(model))
    elif kind == "a torch optimizer, then another":
        models.train(model, case)
        models.train(model, case, optimizer=models.PlainSgd(model), first_step=3)
    elif kind == "weights change inside of a step":
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = models.loss_of(model, models.batch(0, 0, rank=0))
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
    elif kind == "optimizer of what this rank holds":
        held = [p for p in model.parameters() if p.numel()]
        models.train(model, replace(case, micro_batches=2, no_sync=False), optimizer=torch.optim.SGD(held, lr=0.1))
    elif kind == "two steps for one backward":
        models.train(model, case, after_step=lambda step, optimizer: optimizer.step())
    elif kind == "step after other forwards":
        optimizer = models.make_optimizer("sgd", model.parameters())
        for step in range(3):
            models.loss_of(model, models.batch(step, 0)).backward()
            models.loss_of(model, models.batch(step, 1))
            optimizer.step()
            optimizer.zero_grad()
    elif kind == "two optimizers":
        parameters = list(model.parameters())
        optimizers = [torch.optim.SGD(part, lr=0.1) for part in (parameters[:4], parameters[4:])]
        for step in range(3):
            models.loss_of(model, models.batch(step, 0)).backward()
            optimizers[step % 2].step()
            model.zero_grad()
    return models.full_weights(model)


def plain_step_after_other_forwards() -> dict[str, torch.Tensor]:
    """In a worker: the oracle for that kind. Stock FSDP is none: its root runs one forward with old weights."""
    net = models.make_net()
    optimizer = models.make_optimizer("sgd", net.parameters())
    for step in range(3):
        models.loss_of(net, models.batch(step, 0)).backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().cpu() for name, p in net.named_parameters()}


def distance_of(kind: str) -> float:
    """In a worker: the distance from stock."""
    if kind == "step after other forwards":
        return models.distance(steps_of(kind, HPZ), plain_step_after_other_forwards())
    return models.distance(steps_of(kind, HPZ), steps_of(kind, ShardingStrategy.FULL_SHARD))


@pytest.mark.parametrize(
    "kind",
    ["not a torch optimizer", "two steps for one backward", "step after other forwards", "two optimizers"],
)
def test_weights_are_never_stale(pool: Callable[[int], Pool], kind: str) -> None:
    assert max(pool(4).run(distance_of, kind)) <= 1e-6


def write_behind_its_back(announce: bool) -> str:
    """In a worker: change weights in place between forwards."""
    model = models.wrap(Case(), HPZ)
    tokens = models.batch(0, 0, rank=0)
    before = models.loss_of(model, tokens)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    if announce:
        invalidate(model)
    try:
        after = models.loss_of(model, tokens)
    except StaleSecondaryError as error:
        return str(error)
    return "used" if after.item() != before.item() else "ignored"


def test_unannounced_write_raises(pool: Callable[[int], Pool]) -> None:
    for message in pool(4).run(write_behind_its_back, False):
        assert "call fsdp_zpp.invalidate(model) on every rank" in message


def test_announced_write_is_used(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(write_behind_its_back, True) == ["used"] * 4


def edit_without_writeback(rank0_only: bool) -> None:
    """In a worker: edits of summoned parameters that are not written back are no change."""
    model = models.wrap(Case(), HPZ)
    tokens = models.batch(0, 0, rank=0)
    before = models.loss_of(model, tokens).item()
    with torch.no_grad(), FSDP.summon_full_params(model, writeback=False, rank0_only=rank0_only):
        if not rank0_only or dist.get_rank() == 0:
            model.blocks[0].up.weight.mul_(2)
    with wiretap(2) as tap:
        assert models.loss_of(model, tokens).item() == before
    assert tap.total("inter", "all_gather") == 0


@pytest.mark.parametrize("rank0_only", [True, False])
def test_edits_without_writeback_are_discarded(pool: Callable[[int], Pool], rank0_only: bool) -> None:
    pool(4).run(edit_without_writeback, rank0_only)


def two_models() -> None:
    """In a worker: a step of one model leaves the other's secondary shards as they are, and both train right."""
    case = Case(steps=2)
    first, second = models.wrap(case, HPZ), models.wrap(case, Strategy.zeropp(gpus_per_node=1))
    optimizers = [models.make_optimizer("sgd", model.parameters()) for model in (first, second)]
    for model, optimizer in zip((first, second), optimizers, strict=True):
        models.train(model, case, optimizer=optimizer)
    with torch.no_grad():
        models.loss_of(second, models.batch(9, 0))
    models.train(first, case, optimizer=optimizers[0], first_step=2)
    with torch.no_grad(), wiretap(1) as tap:
        models.loss_of(second, models.batch(9, 0))
    assert tap.total("inter") == 0
    alone = models.wrap(case, ShardingStrategy.FULL_SHARD)
    models.train(alone, Case(steps=4))
    assert models.distance(models.full_weights(first), models.full_weights(alone)) <= 1e-6


def test_two_models_in_one_process(pool: Callable[[int], Pool]) -> None:
    pool(4).run(two_models)


def leftovers() -> int:
    """In a worker: optimizer hooks that outlive their models."""
    from torch.optim import optimizer

    before = len(optimizer._global_optimizer_post_hooks)
    for _ in range(3):
        model = models.wrap(Case(), HPZ)
        models.loss_of(model, models.batch(0, 0)).backward()
        del model
        gc.collect()
    return len(optimizer._global_optimizer_post_hooks) - before


def test_models_leave_no_hooks_behind(pool: Callable[[int], Pool]) -> None:
    assert max(pool(2).run(leftovers)) <= 1  # the last model may still be alive
