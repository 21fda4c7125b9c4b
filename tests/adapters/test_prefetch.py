"""All stale secondary shards are prefetched from the first unit on, once a change, and only where that helps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import models
from harness.adapter import Adapter, Case
from harness.covering import over_adapters, over_adapters_and_flat
from harness.fsdp1 import Fsdp1
from harness.fsdp2 import Fsdp2
from harness.pool import Pool
from harness.training import logits, train
from harness.wiretap import wiretap

from fsdp_zpp import Strategy, invalidate
from fsdp_zpp.codecs.delta import Int4Delta
from fsdp_zpp.collectives.secondary_shard import StaleSecondaryError

UNITS = 4  # the root and three blocks
INTER, INTRA = ("all_gather", "inter"), ("all_gather", "intra")
KEPT = {
    "IGG": Strategy("IGG", gpus_per_node=2),
    "IGG int8": Strategy.zeropp(gpus_per_node=2),
    "NGG int8": Strategy.zeropp(levels="NGG", gpus_per_node=2),
    "IGG delta": Strategy.zeropp(weights=Int4Delta(), gpus_per_node=2),
}
NOT_KEPT = {"GGG": Strategy("GGG", gpus_per_node=2), "GGG int8": Strategy.zeropp(levels="GGG", gpus_per_node=2)}


def order_of_forward(adapter: Adapter, strategy: Strategy) -> list[tuple[str, str]]:
    """In a worker: the collectives of the first forward after a step."""
    model = adapter.make(Case(), strategy)
    train(adapter, model, Case(steps=1, clip=None))
    with torch.no_grad(), wiretap(2) as tap:
        models.loss_of(model, models.batch(2, 0))
    return tap.order


@pytest.mark.parametrize("strategy", KEPT.values(), ids=KEPT)
@over_adapters_and_flat
def test_all_secondary_shards_are_sent_before_the_first_unit_computes(
    pool: Callable[[int], Pool], adapter: Adapter, strategy: Strategy
) -> None:
    for order in pool(4).run(order_of_forward, adapter, strategy):
        assert order == [INTER] + [INTRA] * UNITS  # units as small as these go as one


@pytest.mark.parametrize("strategy", NOT_KEPT.values(), ids=NOT_KEPT)
@over_adapters
def test_weights_without_a_secondary_shard_are_not_prefetched(
    pool: Callable[[int], Pool], adapter: Adapter, strategy: Strategy
) -> None:
    for order in pool(4).run(order_of_forward, adapter, strategy):
        assert order.count(INTER) == order.count(INTRA) == UNITS
        assert order[:2] == [INTER, INTRA]


def written_after_a_step(adapter: Adapter, strategy: Strategy, tell: bool) -> Any:
    """In a worker: what a forward computes after weights were written to between a step and it."""
    model = adapter.make(Case(), strategy)
    train(adapter, model, Case(steps=1, clip=None))
    for parameter in model.parameters():
        adapter.local(parameter).data.mul_(0.5)
    if tell:
        invalidate(model)
    return logits(model)


# Not with differences: what is told is sent whole, what is not as a change.
@pytest.mark.parametrize("name", ["IGG", "IGG int8", "NGG int8"])
@over_adapters_and_flat
def test_the_next_forward_computes_with_what_was_written_after_a_step(
    pool: Callable[[int], Pool], adapter: Adapter, name: str
) -> None:
    told, untold = (pool(4).run(written_after_a_step, adapter, KEPT[name], tell) for tell in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(told, untold, strict=True))


def skipped_later(adapter: Adapter) -> list[int]:
    """In a worker: bytes of the inter-node hops of each step, of which some leave out a block."""
    model = adapter.make(Case(), KEPT["IGG int8"])
    inner = next(module for module in model.modules() if isinstance(module, models.Net))
    counts = []
    for skipped in (None, 1, 1, None, None):
        inner.skipped = skipped
        with wiretap(2) as tap:
            train(adapter, model, Case(steps=1, clip=None))
        counts.append(tap.total("inter", "all_gather"))
    return counts


@over_adapters
def test_a_unit_that_a_forward_leaves_out_is_gathered_when_used_again(
    pool: Callable[[int], Pool], adapter: Adapter
) -> None:
    for all_units, in_vain, without, again, at_last in pool(4).run(skipped_later, adapter):
        assert all_units == in_vain == again == at_last > without


def replaced_after_a_step(strategy: Strategy, tell: bool) -> Any:
    """In a worker: what a forward computes after parameters got other storage, and a second one."""
    model = Fsdp1().make(Case(), strategy)
    train(Fsdp1(), model, Case(steps=1, clip=None))
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5
    if tell:
        invalidate(model)
    return logits(model), logits(model)


@pytest.mark.parametrize("name", ["IGG", "IGG int8", "NGG int8"])
def test_the_next_forward_computes_with_what_parameters_were_replaced_by(
    pool: Callable[[int], Pool], name: str
) -> None:
    expected = pool(4).run(written_after_a_step, Fsdp1(), KEPT[name], True)
    for tell in (True, False):
        for (first, second), written in zip(
            pool(4).run(replaced_after_a_step, KEPT[name], tell), expected, strict=True
        ):
            assert torch.equal(first, written)
            assert torch.equal(second, written)


def written_in_a_forward(adapter: Adapter, tell: bool) -> str:
    """In a worker: what comes of a write to a block that a forward has begun to send."""
    model = adapter.make(Case(), KEPT["IGG int8"])
    train(adapter, model, Case(steps=1, clip=None))
    inner = next(module for module in model.modules() if isinstance(module, models.Net))
    last = list(inner.blocks[2].parameters())

    def write(*unused: Any) -> None:
        for parameter in last:
            parameter.detach().mul_(0.5)
        if tell:
            invalidate(model)

    inner.blocks[0].register_forward_hook(write)
    try:
        models.loss_of(model, models.batch(2, 0))
    except StaleSecondaryError as error:
        return str(error)
    return "no error"


@over_adapters
def test_a_write_in_a_forward_must_be_announced(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    assert pool(4).run(written_in_a_forward, adapter, True) == ["no error"] * 4
    assert all("in a forward" in message for message in pool(4).run(written_in_a_forward, adapter, False))


def stepping_in_the_backward() -> list[int]:
    """In a worker: bytes of the weights between nodes, of steps whose optimizers step in the backward."""
    adapter = Fsdp2()
    model = adapter.make(Case(), KEPT["IGG int8"])
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.01)
        parameter.register_post_accumulate_grad_hook(lambda _, step=optimizer.step: step())
    sent = []
    for step in range(3):
        with wiretap(2) as tap:
            models.loss_of(model, models.batch(step, 0)).backward()
            for parameter in model.parameters():
                parameter.grad = None
        sent.append(tap.total("inter", "all_gather"))
    return sent


def test_nothing_is_prefetched_in_a_backward(pool: Callable[[int], Pool]) -> None:
    for sent in pool(4).run(stepping_in_the_backward):
        assert len(set(sent)) == 1


def losses_around_gathers(strategy: Strategy) -> tuple[float, float]:
    """In a worker: the loss after a step before which FSDP had prefetched a block in vain, and with a fresh gather."""
    model = Fsdp1(arguments=(("forward_prefetch", True),)).make(Case(), strategy)
    net = next(module for module in model.modules() if isinstance(module, models.Net))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logits(model)
    models.loss_of(model, models.batch(0, 0)).backward()
    net.skipped = 2
    logits(model)
    net.skipped = None
    optimizer.step()
    with torch.no_grad():
        found = models.loss_of(model, models.batch(1, 0)).item()
        invalidate(model)
        return found, models.loss_of(model, models.batch(1, 0)).item()


# Not deltas, whose rounding depends on what was sent before.
WITHOUT_DELTAS = {name: strategy for name, strategy in (KEPT | NOT_KEPT).items() if name != "IGG delta"}


@pytest.mark.parametrize("strategy", WITHOUT_DELTAS.values(), ids=WITHOUT_DELTAS)
def test_a_step_makes_stale_what_fsdp1_has_prefetched_in_vain(pool: Callable[[int], Pool], strategy: Strategy) -> None:
    for found, fresh in pool(4).run(losses_around_gathers, strategy):
        assert found == fresh
