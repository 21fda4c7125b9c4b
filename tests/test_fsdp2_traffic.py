"""Bytes on the wire under fully_shard, counted on the collectives themselves, and against FSDP1's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from harness import models
from harness.bytes_on_the_wire import LARGE, STRATEGIES, Sent, assert_counted, sent_in, taps_of_phases
from harness.fully_sharded import STOCK, Case, make, make_optimizer, train
from harness.pool import Pool
from harness.wiretap import Wiretap
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from fsdp_zpp import Strategy

BF16 = ("mp_policy", MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
CASE = Case(model=LARGE, shard=(BF16,), steps=1, clip=None)


def bytes_sent(case: Case, strategy: Strategy | None, gpus_per_node: int) -> Sent:
    """In a worker: what one warm step sends, by the wiretap and by traffic()."""
    model = make(case, strategy)
    optimizer = make_optimizer("sgd", model)
    train(model, case, optimizer=optimizer)
    step = partial(train, model, case, optimizer=optimizer, first_step=1)
    return sent_in(step, model, gpus_per_node, counts=strategy is not STOCK)


def phases(strategy: Strategy, sync: bool) -> dict[str, Wiretap]:
    """In a worker: what each phase of a step with two micro-batches sends, after a first optimizer step."""
    model = make(Case(), strategy)
    optimizer = make_optimizer("sgd", model)
    train(model, Case(steps=1, clip=None), optimizer=optimizer)

    def micro_batch_context(micro_batch: int) -> AbstractContextManager[None]:
        model.set_requires_gradient_sync(sync or micro_batch == 1)
        return nullcontext()

    return taps_of_phases(model, micro_batch_context)


def fsdp1_bytes(strategy: Strategy) -> dict:
    """In a worker: what one warm step of the same net sends under FullyShardedDataParallel."""
    policy = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    fsdp = (("use_orig_params", True), ("mixed_precision", policy))
    case = models.Case(model=LARGE, fsdp=fsdp, steps=1, clip=None)
    model = models.wrap(case, strategy)
    optimizer = models.make_optimizer("sgd", model.parameters())
    models.train(model, case, optimizer=optimizer)
    return sent_in(partial(models.train, model, case, optimizer=optimizer, first_step=1), model, 2)[1]


def test_zeropp_sends_a_quarter_between_nodes(pool: Callable[[int], Pool]) -> None:
    ours = pool(4).run(bytes_sent, CASE, Strategy.zeropp(gpus_per_node=2), 2)
    stock = pool(4).run(bytes_sent, CASE, STOCK, 2)
    for (tap, own), (stock_tap, _) in zip(ours, stock, strict=True):
        assert 0 < tap.total("inter") <= 0.27 * stock_tap.total("inter")
        assert tap.total("inter") == own["gather"]["inter"] + own["reduce"]["inter"]


@pytest.mark.parametrize("strategy", [Strategy("IGG", gpus_per_node=2), Strategy.zeropp(gpus_per_node=2)], ids=str)
def test_equals_fsdp1(pool: Callable[[int], Pool], strategy: Strategy) -> None:
    ours, theirs = pool(4).run(bytes_sent, CASE, strategy, 2), pool(4).run(fsdp1_bytes, strategy)
    for (_, own), other in zip(ours, theirs, strict=True):
        for kind in ("gather", "reduce"):
            assert own[kind] == pytest.approx(other[kind], rel=2e-3)


@pytest.mark.parametrize(("world", "gpus_per_node"), [(4, 2), (4, 1), (4, 4)])
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_traffic_agrees_with_the_wire(
    pool: Callable[[int], Pool], strategy: Strategy, world: int, gpus_per_node: int
) -> None:
    strategy = replace(strategy, gpus_per_node=gpus_per_node)
    case = Case(steps=1, clip=None, micro_batches=2, sync_all=True)
    assert_counted(pool(world).run(bytes_sent, case, strategy, gpus_per_node), strategy, world, gpus_per_node)


@pytest.mark.parametrize("strategy", [Strategy("IGG", gpus_per_node=2), Strategy.zeropp(gpus_per_node=2)], ids=str)
@pytest.mark.parametrize("sync", [True, False], ids=["synced", "no sync"])
def test_weights_cross_nodes_once_after_they_may_have_changed(
    pool: Callable[[int], Pool], strategy: Strategy, sync: bool
) -> None:
    expected = {"forward 0", "eval", "invalidated"} | ({"forward 1"} if sync else set())
    for taps in pool(4).run(phases, strategy, sync):
        sent = {phase: tap.total("inter", "all_gather") for phase, tap in taps.items()}
        assert {phase for phase, n in sent.items() if n} == expected
        assert len({sent[phase] for phase in expected}) == 1
        # "eval again" finds the root still unsharded, and the blocks' secondary shards.
        assert all(tap.total("intra", "all_gather") > 0 for tap in taps.values())
