"""Bytes on the wire under fully_shard, counted on the collectives themselves, and against FSDP1's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from harness import models
from harness.fully_sharded import STOCK, Case, make, make_optimizer, train
from harness.pool import Pool
from harness.wiretap import Wiretap, wiretap
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from fsdp_zpp import Int4, Int8, Strategy, invalidate, traffic

# Large enough for scales and padding to weigh what they do in a real model. The root has no weight to speak of.
LARGE = (("blocks", 6), ("width", 128), ("hidden", 512), ("vocabulary", 3))
BF16 = ("mp_policy", MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
CASE = Case(model=LARGE, shard=(BF16,), steps=1, clip=None)


def bytes_sent(case: Case, strategy: Strategy | None, gpus_per_node: int) -> tuple[Wiretap, dict]:
    """In a worker: what one warm step sends, by the wiretap and by traffic()."""
    model = make(case, strategy)
    optimizer = make_optimizer("sgd", model)
    train(model, case, optimizer=optimizer)
    before = traffic(model) if strategy is not None else {}
    with wiretap(gpus_per_node) as tap:
        train(model, case, optimizer=optimizer, first_step=1)
    after = traffic(model) if strategy is not None else {}
    return tap, {kind: {hop: n - before[kind][hop] for hop, n in hops.items()} for kind, hops in after.items()}


def phases(strategy: Strategy, sync: bool) -> dict[str, Wiretap]:
    """In a worker: what each phase of a step with two micro-batches sends, after a first optimizer step."""
    model = make(Case(), strategy)
    optimizer = make_optimizer("sgd", model)
    train(model, Case(steps=1, clip=None), optimizer=optimizer)
    taps = {}
    for micro_batch in range(2):
        model.set_requires_gradient_sync(sync or micro_batch == 1)
        with wiretap(2) as taps[f"forward {micro_batch}"]:
            loss = models.loss_of(model, models.batch(1, micro_batch))
        with wiretap(2) as taps[f"backward {micro_batch}"]:
            loss.backward()
    for phase in ("eval", "eval again"):
        with torch.no_grad(), wiretap(2) as taps[phase]:
            models.loss_of(model, models.batch(2, 0))
    invalidate(model)
    with torch.no_grad(), wiretap(2) as taps["invalidated"]:
        models.loss_of(model, models.batch(2, 0))
    return taps


def fsdp1_bytes(strategy: Strategy) -> dict:
    """In a worker: what one warm step of the same net sends under FullyShardedDataParallel."""
    policy = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    fsdp = (("use_orig_params", True), ("mixed_precision", policy))
    case = models.Case(model=LARGE, fsdp=fsdp, steps=1, clip=None)
    model = models.wrap(case, strategy)
    optimizer = models.make_optimizer("sgd", model.parameters())
    models.train(model, case, optimizer=optimizer)
    before = traffic(model)
    models.train(model, case, optimizer=optimizer, first_step=1)
    return {kind: {hop: n - before[kind][hop] for hop, n in hops.items()} for kind, hops in traffic(model).items()}


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
@pytest.mark.parametrize(
    "strategy",
    [
        Strategy("GGG"),
        Strategy("IGG"),
        Strategy("GGG", weights=Int8(64)),
        Strategy("GGG", gradients=Int4(32)),
        Strategy("GGG", gradients=Int8(256), intra_gradients=None),
        Strategy.zeropp(),
    ],
    ids=["GGG", "hpZ", "qwZ", "qgZ", "qgZ-full-inside", "zeropp"],
)
def test_traffic_agrees_with_the_wire(
    pool: Callable[[int], Pool], strategy: Strategy, world: int, gpus_per_node: int
) -> None:
    strategy = replace(strategy, gpus_per_node=gpus_per_node)
    case = Case(steps=1, clip=None, micro_batches=2, sync_all=True)
    gathers = gpus_per_node < world or strategy.weights is not None
    reduces = gpus_per_node < world or strategy.gradient_codecs[0] is not None
    for tap, own in pool(world).run(bytes_sent, case, strategy, gpus_per_node):
        for level in ("inter", "intra"):
            # On one node without a codec, torch's own collectives do it all.
            assert own["gather"][level] == (tap.total(level, "all_gather") if gathers else 0)
            assert own["reduce"][level] == tap.total(level, "all_to_all")
        assert bool(tap.total("intra", "reduce_scatter") + tap.total("inter", "reduce_scatter")) != reduces


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
