"""Bytes on the wire, counted on the collectives themselves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from harness import models
from harness.models import Case
from harness.pool import Pool
from harness.wiretap import Wiretap, wiretap
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from fsdp_zpp import Int4, Int8, QuantizedReduceState, Strategy, invalidate, quantized_reduce_hook, traffic

BF16 = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
# Large enough for scales and padding to weigh what they do in a real model. The root unit has no weight to speak of.
LARGE = (("blocks", 6), ("width", 128), ("hidden", 512), ("vocabulary", 3))
CASE = Case(model=LARGE, fsdp=(("use_orig_params", True), ("mixed_precision", BF16)), steps=1, clip=None)


def bytes_sent(case: Case, strategy: Strategy | ShardingStrategy, gpus_per_node: int) -> tuple[Wiretap, dict]:
    """In a worker: what one warm step sends, by the wiretap and by traffic()."""
    model = models.wrap(case, strategy)
    optimizer = models.make_optimizer("sgd", model.parameters())
    models.train(model, case, optimizer=optimizer)
    before = traffic(model) if isinstance(strategy, Strategy) else {}
    with wiretap(gpus_per_node) as tap:
        models.train(model, case, optimizer=optimizer, first_step=1)
    after = traffic(model) if isinstance(strategy, Strategy) else {}
    own = {kind: {hop: n - before[kind][hop] for hop, n in hops.items()} for kind, hops in after.items()}
    return tap, own


def phases(case: Case, strategy: Strategy, no_sync: bool) -> dict[str, Wiretap]:
    """In a worker: what each phase of a step with two micro-batches sends, after a first optimizer step."""
    model = models.wrap(case, strategy)
    optimizer = models.make_optimizer("sgd", model.parameters())
    models.train(model, case, optimizer=optimizer)
    taps = {}
    for micro_batch in range(2):
        with model.no_sync() if no_sync and micro_batch == 0 else nullcontext():
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


def hooked_bytes(case: Case) -> tuple[Wiretap, dict]:
    """In a worker: one step of a stock strategy with the hook."""
    model = models.wrap(case, ShardingStrategy.FULL_SHARD)
    model.register_comm_hook(QuantizedReduceState(Int4(128), gpus_per_node=2), quantized_reduce_hook)
    with wiretap(2) as tap:
        models.train(model, case)
    return tap, traffic(model)


def test_zeropp_sends_a_quarter_between_nodes(pool: Callable[[int], Pool]) -> None:
    ours = pool(4).run(bytes_sent, CASE, Strategy.zeropp(gpus_per_node=2), 2)
    stock = pool(4).run(bytes_sent, CASE, ShardingStrategy.FULL_SHARD, 2)
    for (tap, _), (stock_tap, _) in zip(ours, stock, strict=True):
        assert 0 < tap.total("inter") <= 0.27 * stock_tap.total("inter")


@pytest.mark.parametrize(("world", "gpus_per_node"), [(4, 2), (4, 1), (4, 4), (2, 1)])
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
    case = Case(steps=1, clip=None, micro_batches=2, no_sync=False)
    gathers = gpus_per_node < world or strategy.weights is not None
    reduces = gpus_per_node < world or strategy.gradient_codecs[0] is not None
    for tap, own in pool(world).run(bytes_sent, case, strategy, gpus_per_node):
        for level in ("inter", "intra"):
            # On one node without a codec, torch's own collectives do it all.
            assert own["gather"][level] == (tap.total(level, "all_gather") if gathers else 0)
            assert own["reduce"][level] == tap.total(level, "all_to_all")
        assert bool(tap.total("intra", "reduce_scatter") + tap.total("inter", "reduce_scatter")) != reduces


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
