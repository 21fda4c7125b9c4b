"""Scripts that train nothing, or send more than they need, are told so once, by the first rank; others are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from harness import models
from harness.adapter import Adapter, Case, Fsdp1
from harness.covering import over_adapters, over_adapters_and_flat
from harness.messages import collected
from harness.pool import Pools
from harness.training import train
from torch import nn

from fsdp_zpp import Strategy

ONE: dict[str, Any] = {"gpus_per_node": 1}
ZEROPP = Strategy.zeropp(**ONE)
STEPS = 4

Train = Callable[[Adapter], object]


def loss_of(model: nn.Module, step: int = 0) -> torch.Tensor:
    return models.loss_of(model, models.batch(step, 0))


def make(adapter: Adapter) -> tuple[Any, torch.optim.Optimizer]:
    model = adapter.make(Case(), ZEROPP)
    return model, models.make_optimizer("sgd", model.parameters())


def steps_of(optimizer: Any, work: Callable[[int], object]) -> None:
    for step in range(STEPS):
        work(step)
        optimizer.step()
        optimizer.zero_grad()


def trained(case: Case) -> Train:
    return lambda adapter: train(adapter, adapter.make(case, ZEROPP), case)


def optimizer_before_sharding(adapter: Adapter) -> None:
    net = models.make_net()
    optimizer = models.make_optimizer("sgd", net.parameters())
    model = adapter.shard(net, Case(), ZEROPP)
    steps_of(optimizer, lambda step: loss_of(model).backward())


def overridden(adapter: Adapter) -> None:
    overrides = {"Block": Strategy("GGG"), "*block": Strategy("IGG")}
    model = adapter.make(Case(), Strategy.zeropp(overrides=overrides, **ONE))
    loss_of(model).backward()


MISTAKES: dict[str, tuple[Train, str]] = {
    "optimizer before sharding": (optimizer_before_sharding, "make the optimizer after it"),
    "every micro-batch synchronized": (
        trained(Case(steps=STEPS, micro_batches=2, synced=True)),
        "each of 2 backwards before an optimizer step has synchronized gradients",
    ),
    "every micro-batch synchronized and scaled": (
        trained(Case(steps=STEPS, micro_batches=2, synced=True, scaler=True)),
        "each of 2 backwards before an optimizer step has synchronized gradients",
    ),
    "pattern that matches nothing": (
        overridden,
        "Net: overrides for '*block' apply to no module: no class has such a name; did you mean Block?",
    ),
}


def recomputed(adapter: Adapter) -> None:
    for kind in ("inside no_reentrant", "outside reentrant"):
        trained(Case(steps=STEPS, checkpointing=kind))(adapter)


def once(adapter: Adapter) -> None:
    model, optimizer = make(adapter)
    steps_of(optimizer, lambda step: [loss_of(model, step).backward() for _ in range(1 + step % 2)])


def cleared_between(adapter: Adapter) -> None:
    model, optimizer = make(adapter)

    def work(step: int) -> None:
        for clear in (optimizer.zero_grad, model.zero_grad):
            loss_of(model, step).backward()
            clear()
        loss_of(model, step).backward()

    steps_of(optimizer, work)


def as_a_gan(adapter: Adapter) -> None:
    """The second model has two forwards and backwards before its step, and then one for the first model's."""
    (first, optimizer), (second, other) = make(adapter), make(adapter)
    for step in range(STEPS):
        other.zero_grad()
        for _ in range(2):
            loss_of(second, step).backward()
        other.step()
        optimizer.zero_grad()
        (loss_of(first, step) + loss_of(second, step)).backward()
        optimizer.step()


def frozen_within_a_loss(adapter: Adapter) -> None:
    judge = adapter.wrap(nn.Linear(6, 6).to(models.device()).requires_grad_(False), ZEROPP)
    image = nn.Parameter(torch.ones(2, 6, device=models.device()))
    steps_of(torch.optim.SGD([image], lr=0.1), lambda step: judge(image * 2).square().mean().backward())


RIGHT: dict[str, Train] = {
    "accumulated": trained(Case(steps=STEPS, micro_batches=3)),
    "recomputed": recomputed,
    "once": once,
    "cleared between": cleared_between,
    "as a GAN": as_a_gan,
    "frozen within a loss": frozen_within_a_loss,
}


def told(adapter: Adapter, names: Sequence[str]) -> dict[str, list[str]]:
    """In a worker: what each training is told, beside what is active."""
    found = {}
    for name in names:
        training = RIGHT[name] if name in RIGHT else MISTAKES[name][0]
        with collected() as records:
            training(adapter)
        found[name] = [text for level, text in records if level == "WARNING"]
    return found


@pytest.mark.parametrize("name", MISTAKES)
@over_adapters_and_flat
def test_a_mistake_is_told_once_by_the_first_rank(pool: Pools, adapter: Adapter, name: str) -> None:
    first, other = (of_rank[name] for of_rank in pool(2).once(told, adapter, list(MISTAKES)))
    assert other == []
    # Original parameters are those that an optimizer was given, before sharding, too.
    if name == "optimizer before sharding" and adapter == Fsdp1():
        assert first == []
        return
    [message] = first
    assert MISTAKES[name][1] in message


@over_adapters
def test_what_is_right_is_not_warned_of(pool: Pools, adapter: Adapter) -> None:
    assert pool(2).run(told, adapter, list(RIGHT)) == [{name: [] for name in RIGHT}] * 2
