"""Bytes on the wire, counted on the collectives themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from harness import models
from harness.adapter import STOCK, Adapter, Case, Precision
from harness.covering import ADAPTERS, SCOPES, over_adapters, over_each
from harness.pool import Pool
from harness.training import train
from harness.wiretap import Sent, Wiretap, sent_in, wiretap

from fsdp_zpp import Int4, Int8, Strategy, invalidate

# Large enough for scales and padding to weigh what they do in a real model. The root has no weight to speak of.
LARGE = (("blocks", 6), ("width", 192), ("hidden", 1024), ("vocabulary", 3))
SMALL_NBYTES = 4 * 6 * (2 * 192 + 1024)  # norms and biases, which are sent exactly
CASE = Case(model=LARGE, precision=Precision(torch.bfloat16, torch.bfloat16), steps=1, clip=None)

STRATEGIES = {scopes: Strategy(scopes) for scopes in SCOPES} | {
    "qwZ": Strategy("GGG", weights=Int8(64)),
    "qgZ": Strategy("GGG", gradients=Int4(32)),
    "inside": Strategy("GGG", intra_gradients=Int8(64)),
    "qgZ full inside": Strategy("GGG", gradients=Int8(256), intra_gradients=None),
    "zeropp": Strategy.zeropp(),
}
ONCE = {"hpZ": Strategy("IGG", gpus_per_node=2), "zeropp": Strategy.zeropp(gpus_per_node=2)}


def bytes_sent(adapter: Adapter, case: Case, strategy: Strategy | None, gpus_per_node: int) -> Sent:
    """In a worker: what one warm step sends, by the wiretap and by traffic()."""
    model = adapter.make(case, strategy)
    optimizer = models.make_optimizer("sgd", model.parameters())
    train(adapter, model, case, optimizer=optimizer)
    step = partial(train, adapter, model, case, optimizer=optimizer, first_step=1)
    return sent_in(step, model, gpus_per_node, counts=strategy is not STOCK)


@over_adapters
def test_zeropp_sends_a_quarter_between_nodes(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    ours = pool(4).run(bytes_sent, adapter, CASE, Strategy.zeropp(gpus_per_node=2), 2)
    stock = pool(4).run(bytes_sent, adapter, CASE, STOCK, 2)
    for (tap, own), (stock_tap, _) in zip(ours, stock, strict=True):
        assert 0 < tap.total("inter") <= 0.27 * stock_tap.total("inter")
        assert tap.total("inter") == own["gather"]["inter"] + own["reduce"]["inter"]


@pytest.mark.parametrize("strategy", ONCE.values(), ids=ONCE)
def test_both_adapters_send_the_same_bytes(pool: Callable[[int], Pool], strategy: Strategy) -> None:
    """But for small parameters: a flat parameter has them anywhere, and all rows have room for those of the fullest."""
    one, other = (pool(4).run(bytes_sent, adapter, CASE, strategy, 2) for adapter in ADAPTERS)
    for (_, sent), (_, expected) in zip(one, other, strict=True):
        for kind in ("gather", "reduce"):
            for hop, rows in (("inter", 1), ("intra", 2 * (2 if kind == "gather" else 1))):
                assert sent[kind][hop] == pytest.approx(expected[kind][hop], rel=2e-3, abs=rows * SMALL_NBYTES)


@over_each(2, adapter=ADAPTERS, strategy=STRATEGIES, layout=[(4, 2), (4, 1), (4, 4), (2, 1)])
def test_traffic_agrees_with_the_wire(
    pool: Callable[[int], Pool], adapter: Adapter, strategy: Strategy, layout: tuple[int, int]
) -> None:
    world, gpus_per_node = layout
    strategy = replace(strategy, gpus_per_node=gpus_per_node)
    case = Case(steps=1, clip=None, micro_batches=2, synced=True)
    # On one node torch's own collectives do it all, unless the strategy keeps or encodes something even there.
    gathers = gpus_per_node < world or strategy.parameters == "N"
    reduces = gpus_per_node < world or strategy.intra_gradients == Int8(64) or strategy.levels[1] == "N"
    for tap, own in pool(world).run(bytes_sent, adapter, case, strategy, gpus_per_node):
        for hop in ("inter", "intra"):
            # An all-reduce ends in an all-gather, where a rank's optimizer needs more than its own chunk.
            up = own["reduce"][hop] - tap.total(hop, "all_to_all")
            assert up == 0 if strategy.optimizer == "G" else up >= 0
            assert own["gather"][hop] + up == (tap.total(hop, "all_gather") if gathers else 0)
        assert bool(tap.total("intra", "reduce_scatter") + tap.total("inter", "reduce_scatter")) != reduces


def phases(adapter: Adapter, strategy: Strategy, synced: bool) -> dict[str, Wiretap]:
    """In a worker: what each phase of a step with two micro-batches sends, after a first optimizer step."""
    model = adapter.make(Case(), strategy)
    train(adapter, model, Case(steps=1, clip=None))
    taps = {}
    for i in range(2):
        with adapter.micro_batch(model, last=i == 1, synced=synced):
            with wiretap(2) as taps[f"forward {i}"]:
                loss = models.loss_of(model, models.batch(1, i))
            with wiretap(2) as taps[f"backward {i}"]:
                loss.backward()
    for phase in ("eval", "eval again"):
        with torch.no_grad(), wiretap(2) as taps[phase]:
            models.loss_of(model, models.batch(2, 0))
    invalidate(model)
    with torch.no_grad(), wiretap(2) as taps["invalidated"]:
        models.loss_of(model, models.batch(2, 0))
    return taps


@pytest.mark.parametrize("synced", [True, False], ids=["synced", "no sync"])
@pytest.mark.parametrize("strategy", ONCE.values(), ids=ONCE)
@over_adapters
def test_weights_cross_nodes_once_after_they_may_have_changed(
    pool: Callable[[int], Pool], adapter: Adapter, strategy: Strategy, synced: bool
) -> None:
    expected = {"forward 0", "eval", "invalidated"} | ({"forward 1"} if synced else set())
    for taps in pool(4).run(phases, adapter, strategy, synced):
        sent = {phase: tap.total("inter", "all_gather") for phase, tap in taps.items()}
        assert {phase for phase, n in sent.items() if n} == expected
        assert len({sent[phase] for phase in expected}) == 1
        # "eval again" finds the root still unsharded, and the blocks' secondary shards.
        assert all(tap.total("intra", "all_gather") > 0 for tap in taps.values())
