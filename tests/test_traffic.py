"""Bytes on the wire, counted on the collectives themselves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from harness import models
from harness.bytes_on_the_wire import LARGE, STRATEGIES, Sent, assert_counted, sent_in, taps_of_phases
from harness.models import Case
from harness.pool import Pool
from harness.wiretap import Wiretap
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from fsdp_zpp import Int4, QuantizedReduceState, Strategy, quantized_reduce_hook

BF16 = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
CASE = Case(model=LARGE, fsdp=(("use_orig_params", True), ("mixed_precision", BF16)), steps=1, clip=None)


def bytes_sent(case: Case, strategy: Strategy | ShardingStrategy, gpus_per_node: int) -> Sent:
    """In a worker: what one warm step sends, by the wiretap and by traffic()."""
    model = models.wrap(case, strategy)
    optimizer = models.make_optimizer("sgd", model.parameters())
    models.train(model, case, optimizer=optimizer)
    step = partial(models.train, model, case, optimizer=optimizer, first_step=1)
    return sent_in(step, model, gpus_per_node, counts=isinstance(strategy, Strategy))


def phases(case: Case, strategy: Strategy, no_sync: bool) -> dict[str, Wiretap]:
    """In a worker: what each phase of a step with two micro-batches sends, after a first optimizer step."""
    model = models.wrap(case, strategy)
    optimizer = models.make_optimizer("sgd", model.parameters())
    models.train(model, case, optimizer=optimizer)
    return taps_of_phases(model, lambda i: model.no_sync() if no_sync and i == 0 else nullcontext())


def hooked_bytes(case: Case) -> Sent:
    """In a worker: the steps of a stock strategy with the hook."""
    model = models.wrap(case, ShardingStrategy.FULL_SHARD)
    model.register_comm_hook(QuantizedReduceState(Int4(128), gpus_per_node=2), quantized_reduce_hook)
    return sent_in(partial(models.train, model, case), model, 2)


def test_zeropp_sends_a_quarter_between_nodes(pool: Callable[[int], Pool]) -> None:
    ours = pool(4).run(bytes_sent, CASE, Strategy.zeropp(gpus_per_node=2), 2)
    stock = pool(4).run(bytes_sent, CASE, ShardingStrategy.FULL_SHARD, 2)
    for (tap, _), (stock_tap, _) in zip(ours, stock, strict=True):
        assert 0 < tap.total("inter") <= 0.27 * stock_tap.total("inter")


@pytest.mark.parametrize(("world", "gpus_per_node"), [(4, 2), (4, 1), (4, 4), (2, 1)])
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_traffic_agrees_with_the_wire(
    pool: Callable[[int], Pool], strategy: Strategy, world: int, gpus_per_node: int
) -> None:
    strategy = replace(strategy, gpus_per_node=gpus_per_node)
    case = Case(steps=1, clip=None, micro_batches=2, no_sync=False)
    assert_counted(pool(world).run(bytes_sent, case, strategy, gpus_per_node), strategy, world, gpus_per_node)


@pytest.mark.parametrize("no_sync", [True, False], ids=["no_sync", "synced"])
def test_weights_cross_nodes_once_after_they_may_have_changed(pool: Callable[[int], Pool], no_sync: bool) -> None:
    expected = {"forward 0", "eval", "invalidated"} | (set() if no_sync else {"forward 1"})
    for taps in pool(4).run(phases, Case(steps=1, clip=None), Strategy.zeropp(gpus_per_node=2), no_sync):
        sent = {phase: tap.total("inter", "all_gather") for phase, tap in taps.items()}
        assert {phase for phase, n in sent.items() if n} == expected
        assert len({sent[phase] for phase in expected}) == 1
        # "eval again" finds the root still unsharded, and the blocks' secondary shards.
        assert all(tap.total("intra", "all_gather") > 0 for tap in taps.values())


def test_hook_on_a_stock_strategy(pool: Callable[[int], Pool]) -> None:
    for tap, own in pool(4).run(hooked_bytes, Case(steps=2)):
        assert own["reduce"] == {level: tap.total(level, "all_to_all") for level in ("inter", "intra")}
        assert own["reduce"]["inter"] > 0
        assert own["gather"] == {"inter": 0, "intra": 0}
        assert tap.total("inter", "reduce_scatter") == 0
