"""On one node alone, what is for the slow network is off, unless links inside the node are declared slow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from harness import models
from harness.adapter import STOCK, Adapter, Case
from harness.covering import SCOPES, over_adapters
from harness.pool import Pool
from harness.strategies import INSIDE, INSIDE_WITH_FEEDBACK, PRESETS
from harness.training import largest_distance, train
from harness.wiretap import Wiretap, wiretap

from fsdp_zpp import CodecState, Int4, Int8, LoCo, Strategy

CODECS = {"weights": Int8(64), "gradients": Int4(32), "error_feedback": LoCo(hops="both")}
over_presets = pytest.mark.parametrize("strategy", PRESETS.values(), ids=PRESETS)


@over_presets
@over_adapters
def test_trains_as_stock_bit_for_bit(pool: Callable[[int], Pool], adapter: Adapter, strategy: Strategy) -> None:
    assert pool(4).run(largest_distance, adapter, Case(), strategy) == [0] * 4


@pytest.mark.parametrize("scopes", SCOPES)
@over_adapters
def test_any_scopes_train_in_full_precision(pool: Callable[[int], Pool], adapter: Adapter, scopes: str) -> None:
    assert max(pool(4).run(largest_distance, adapter, Case(), Strategy(scopes, **CODECS))) <= 1e-6


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
    stock = pool(4).once(sent, adapter, STOCK, 4)
    assert pool(4).run(sent, adapter, strategy, 4) == stock
    assert set(stock[0].sent) == {("all_gather", "intra"), ("reduce_scatter", "intra")}


@over_adapters
def test_a_codec_named_for_the_hop_inside_stays(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    ours, stock = (pool(4).run(sent, adapter, strategy, 4) for strategy in (INSIDE, STOCK))
    for tap, stock_tap in zip(ours, stock, strict=True):
        assert tap.total("intra", "all_gather") == stock_tap.total("intra", "all_gather")
        assert 0 < tap.total("intra", "all_to_all") < 0.35 * stock_tap.total("intra", "reduce_scatter")
        assert tap.total("intra", "reduce_scatter") == 0
    assert 1e-6 < max(pool(4).run(largest_distance, adapter, Case(), INSIDE)) < 0.05


@over_adapters
def test_slow_links_inside_a_node_can_be_declared_as_nodes_of_one(
    pool: Callable[[int], Pool], adapter: Adapter
) -> None:
    for tap in pool(4).run(sent, adapter, Strategy.zeropp(levels="GGG", gpus_per_node=1), 1):
        (stock,) = {tap.total("inter") for tap in pool(4).run(sent, adapter, STOCK, 1)}
        assert 0 < tap.total("inter") < 0.3 * stock


def kept(adapter: Adapter, strategy: Strategy) -> set[str]:
    """In a worker: the names of what is kept from step to step by codecs, after a step."""
    model = adapter.make(Case(), strategy)
    train(adapter, model, Case(steps=1))
    return set(CodecState(model).state_dict()) - {"layout"}


@over_adapters
def test_errors_are_kept_only_of_what_is_encoded(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for strategy in PRESETS.values():
        assert pool(4).run(kept, adapter, strategy) == [set()] * 4
    for names in pool(4).run(kept, adapter, INSIDE_WITH_FEEDBACK):
        assert len(names) == 4
        assert all("errors of" in name for name in names)
