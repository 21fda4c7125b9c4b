"""One node alone: what is for the slow network is left off, unless all links are said to be slow."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from harness import models
from harness.adapter import STOCK, Adapter, Case
from harness.adapters import LEVELS, over_adapters
from harness.logs import collected
from harness.pool import Pool
from harness.training import largest_distance, train
from harness.wiretap import Wiretap, wiretap

from fsdp_zpp import CodecState, Int4, Int4Delta, Int8, LoCo, Strategy, plan
from fsdp_zpp.activity import activity
from fsdp_zpp.at_work import at_work
from fsdp_zpp.planner.as_json import plan_to_json
from fsdp_zpp.strategy_unit import levels_on
from fsdp_zpp.topology import Topology

ONE, ALONE = Topology(4, 4), Topology(1, 1)
CODECS = {"weights": Int8(64), "gradients": Int4(32), "error_feedback": LoCo(hops="both")}
JOB = {"nodes": 1, "gpus_per_node": 8, "intra_gbps": 2400, "micro_batches": 2}
PRESETS = {
    "zeropp": Strategy.zeropp(),
    "loco": Strategy.loco(),
    "loco both": Strategy.loco(error_feedback=LoCo(hops="both")),
    "delta": Strategy.zeropp(weights=Int4Delta()),
}
INSIDE = Strategy("GGG", gradients=Int4(32), intra_gradients=Int8(64))
INSIDE_FED_BACK = replace(INSIDE, error_feedback=LoCo(hops="both"))

over_presets = pytest.mark.parametrize("strategy", PRESETS.values(), ids=PRESETS)


@over_presets
@over_adapters
def test_trains_as_stock_bit_for_bit(pool: Callable[[int], Pool], adapter: Adapter, strategy: Strategy) -> None:
    assert pool(4).run(largest_distance, adapter, Case(), strategy) == [0] * 4


@pytest.mark.parametrize("levels", LEVELS)
@over_adapters
def test_any_letters_train_in_full_precision(pool: Callable[[int], Pool], adapter: Adapter, levels: str) -> None:
    assert max(pool(4).run(largest_distance, adapter, Case(), Strategy(levels, **CODECS))) <= 1e-6


def sent(adapter: Adapter, strategy: Strategy | None, gpus_per_node: int) -> Wiretap:
    """In a worker: what a step sends that is not the first."""
    case = Case(steps=1, clip=None, micro_batches=2, synced=True)
    model = adapter.make(case, strategy)
    one_step = partial(train, adapter, model, case, optimizer=models.make_optimizer("sgd", model.parameters()))
    one_step()
    with wiretap(gpus_per_node) as tap:
        one_step(first_step=1)
    return tap


@over_presets
@over_adapters
def test_sends_what_stock_sends(pool: Callable[[int], Pool], adapter: Adapter, strategy: Strategy) -> None:
    stock = pool(4).run(sent, adapter, STOCK, 4)
    assert pool(4).run(sent, adapter, strategy, 4) == stock
    assert set(stock[0].sent) == {("all_gather", "intra"), ("reduce_scatter", "intra")}


@over_adapters
def test_a_codec_for_the_hop_inside_stays(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    ours, stock = (pool(4).run(sent, adapter, strategy, 4) for strategy in (INSIDE, STOCK))
    for tap, stock_tap in zip(ours, stock, strict=True):
        assert tap.total("intra", "all_gather") == stock_tap.total("intra", "all_gather")
        assert 0 < tap.total("intra", "all_to_all") < 0.35 * stock_tap.total("intra", "reduce_scatter")
        assert tap.total("intra", "reduce_scatter") == 0
    assert 1e-6 < max(pool(4).run(largest_distance, adapter, Case(), INSIDE)) < 0.05


@over_adapters
def test_slow_links_inside_a_node_are_nodes_of_one(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for tap in pool(4).run(sent, adapter, Strategy.zeropp(levels="GGG", gpus_per_node=1), 1):
        (stock,) = {tap.total("inter") for tap in pool(4).run(sent, adapter, STOCK, 1)}
        assert 0 < tap.total("inter") < 0.3 * stock


def kept(adapter: Adapter, strategy: Strategy) -> set[str]:
    """In a worker: the names of what is kept from step to step by codecs, after a step."""
    model = adapter.make(Case(), strategy)
    train(adapter, model, Case(steps=1))
    return set(CodecState(model).state_dict()) - {"layout"}


@over_adapters
def test_errors_are_kept_of_what_is_encoded(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for strategy in PRESETS.values():
        assert pool(4).run(kept, adapter, strategy) == [set()] * 4
    for names in pool(4).run(kept, adapter, INSIDE_FED_BACK):
        assert len(names) == 4
        assert all("errors of" in name for name in names)


def test_what_is_at_work() -> None:
    for strategy in PRESETS.values():
        assert at_work(strategy, ONE) == Strategy("IGG")
        assert "".join(levels_on(strategy, ONE)) == "GGG"
        for topology in (Topology(4, 2), Topology(4, 1)):
            assert at_work(strategy, topology) == strategy
    assert at_work(Strategy.mixzpp(), ONE) == Strategy("IGG", frozen=Int8(256))
    assert at_work(INSIDE_FED_BACK, ONE) == replace(INSIDE_FED_BACK, gradients=None)
    assert at_work(replace(INSIDE, error_feedback=LoCo()), ONE) == replace(INSIDE, gradients=None)


def logged(adapter: Adapter) -> list[tuple[str, str]]:
    """In a worker: what zeropp logs."""
    model = adapter.make(Case(), Strategy.zeropp())
    with collected() as records:
        train(adapter, model, Case(steps=1))
    return records


@over_adapters
def test_log_line(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    [(level, line)] = pool(4).run(logged, adapter)[0]
    assert level == "WARNING"
    assert line == (
        "Net: IGG on 1 node x 4, 4 units: weights gathered in full precision; gradients reduced in full precision; "
        "NOT active: weights gathered as int8(256), gradients reduced as int4(128) "
        "(one node: no gain on fast links; on slow ones, say gpus_per_node=1); "
        "secondary shard of the weights kept in each node (one node: no inter-node hop)"
    )


def test_log_line_of_parts() -> None:
    inside = activity(INSIDE_FED_BACK, ONE, 1024)
    assert "gradients reduced as int8(64) inside nodes" in inside.active
    assert "error feedback inside nodes (beta 0.8, reset every 1024 steps, kept in fp32; 1 KiB a rank)" in inside.active
    assert "error feedback between nodes (one node: no inter-node hop)" in inside.inactive
    assert activity(Strategy("GGG", intra_gradients=Int8(64)), ONE).inactive == ()
    assert all("one rank: nothing is sent" in text for text in activity(Strategy.loco(), ALONE).inactive)


def test_plan_is_that_of_full_precision() -> None:
    plain, made = plan(1e9, **JOB), plan(1e9, **JOB, **CODECS)
    for ours, expected in zip(made.estimates, plain.estimates, strict=True):
        assert (ours.volume, ours.memory, ours.time) == (expected.volume, expected.memory, expected.time)
    assert "has nothing to do" not in " ".join(plain.notes)
    assert "slow" not in " ".join(plain.notes)
    notes = " ".join(made.notes)
    for said in ("weights=int8(64)", "gradients=int4(32)"):
        assert f"{said} has nothing to do" in notes
    assert notes.count("error_feedback has nothing to do") == 2
    assert "plan nodes of one GPU" in notes
    assert "weights unencoded, gradients unencoded between nodes and unencoded inside\n" in str(made)
    assert set(json.loads(plan_to_json(made))["codecs"].values()) == {None}


def test_plan_of_a_codec_for_the_hop_inside() -> None:
    plain, made = plan(1e9, **JOB), plan(1e9, **JOB, **CODECS, intra_gradients=Int8(64))
    assert made["GGG"].memory.errors > 3e9
    assert made["GGG"].volume.intra < 0.9 * plain["GGG"].volume.intra
    assert "as int8(64) inside, error feedback" in str(made)
    assert "intra_gradients" not in " ".join(made.notes)
