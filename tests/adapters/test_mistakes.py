"""Scripts that train nothing, or send in every micro-batch what a step needs, are told so once; others are not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from harness import models
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, over_adapters_and_flat
from harness.fsdp1 import Fsdp1
from harness.messages import collected
from harness.pool import Pool
from harness.training import train
from torch import nn

from fsdp_zpp import Strategy

ZEROPP = Strategy.zeropp(gpus_per_node=2)
STEPS = 4

Train = Callable[[Adapter], None]


def _loss(model: nn.Module, step: int = 0) -> torch.Tensor:
    return models.loss_of(model, models.batch(step, 0))


def _early(adapter: Adapter) -> tuple[Any, torch.optim.Optimizer]:
    """A model and an optimizer that was made before it was sharded."""
    net = models.make_net()
    optimizer = models.make_optimizer("sgd", net.parameters())
    return adapter.shard(net, Case(), ZEROPP), optimizer


def optimizer_before_sharding(adapter: Adapter) -> None:
    model, optimizer = _early(adapter)
    for _ in range(STEPS):
        _loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def every_micro_batch_synchronized(adapter: Adapter) -> None:
    case = Case(steps=STEPS, micro_batches=2, synced=True)
    train(adapter, adapter.make(case, ZEROPP), case)


def every_micro_batch_synchronized_and_scaled(adapter: Adapter) -> None:
    case = Case(steps=STEPS, micro_batches=2, synced=True, scaler=True)
    train(adapter, adapter.make(case, ZEROPP), case)


MISTAKES: dict[Train, str] = {
    optimizer_before_sharding: "make the optimizer after it",
    every_micro_batch_synchronized: "each of 2 backwards before an optimizer step has synchronized gradients",
    every_micro_batch_synchronized_and_scaled: "each of 2 backwards before an optimizer step",
}


def accumulated(adapter: Adapter) -> None:
    case = Case(steps=STEPS, micro_batches=3)
    train(adapter, adapter.make(case, ZEROPP), case)


def recomputed(adapter: Adapter) -> None:
    for kind in ("inside no_reentrant", "outside reentrant"):
        case = Case(steps=STEPS, checkpointing=kind)
        train(adapter, adapter.make(case, ZEROPP), case)


def several_losses(adapter: Adapter) -> None:
    model = adapter.make(Case(), ZEROPP)
    optimizer = models.make_optimizer("sgd", model.parameters())
    for step in range(STEPS):
        logits = model(models.batch(step, 0)[:, :-1] % 61)
        logits.square().mean().backward(retain_graph=True)
        logits.abs().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def once(adapter: Adapter) -> None:
    model = adapter.make(Case(), ZEROPP)
    optimizer = models.make_optimizer("sgd", model.parameters())
    for step in range(STEPS):
        for _ in range(1 + step % 2):
            _loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def cleared_between(adapter: Adapter) -> None:
    model = adapter.make(Case(), ZEROPP)
    optimizer = models.make_optimizer("sgd", model.parameters())
    for step in range(STEPS):
        for clear in (optimizer.zero_grad, model.zero_grad):
            _loss(model, step).backward()
            clear()
        _loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def two_models(adapter: Adapter) -> None:
    pair = [adapter.make(Case(), ZEROPP) for _ in range(2)]
    optimizers = [models.make_optimizer("sgd", model.parameters()) for model in pair]
    for step in range(STEPS):
        (_loss(pair[0], step) + _loss(pair[1], step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def as_a_gan(adapter: Adapter) -> None:
    """The second model has two forwards and backwards before its step, and then one for the first model's."""
    first, second = (adapter.make(Case(), ZEROPP) for _ in range(2))
    optimizers = [models.make_optimizer("sgd", model.parameters()) for model in (first, second)]
    for step in range(STEPS):
        optimizers[1].zero_grad()
        for _ in range(2):
            _loss(second, step).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        (_loss(first, step) + _loss(second, step)).backward()
        optimizers[0].step()


def frozen_within_a_loss(adapter: Adapter) -> None:
    judge = adapter.wrap(nn.Linear(6, 6).to(models.device()).requires_grad_(False), ZEROPP)
    image = nn.Parameter(torch.ones(2, 6, device=models.device()))
    optimizer = torch.optim.SGD([image], lr=0.1)
    for _ in range(STEPS):
        judge(image * 2).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def an_optimizer_that_torch_does_not_know(adapter: Adapter) -> None:
    model = adapter.make(Case(), ZEROPP)
    optimizer = models.PlainSgd(model)
    for step in range(STEPS):
        _loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


RIGHT: list[Train] = [
    accumulated,
    recomputed,
    several_losses,
    once,
    cleared_between,
    two_models,
    as_a_gan,
    frozen_within_a_loss,
    an_optimizer_that_torch_does_not_know,
]


def warned(adapter: Adapter, training: Train) -> list[str]:
    """In a worker: the warnings of a training."""
    with collected() as records:
        training(adapter)
    return [message for level, message in records if level == "WARNING"]


@pytest.mark.parametrize("training", MISTAKES, ids=lambda training: training.__name__)
@over_adapters_and_flat
def test_a_mistake_is_told_once_by_the_first_rank(
    pool: Callable[[int], Pool], adapter: Adapter, training: Train
) -> None:
    first, *others = pool(4).run(warned, adapter, training)
    assert others == [[]] * 3
    # Original parameters are those that an optimizer was given, before sharding, too.
    if training is optimizer_before_sharding and adapter == Fsdp1():
        assert first == []
        return
    [message] = first
    assert MISTAKES[training] in message


@pytest.mark.parametrize(
    ("adapter", "training"),
    # torch can't run a backward of FSDP1's twice, with its own strategies either
    [case for case in product(ADAPTERS, RIGHT) if case != (Fsdp1(), several_losses)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_is_right_is_not_warned_of(pool: Callable[[int], Pool], adapter: Adapter, training: Train) -> None:
    assert pool(4).run(warned, adapter, training) == [[]] * 4
