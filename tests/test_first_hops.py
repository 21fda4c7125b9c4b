"""First hops ahead: all of a model's from the first unit on, once a change, and not where they are of no use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Adapter, Case
from harness.adapters import over_adapters, over_adapters_and_flat
from harness.fsdp1 import Fsdp1
from harness.fsdp2 import Fsdp2
from harness.pool import Pool
from harness.training import logits, train
from harness.wiretap import wiretap

from fsdp_zpp import Int8, Strategy, invalidate
from fsdp_zpp.first_hops import FirstHopsAhead
from fsdp_zpp.hop import Traffic
from fsdp_zpp.topology import process_mesh
from fsdp_zpp.weight_difference import Int4Delta
from fsdp_zpp.weight_gather import StaleSecondaryError, WeightGather

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
def test_the_slow_network_does_not_wait_for_the_forward(
    pool: Callable[[int], Pool], adapter: Adapter, strategy: Strategy
) -> None:
    for order in pool(4).run(order_of_forward, adapter, strategy):
        assert order == [INTER] + [INTRA] * UNITS  # units as small as these go as one


@pytest.mark.parametrize("strategy", NOT_KEPT.values(), ids=NOT_KEPT)
@over_adapters
def test_what_is_not_kept_is_not_gathered_ahead(
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
def test_what_is_written_after_a_step_is_in_the_next_forward(
    pool: Callable[[int], Pool], adapter: Adapter, name: str
) -> None:
    told, untold = (pool(4).run(written_after_a_step, adapter, KEPT[name], tell) for tell in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(told, untold, strict=True))


class Given:
    """A shard that is there.

    Args:
        shard: The shard.
    """

    def __init__(self, shard: torch.Tensor) -> None:
        self._shard = shard

    def write_back(self) -> None:
        """Nothing replaces it."""

    def shard_ahead(self) -> tuple[torch.Tensor, None]:
        """The shard, in no version."""
        return self._shard, None


def some_unused(device_shards: int, together: int) -> list[int]:
    """In a worker: the first hops of forwards that leave out the last of three units."""
    gathers = [WeightGather(process_mesh(dist.group.WORLD, 2), Int8(), True, Traffic()) for _ in range(3)]
    shards = [torch.full((device_shards,), float(dist.get_rank()), device=models.device()) for _ in gathers]
    members = ((gather, Given(shard)) for gather, shard in zip(gathers, shards, strict=True))
    ahead = FirstHopsAhead(members, together)
    assert all(gather.first_hops is ahead for gather in gathers)
    counts = []
    for _ in range(3):
        with wiretap(2) as tap:
            for gather, shard in zip(gathers[:2], shards, strict=False):
                out = torch.empty(4 * device_shards, device=models.device())
                gather(shard, out)
                expected = torch.arange(4.0, device=models.device()).repeat_interleave(device_shards)
                torch.testing.assert_close(out, expected, rtol=0.5 / 127, atol=0)  # half a step
        counts.append(tap.order.count(INTER))
        for gather in gathers:
            gather.invalidate()
    return counts


def test_a_unit_that_is_not_used_is_gathered_in_vain_once(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(some_unused, 64, 0) == [[3, 2, 2]] * 4


def test_small_neighbours_go_as_one(pool: Callable[[int], Pool]) -> None:
    nbytes = Int8().nbytes(64)
    assert pool(4).run(some_unused, 64, 2 * nbytes - 1) == [[3, 2, 2]] * 4
    assert pool(4).run(some_unused, 64, 2 * nbytes) == [[2, 1, 1]] * 4
    assert pool(4).run(some_unused, 64, 3 * nbytes) == [[1, 1, 1]] * 4


def skipped_later(adapter: Adapter) -> list[int]:
    """In a worker: bytes of the first hops of each step, of which some leave out a block."""
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
def test_a_unit_that_is_left_out_once_is_gathered_when_used(pool: Callable[[int], Pool], adapter: Adapter) -> None:
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
def test_what_parameters_were_replaced_by_is_in_the_next_forward(pool: Callable[[int], Pool], name: str) -> None:
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
def test_a_write_in_a_forward_is_to_be_told(pool: Callable[[int], Pool], adapter: Adapter) -> None:
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


def test_nothing_is_sent_ahead_in_a_backward(pool: Callable[[int], Pool]) -> None:
    for sent in pool(4).run(stepping_in_the_backward):
        assert len(set(sent)) == 1
