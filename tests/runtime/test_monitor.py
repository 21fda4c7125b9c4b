"""A monitor's figures of each step: bytes as traffic() has them, FULL_SHARD's by its formula, and times."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from harness import models
from harness.adapter import STOCK, Adapter, Case, Precision
from harness.covering import ADAPTERS, SCOPES, over_adapters, over_each
from harness.fsdp2 import Fsdp2
from harness.pool import Pool, device_type
from harness.training import train
from harness.wiretap import wiretap
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdp_zpp import LocalSteps, Monitor, Strategy, monitor, traffic
from fsdp_zpp.collectives import hop_timer
from fsdp_zpp.runtime.communication_waits import CommunicationWaits
from fsdp_zpp.runtime.monitor import _Step, overlaps

GPUS = 2

# All shapes are multiples of the ranks, so that neither FSDP pads.
MODEL = (("blocks", 2), ("width", 32), ("hidden", 64), ("vocabulary", 16))
STRATEGIES = {scopes: Strategy(scopes, gpus_per_node=GPUS) for scopes in SCOPES} | {
    "zeropp": Strategy.zeropp(gpus_per_node=GPUS),
    "loco": Strategy.loco(gpus_per_node=GPUS),
    "local": Strategy("III", local_steps=LocalSteps(2), gpus_per_node=GPUS),
}
HOPS = [(kind, level) for kind in ("weights", "gradients") for level in ("inter", "intra")]
GGG = Strategy("GGG", gpus_per_node=GPUS)


def figures_of(watch: Monitor) -> dict[str, float]:
    """End a step and return its own figures, also on a GPU, which may not have completed it at once."""
    figures = watch.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        figures = watch._latest()
    return figures


def total(model: Any) -> dict[tuple[str, str], int]:
    """The bytes of traffic(), by the monitor's names."""
    sent: Any = traffic(model)
    names = {"weights": "gather", "gradients": "reduce"}
    return {(kind, level): sent[names[kind]][level] for kind, level in HOPS}


def watched(adapter: Adapter, case: Case, strategy: Strategy) -> list[tuple[dict[str, float], dict[Any, int]]]:
    """In a worker: what the monitor and traffic() say of each step."""
    model = adapter.make(case, strategy)
    found, before = [], total(model)

    def after_step(*_: Any) -> None:
        nonlocal before
        now = total(model)
        found.append((figures_of(watch), {hop: now[hop] - before[hop] for hop in HOPS}))
        before = now

    with monitor(model) as watch:
        train(adapter, model, case, after_step)
    return found


@over_each(adapter=ADAPTERS, strategy=STRATEGIES, micro_batches=[1, 2])
def test_bytes_are_those_of_traffic_and_times_are_possible(
    pool: Callable[[int], Pool], adapter: Adapter, strategy: Strategy, micro_batches: int
) -> None:
    case = Case(model=MODEL, micro_batches=micro_batches)
    for steps in pool(4).run(watched, adapter, case, strategy):
        assert [figures["step"] for figures, _ in steps] == [1, 2, 3]
        for figures, sent in steps:
            for kind, level in HOPS:
                nbytes, ms, exposed = (figures[f"{kind}/{level}/{what}"] for what in ("bytes", "ms", "exposed_ms"))
                assert nbytes == sent[kind, level]
                assert 0 <= exposed <= ms <= figures["ms"]
                # With local steps, torch's own reduce-scatter sums gradients in a node, which is timed, not counted.
                assert (ms > 0) == (nbytes > 0) or (strategy.local_steps and (kind, level) == ("gradients", "intra"))
            assert ("inter/share" in figures) == (strategy.local_steps is None)
            for level in ("inter", "intra") if strategy.local_steps is None else ():
                share = figures[f"{level}/share"] * figures[f"{level}/full_shard_bytes"]
                assert share == pytest.approx(sum(sent[kind, level] for kind in ("weights", "gradients")))


# ---- what FULL_SHARD would send


def stock_and_said(adapter: Adapter, case: Case) -> tuple[dict[str, int], dict[str, float]]:
    """In a worker: what a step of FULL_SHARD sends, as the wiretap sees it, and what a monitor says that it would."""
    stock = adapter.make(case, STOCK)
    optimizer = models.make_optimizer("sgd", stock.parameters())
    train(adapter, stock, case, optimizer=optimizer)
    with wiretap(GPUS) as tap:
        train(adapter, stock, case, optimizer=optimizer, first_step=1)
    [*_, (figures, _)] = watched(adapter, case, Strategy.zeropp(gpus_per_node=GPUS))
    # The wiretap sees one collective over all ranks, whose bytes go to the other node once.
    return {"inter": tap.total("inter")}, figures


@over_each(
    adapter=ADAPTERS,
    micro_batches=[1, 3],
    precision={"fp32": None, "bf16": Precision(torch.bfloat16, torch.float32)},
)
def test_full_shard_sends_what_is_said(
    pool: Callable[[int], Pool], adapter: Adapter, micro_batches: int, precision: Precision | None
) -> None:
    case = Case(model=MODEL, steps=1, micro_batches=micro_batches, precision=precision, clip=None)
    for sent, figures in pool(4).run(stock_and_said, adapter, case):
        assert figures["inter/full_shard_bytes"] == sent["inter"]
        assert figures["intra/full_shard_bytes"] == 2 * sent["inter"]


KINDS = ["partly frozen", "evaluated", "without root", "without root, no_reentrant", "no_reentrant", "reentrant"]


def one_step(adapter: Adapter, strategy: Any, kind: str) -> tuple[int, dict[str, float]]:
    """In a worker: what a step sends between nodes, as the wiretap sees it, and what a monitor says of it, if any."""
    net = models.make_net(**dict(MODEL))
    if kind == "partly frozen":
        for block in net.blocks:
            block.up.requires_grad_(False)
    if kind.endswith("reentrant"):
        models.recompute(net, kind, lambda module: isinstance(module, models.Block))
    for at, block in enumerate(net.blocks):
        net.blocks[at] = adapter.wrap(block, strategy)
    model = net if kind.startswith("without root") else adapter.wrap(net, strategy)

    def step(evaluates: bool = False) -> None:
        models.loss_of(model, models.batch(0, 0)).backward()
        if evaluates:
            # Once: torch leaves the root unsharded after it, and then gathers it no more.
            with torch.no_grad():
                models.loss_of(model, models.batch(1, 0))

    step()
    watch = None if strategy is STOCK else monitor(model)
    with wiretap(GPUS) as tap:
        step(evaluates=kind == "evaluated")
    return tap.total("inter"), {} if watch is None else figures_of(watch)


def steps_of_all_kinds(adapter: Adapter) -> dict[str, tuple[int, dict[str, float]]]:
    """In a worker: what stock sends between nodes in a step of each kind of model, and what a monitor says of ours."""
    return {kind: (one_step(adapter, STOCK, kind)[0], one_step(adapter, GGG, kind)[1]) for kind in KINDS}


@over_adapters
def test_full_shard_sends_what_is_said_of_other_models(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for found in pool(4).run(steps_of_all_kinds, adapter):
        for kind, (sent, figures) in found.items():
            # A strategy has FSDP1 shard frozen parameters apart, which are then not reduced with the others: two of
            # `up`.
            apart = 2 * 4 * (32 * 64 + 64) // 4 if str(adapter) == "fsdp1" and kind == "partly frozen" else 0
            assert figures["inter/full_shard_bytes"] == sent - apart, kind
            assert figures["inter/share"] >= 1, kind


def watched_base(adapter: Adapter) -> tuple[dict[str, float], Any, int]:
    """In a worker: a step on a frozen base that is quantized, and the numbers of frozen values."""
    net = models.make_net(frozen=True, **dict(MODEL))
    strategy = Strategy.mixzpp(gpus_per_node=GPUS)
    frozen = sum(p.numel() for p in net.parameters() if not p.requires_grad)
    model = adapter.shard(net, Case(model=MODEL), strategy)
    with monitor(model) as watch:
        train(adapter, model, Case(steps=1))
        figures_of(watch)
        before = total(model)
        train(adapter, model, Case(steps=1))
        figures = figures_of(watch)
    return figures, {hop: total(model)[hop] - before[hop] for hop in HOPS}, frozen


@over_adapters
def test_a_frozen_base_counts(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for figures, sent, frozen in pool(4).run(watched_base, adapter):
        assert frozen > 0
        assert {hop: figures["/".join((*hop, "bytes"))] for hop in HOPS} == sent
        assert figures["inter/share"] < 0.5


# ---- the life of a monitor


def life(adapter: Adapter) -> dict[str, Any]:
    """In a worker: figures around resets of traffic(), second monitors and steps that are too long, and on one node."""
    found: dict[str, Any] = {}
    model = adapter.make(Case(model=MODEL), GGG)
    with monitor(model) as watch:
        for part in (model, model.blocks):
            with pytest.raises(RuntimeError, match="another monitor measures this"):
                monitor(part)
        train(adapter, model, Case(steps=1))
        found["sent"], found["reset"] = traffic(model, reset=True), traffic(model)
        found["first"] = figures_of(watch)
        train(adapter, model, Case(steps=1))
        found["sent then"], found["second"] = traffic(model), figures_of(watch)
        with patch.object(hop_timer, "MOST_INTERVALS", 5), patch("fsdp_zpp.runtime.monitor.MOST_INTERVALS", 5):
            train(adapter, model, Case(steps=1))
            found["kept"], found["long"] = len(watch._timer.hops), figures_of(watch)
        train(adapter, model, Case(steps=1))
        found["after the long"] = figures_of(watch)
    watch.close()
    with pytest.raises(RuntimeError, match="this monitor is closed"):
        watch.step()
    with monitor(model.blocks) as part:
        assert isinstance(part, Monitor)
    train(adapter, model, Case(steps=1))
    on_one_node = adapter.make(Case(model=MODEL), Strategy(gpus_per_node=4))
    with monitor(on_one_node) as watch:
        train(adapter, on_one_node, Case(steps=1))
        found["one node"] = figures_of(watch)
    return found


@over_adapters
def test_a_monitor_measures_until_it_is_closed(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for found in pool(4).run(life, adapter):
        first, second, long = found["first"], found["second"], found["long"]
        assert first["weights/inter/ms"] > 0
        # A reset of traffic() begins anew, for traffic() alone.
        assert found["sent"] == found["sent then"]
        assert not any(nbytes for levels in found["reset"].values() for nbytes in levels.values())
        assert first["weights/inter/bytes"] == second["weights/inter/bytes"] == found["sent"]["gather"]["inter"]
        # A long step has no times.
        assert found["kept"] == 5
        assert long["weights/inter/bytes"] > 0
        times = {"/".join((*hop, what)) for hop in HOPS for what in ("ms", "exposed_ms")}
        assert {name for name in found["after the long"] if name not in long} == times
        # Shares need all bytes, also those of torch's own collectives, which nobody counts.
        assert not {key for key in found["one node"] if "share" in key or "full_shard" in key}


def gathers_outside_waits(adapter: Adapter) -> tuple[int, int]:
    """In a worker: gathers of a step that no wait encloses, of how many: the host makes them where a stream waits."""
    case = Case(model=MODEL, micro_batches=2)
    model = adapter.make(case, Strategy("GGG", gpus_per_node=GPUS))
    with monitor(model) as watch:
        waits = CommunicationWaits(model, torch.device("cpu"))
        train(adapter, model, case)
        hops = [hop for hop in watch._timer.hops if hop.kind == "gather"]
        intervals: Any = waits.take()
        waits.remove()
        train(adapter, model, case)
        assert not waits.take()
    assert all(one[0] <= one[1] <= other[0] for one, other in pairwise(intervals))
    outside = [hop for hop in hops if not any(a <= hop.start and hop.end <= b for a, b in intervals)]
    return len(outside), len(hops)


@pytest.mark.skipif(device_type() != "cpu", reason="a GPU's hops are timed on its streams, not on the host")
@over_adapters
def test_gathers_are_made_where_the_computation_waits(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for outside, hops in pool(4).run(gathers_outside_waits, adapter):
        assert hops > 0
        assert outside == 0


def compiled(adapter: Adapter) -> tuple[int, int]:
    """In a worker: how often the computation of compiled layers waits in a step, and of others."""
    found = []
    for is_compiled in (True, False):
        torch._dynamo.reset()
        net = models.make_net(blocks=12)  # more than dynamo compiles a function for
        for block in net.blocks if is_compiled else []:
            block.compile(backend="aot_eager", fullgraph=True)
        model = adapter.shard(net, Case(), Strategy("GGG", gpus_per_node=GPUS))
        with monitor(model):
            waits = CommunicationWaits(model, torch.device("cpu"))
            train(adapter, model, Case(steps=2))
            found.append(len(waits.take()))
            waits.remove()
    return found[0], found[1]


@over_adapters
def test_hooks_are_not_compiled(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for ours, eager in pool(4).run(compiled, adapter):
        assert ours == eager > 0


def offloaded() -> dict[str, float]:
    """In a worker: figures of a model whose parameters are on the CPU."""
    adapter = Fsdp2((("offload_policy", CPUOffloadPolicy(pin_memory=False)),))
    case = Case(model=MODEL, clip=None)
    [*_, (figures, _)] = watched(adapter, case, Strategy.zeropp(gpus_per_node=GPUS))
    return figures


def test_parameters_may_be_offloaded(pool: Callable[[int], Pool]) -> None:
    assert all(figures["weights/inter/ms"] > 0 for figures in pool(4).run(offloaded))


# ---- arithmetic


def test_a_step_is_complete_when_all_its_times_have_come() -> None:
    to_come = Mock(query=lambda: False)
    complete = _Step(1, 0.0, 1.0, [], [(0.0, 1.0)], {}, None)
    assert complete.is_complete()
    assert not dataclasses.replace(complete, end=to_come).is_complete()
    assert not dataclasses.replace(complete, waits=[(0.0, to_come)]).is_complete()
    hop = hop_timer.TimedHop("gather", "inter", 0.0, to_come)
    assert not dataclasses.replace(complete, hops=[hop]).is_complete()


def test_overlaps_are_those_of_all_pairs() -> None:
    draw = random.Random(0)
    for _ in range(100):
        times = sorted(draw.choices(range(60), k=20))
        waits = [(float(a), float(b)) for a, b in zip(times[::2], times[1::2], strict=True)]
        hops = [(float(a), float(a + draw.randrange(20))) for a in draw.choices(range(60), k=10)]
        pairs = [(max(a, c), min(b, d)) for a, b in hops for c, d in waits if a < d and c < b]
        assert sorted(overlaps(hops, waits)) == sorted(pairs)
    assert list(overlaps([(0, 10), (20, 30)], [(-1, 2), (5, 6), (9, 21)])) == [(0, 2), (5, 6), (9, 10), (20, 21)]
    assert list(overlaps([(0, 1)], [(1, 2)])) == []
