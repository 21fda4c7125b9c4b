"""What nodes that train on their own send each other, and in which steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import STOCK, Adapter, Case
from harness.covering import ADAPTERS, over_adapters, over_pairs
from harness.pool import Pool, device_type
from harness.training import scaled_steps, train
from harness.wiretap import sent_in
from local_nodes import LAYOUTS, sgd, strategy_of, this_node
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from fsdp_zpp import Int4, Int8, Strategy, exchange_weights


def bytes_between_nodes(adapter: Adapter, strategy: Strategy | None, gpus_per_node: int, steps: int) -> list[int]:
    """In a worker: what is sent between nodes in each step, with accumulation and clipping."""
    case = Case(steps=1, micro_batches=2, clip=0.5)
    model = adapter.make(case, strategy)
    optimizer = models.make_optimizer("adamw", model.parameters())
    sent = []
    for step in range(steps):
        one_step = partial(train, adapter, model, case, optimizer=optimizer, first_step=step)
        tap, counted = sent_in(one_step, model, gpus_per_node, counts=strategy is not STOCK)
        sent.append(tap.total("inter"))
        assert strategy is STOCK or counted["gather"]["inter"] + counted["reduce"]["inter"] == sent[-1]
    return sent


@over_pairs(adapter=ADAPTERS, layout=LAYOUTS, codec=[None, Int8(32), Int4(32)])
def test_between_exchanges_nothing_goes_between_nodes(
    pool: Callable[[int], Pool], adapter: Adapter, layout: tuple[str, int], codec: Int4 | Int8 | None
) -> None:
    levels, gpus = layout
    strategy = strategy_of(levels, gpus, every=3, spread=False, codec=codec)
    for sent in pool(4).run(bytes_between_nodes, adapter, strategy, gpus, 8):
        exchange = sent[3]  # before the fourth step
        assert sent == [0, 0, 0, exchange, 0, 0, exchange, 0]
        numel, nodes = sum(p.numel() for p in models.make_net().parameters()), 4 // gpus
        # Each rank sends the other nodes its part of the change, and its chunk of the updates to each of them.
        values = numel / gpus * (nodes - 1) / nodes * 2
        width = 4.0 if codec is None else codec.nbytes(2**20) / 2**20
        assert exchange == pytest.approx(values * width, rel=0.25)  # which odd shapes pad
        assert exchange >= values * width * 0.99


@over_adapters
def test_fragments_share_the_link_between_steps(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for sent in pool(4).run(bytes_between_nodes, adapter, strategy_of("III", 2, every=4), 2, 10):
        assert sent[0] == 0
        assert all(sent[1:])  # of four units, one after each step
        assert sent[1:5] == sent[5:9]


@over_adapters
def test_at_every_64_steps_a_step_sends_half_a_percent(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    every = 64
    ours = pool(4).run(bytes_between_nodes, adapter, strategy_of("III", 2, every=every), 2, every + 1)
    full_shard = pool(4).run(bytes_between_nodes, adapter, Strategy("GGG", gpus_per_node=2), 2, 2)
    in_bf16 = 0.5 * full_shard[0][1] / 2  # of an fp32 training with two micro-batches, gathers of the second included
    for sent in ours:
        print(sum(sent) / every, in_bf16)
        assert sum(sent) / every <= 0.005 * in_bf16


def steps_with_a_skip(adapter: Adapter) -> list[int]:
    """In a worker: bytes between nodes of each step, of which rank 0's node skips one."""
    model = adapter.make(Case(), strategy_of("III", 2, every=2, spread=False))
    optimizer, sent = sgd(model), []
    with this_node(2) as node:
        scaler = ShardedGradScaler(device=device_type(), init_scale=2.0**10, process_group=node)
        for step in (0, 1, -1, 3, 4, 5):
            tap, _ = sent_in(partial(scaled_steps, model, optimizer, scaler, [step]), model, 2)
            sent.append(tap.total("inter"))
        assert (scaler.get_scale() < 2.0**10) == (dist.get_rank() < 2)
    exchange_weights(model)
    return sent


@over_adapters
def test_a_step_that_a_scaler_skips_on_one_node_counts_on_all(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for sent in pool(4).run(steps_with_a_skip, adapter):
        assert [n > 0 for n in sent] == [False, False, True, False, True, False]


def sent_by_several_optimizers(adapter: Adapter, kind: str) -> list[int]:
    """In a worker: bytes between nodes of each step."""
    model = adapter.make(Case(), strategy_of("III", 2, every=2, spread=False))
    if kind == "plain":
        optimizers: list[Any] = [models.PlainSgd(model)]
    else:
        parameters = list(model.parameters())
        optimizers = [torch.optim.SGD(half, lr=0.1) for half in (parameters[::2], parameters[1::2])]
    sent = []

    def one_step(step: int) -> None:
        models.loss_of(model, models.batch(step, 0)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    for step in range(5):
        tap, _ = sent_in(partial(one_step, step), model, 2)
        sent.append(tap.total("inter"))
    exchange_weights(model)
    return sent


@over_pairs(adapter=ADAPTERS, kind=["several", "plain"])
def test_steps_of_several_optimizers_and_of_unknown_ones_count_once(
    pool: Callable[[int], Pool], adapter: Adapter, kind: str
) -> None:
    for sent in pool(4).run(sent_by_several_optimizers, adapter, kind):
        assert [n > 0 for n in sent] == [False, False, True, False, True]


def evaluated_between(adapter: Adapter) -> list[int]:
    """In a worker: bytes between nodes of evaluations, after steps of which an exchange is due."""
    model = adapter.make(Case(), strategy_of("III", 2, every=1))
    train(adapter, model, Case(steps=1))

    def evaluate() -> None:
        with torch.no_grad():
            models.loss_of(model, models.batch(9, 0))

    tap, _ = sent_in(evaluate, model, 2)
    return [tap.total("inter")]


@over_adapters
def test_an_evaluation_exchanges_nothing(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    assert pool(4).run(evaluated_between, adapter) == [[0]] * 4


def frozen_traffic(adapter: Adapter) -> tuple[int, int]:
    """In a worker: bytes of an exchange of a net of which a block is frozen, and of one that is not."""
    found = []
    for frozen in (True, False):
        model = adapter.make(Case(frozen=frozen), strategy_of("III", 2, every=1, codec=None))
        train(adapter, model, Case(steps=1, clip=None))
        tap, _ = sent_in(lambda: exchange_weights(model), model, 2)  # noqa: B023
        found.append(tap.total("inter"))
    return found[0], found[1]


@over_adapters
def test_frozen_weights_are_not_exchanged(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    block = sum(p.numel() for p in models.make_net().blocks[0].parameters())
    for frozen, trained in pool(4).run(frozen_traffic, adapter):
        assert trained - frozen >= block / 2 * 4  # half of it is sent to the other node, and its half of the updates
