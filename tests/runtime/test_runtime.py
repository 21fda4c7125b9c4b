"""Models as they run: when steps end, a monitor's figures of each, and what is said of an active strategy.

adapters/test_training_laws.py has the line that a model logs of its strategy.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import models
from harness.adapter import STOCK, Adapter, Case, Precision
from harness.covering import ADAPTERS, over_adapters, over_each
from harness.messages import collected
from harness.pool import Pool, device_type
from harness.strategies import BOTH, COARSE, INSIDE_WITH_FEEDBACK
from harness.training import train
from harness.wiretap import wiretap
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdp_zpp import Int4, Int4Delta, Int8, LocalSteps, LoCo, Monitor, Strategy, monitor, traffic
from fsdp_zpp.comm.flat_layout import Sharded
from fsdp_zpp.comm.weight_gather import ShardVersion
from fsdp_zpp.local_steps.fragment import Fragment, Progress
from fsdp_zpp.runtime import lifecycle
from fsdp_zpp.runtime.lifecycle import StepTracker
from fsdp_zpp.runtime.monitor import CommunicationWaits, Coverage, StrategySummary, overlaps, summarize
from fsdp_zpp.strategy.error_feedback import Topology

# ---- steps and modes that models hear of

SYNCHRONIZED = "synchronized"
EVENTS: dict[str, tuple[list[tuple[str, int | None]], int]] = {
    "after the backward": ([(SYNCHRONIZED, 4), ("step", None)], 1),
    "two optimizers": ([(SYNCHRONIZED, 4), ("step", None), ("step", None)], 1),
    "in the backward": ([("step", 4), ("step", 4), (SYNCHRONIZED, 4)], 1),
    "in the backward, some at its end": ([("step", 4), (SYNCHRONIZED, 4), ("step", 4)], 1),
    "all at the end of the backward": ([(SYNCHRONIZED, 4), ("step", 4), ("step", 4)], 1),
    "two backwards": ([("step", 4), (SYNCHRONIZED, 4), ("step", 5), (SYNCHRONIZED, 5)], 2),
    "in a backward within it": ([("step", 5), (SYNCHRONIZED, 4)], 1),
    "at a user's request": ([("step", 4), ("step", 5), (SYNCHRONIZED, None)], 1),
    "in a backward that failed": ([("step", 4), (SYNCHRONIZED, 5)], 0),
    "in one that failed, then after another": ([("step", 4), (SYNCHRONIZED, 5), ("step", None)], 1),
    "without gradients": ([("step", None)], 0),
}


class Counter:
    """Counts steps as local training does: the first end after a synchronization."""

    def __init__(self) -> None:
        self.steps, self.waits = 0, False
        self.moments = SimpleNamespace(saw=lambda optimizer: None)

    def gradients_synchronized(self) -> None:
        self.waits = True

    def step_ended(self) -> None:
        self.steps, self.waits = self.steps + self.waits, False


@pytest.mark.parametrize(("events", "expected"), EVENTS.values(), ids=EVENTS)
def test_each_step_ends_once(events: list[tuple[str, int | None]], expected: int) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    sharded = SimpleNamespace(parameters=lambda: [parameter], is_trained=lambda: True)
    unit: Any = SimpleNamespace(sharded=sharded, errors=None, invalidate=lambda by_step: None)
    counter: Any = Counter()
    tracker, optimizer = StepTracker([unit], local_training=counter), torch.optim.SGD([parameter])
    for event, backward in events:
        with patch.object(lifecycle, "running_backward", lambda backward=backward: backward):
            tracker.gradients_synchronized() if event == SYNCHRONIZED else optimizer.step()
    assert counter.steps == expected


def test_a_model_may_be_freed_in_the_middle_of_a_step() -> None:
    trackers = [StepTracker([]), StepTracker([])]
    alive = weakref.WeakSet(trackers)
    free = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: (trackers.clear(), gc.collect()))
    another = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: None)
    try:
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()
    finally:
        free.remove()
        another.remove()
    assert len(alive) == 0


class Averaging(torch.optim.SGD):
    """Has the methods of schedule-free optimizers."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


def test_a_change_of_mode_is_heard_once() -> None:
    calls: list[object] = []
    optimizer = Averaging([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    tracker: Any = StepTracker([])
    tracker.optimizer_switched = calls.append
    for _ in range(3):
        optimizer.train()
    assert len(calls) == 1
    optimizer.eval()
    assert len(calls) == 2
    optimizer.load_state_dict(optimizer.state_dict())  # perhaps saved in the other mode
    optimizer.eval()
    assert len(calls) == 3
    Averaging([torch.nn.Parameter(torch.zeros(1))], lr=0.1).eval()  # another one is in a mode of its own
    assert len(calls) == 4
    del tracker
    optimizer.train()
    assert len(calls) == 4


def test_a_version_tells_a_write_a_move_and_a_move_back() -> None:
    """Counts alone would not: a tensor that has taken another's place has been written to as often."""
    version, one, other = ShardVersion(), torch.zeros(4), torch.zeros(4)
    seen = [version.of([tensor], [tensor]) for tensor in (one, other, one)]
    one.add_(1)
    seen.append(version.of([one], [one]))
    assert len(set(seen)) == 4
    assert version.of([one], [one]) == seen[-1]


def test_progress_that_was_saved_before_exchanges_were_counted_is_read() -> None:
    outer: Any = SimpleNamespace(names=frozenset(), label="unit")
    fragment = Fragment(LocalSteps(), outer, SimpleNamespace(sharded=Sharded(), invalidate=int))
    progress: Any = {"made": 7, "exchanged": 6, "arrives": None}
    fragment.load_state_dict({"progress": progress, "exchanges": None, "weights": {}, "changed": [], "sent": []})
    assert fragment.progress == Progress(made=7, exchanged=6, arrives=None, sent=0, apart=True)


# ---- what a monitor says of each step

GPUS = 2

# All shapes are multiples of the ranks, so that neither FSDP pads.
MODEL = (("blocks", 2), ("width", 32), ("hidden", 64), ("vocabulary", 16))
STRATEGIES = {scopes: Strategy(scopes, gpus_per_node=GPUS) for scopes in ("IGG", "III", "NNN")} | {
    "zeropp": Strategy.zeropp(gpus_per_node=GPUS),
    "loco": Strategy.loco(gpus_per_node=GPUS),
    "local": Strategy("III", local_steps=LocalSteps(2), gpus_per_node=GPUS),
    "mixzpp": Strategy.mixzpp(gpus_per_node=GPUS),
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


@over_each(rest=False, adapter=ADAPTERS, strategy=STRATEGIES, micro_batches=[1, 2])
def test_bytes_are_those_of_traffic_and_times_are_possible(
    pool: Callable[[int], Pool], adapter: Adapter, strategy: Strategy, micro_batches: int
) -> None:
    case = Case(model=MODEL, steps=2, micro_batches=micro_batches, frozen=strategy.frozen is not None)
    for steps in pool(4).run(watched, adapter, case, strategy):
        assert [figures["step"] for figures, _ in steps] == [1, 2]
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
        assert not case.frozen or steps[1][0]["inter/share"] < 0.5


KINDS = [
    *("plain", "two micro-batches", "bf16", "partly frozen", "evaluated"),
    *("without root, no_reentrant", "reentrant"),
]


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
    else:
        precision = Precision(torch.bfloat16, torch.float32) if kind == "bf16" else None
        model = adapter.shard(net, Case(precision=precision), strategy)

    def step() -> None:
        if kind == "two micro-batches":
            with adapter.micro_batch(model, last=False, synced=False):
                models.loss_of(model, models.batch(0, 1)).backward()
            with adapter.micro_batch(model, last=True, synced=False):
                models.loss_of(model, models.batch(0, 0)).backward()
        else:
            models.loss_of(model, models.batch(0, 0)).backward()

    step()
    watch = None if strategy is STOCK else monitor(model)
    # The wiretap sees one collective over all ranks, whose bytes go to the other node once.
    with wiretap(GPUS) as tap:
        step()
        if kind == "evaluated":  # once: torch leaves the root unsharded after it, and then gathers it no more
            with torch.no_grad():
                models.loss_of(model, models.batch(1, 0))
    return tap.total("inter"), {} if watch is None else figures_of(watch)


def steps_of_all_kinds(adapter: Adapter) -> dict[str, tuple[int, dict[str, float]]]:
    """In a worker: what stock sends between nodes in a step of each kind of model, and what a monitor says of ours."""
    return {kind: (one_step(adapter, STOCK, kind)[0], one_step(adapter, GGG, kind)[1]) for kind in KINDS}


@over_adapters
def test_full_shard_sends_what_is_said(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for found in pool(4).run(steps_of_all_kinds, adapter):
        for kind, (sent, figures) in found.items():
            # A strategy has FSDP1 shard frozen parameters apart, which are then not reduced with the others: two of
            # `up`.
            apart = 2 * 4 * (32 * 64 + 64) // 4 if str(adapter) == "fsdp1" and kind == "partly frozen" else 0
            assert figures["inter/full_shard_bytes"] == sent - apart, kind
            assert figures["intra/full_shard_bytes"] == 2 * (sent - apart), kind
            assert figures["inter/share"] >= 1, kind


# ---- the life of a monitor


def measure_until_closed(adapter: Adapter) -> None:
    """In a worker: fail unless a monitor does so around resets of traffic(), second monitors and steps too long."""
    model, once = adapter.make(Case(model=MODEL), GGG), Case(steps=1)
    with monitor(model) as watch:
        for part in (model, model.blocks):
            with pytest.raises(RuntimeError, match="another monitor measures this"):
                monitor(part)
        train(adapter, model, once)
        sent = traffic(model, reset=True)
        assert not any(nbytes for levels in traffic(model).values() for nbytes in levels.values())
        first = figures_of(watch)
        assert first["weights/inter/ms"] > 0
        train(adapter, model, once)
        second = figures_of(watch)
        assert first["weights/inter/bytes"] == second["weights/inter/bytes"] == sent["gather"]["inter"]
        assert traffic(model) == sent
        with patch("fsdp_zpp.comm.hops.MOST_INTERVALS", 5), patch("fsdp_zpp.runtime.monitor.MOST_INTERVALS", 5):
            train(adapter, model, once)
            assert len(watch._timer.hops) == 5
            long = figures_of(watch)
        assert long["weights/inter/bytes"] > 0
        train(adapter, model, once)
        assert figures_of(watch).keys() - long == {
            "/".join((*hop, what)) for hop in HOPS for what in ("ms", "exposed_ms")
        }
    watch.close()
    with pytest.raises(RuntimeError, match="this monitor is closed"):
        watch.step()
    with monitor(model.blocks) as part:
        assert isinstance(part, Monitor)
    train(adapter, model, once)
    on_one_node = adapter.make(Case(model=MODEL), Strategy(gpus_per_node=4))
    with monitor(on_one_node) as watch:
        train(adapter, on_one_node, once)
        # Shares need all bytes, also those of torch's own collectives, which nobody counts.
        assert not [name for name in figures_of(watch) if "share" in name or "full_shard" in name]


@over_adapters
def test_a_monitor_measures_until_it_is_closed(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    pool(4).run(measure_until_closed, adapter)


def waits_of(adapter: Adapter) -> list[tuple[int, int, int]]:
    """In a worker: gathers of a step that no wait encloses, of how many, and waits: of eager layers, and compiled.

    The host makes the gathers where a stream waits.
    """
    found, case = [], Case(steps=1, micro_batches=2)
    for is_compiled in (False, True):
        torch._dynamo.reset()
        net = models.make_net(blocks=9)  # more than dynamo compiles a function for
        for block in net.blocks if is_compiled else []:
            block.compile(backend="aot_eager", fullgraph=True)
        model = adapter.shard(net, case, GGG)
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
        found.append((len(outside), len(hops), len(intervals)))
    return found


@pytest.mark.skipif(device_type() != "cpu", reason="a GPU's hops are timed on its streams, not on the host")
@over_adapters
def test_gathers_are_made_where_the_computation_waits_also_that_of_compiled_layers(
    pool: Callable[[int], Pool], adapter: Adapter
) -> None:
    for eager, compiled in pool(4).run(waits_of, adapter):
        assert eager == compiled
        outside, hops, waits = eager
        assert outside == 0
        assert min(hops, waits) > 0


def test_overlaps_are_those_of_all_pairs() -> None:
    draw = random.Random(0)
    for _ in range(100):
        times = sorted(draw.choices(range(60), k=20))
        waits = [(float(a), float(b)) for a, b in zip(times[::2], times[1::2], strict=True)]
        hops = [(float(a), float(a + draw.randrange(20))) for a in draw.choices(range(60), k=10)]
        pairs = [(max(a, c), min(b, d)) for a, b in hops for c, d in waits if a < d and c < b]
        assert sorted(overlaps(hops, waits)) == sorted(pairs)


# ---- what is active of a strategy on a layout, and what is not and why

TWO_NODES, ONE, ALONE = Topology(4, 2), Topology(4, 4), Topology(1, 1)
DELTA = Strategy("IGG", weights=Int4Delta(64, whole=Int8(64)), gpus_per_node=2)


def on(topology: Topology, strategy: Strategy, error_nbytes: int = 0) -> StrategySummary:
    return summarize(strategy, strategy.resolve(topology), error_nbytes)


def test_a_summary_names_what_is_inactive_and_why() -> None:
    zeropp = Strategy.zeropp()
    assert len(on(TWO_NODES, zeropp).active) == 4
    assert not on(TWO_NODES, zeropp).inactive
    assert str(on(ONE, zeropp)) == (
        "weights gathered in full precision; gradients reduced in full precision; "
        "NOT active: weights gathered as int8(256), gradients reduced as int4(128) "
        "(one node: no gain on fast links; on slow ones, say gpus_per_node=1); "
        "secondary shard of the weights kept in each node (one node: no inter-node hop)"
    )
    # A codec that was derived is not missed without its hop; one that was asked for is.
    assert not on(Topology(4, 1), zeropp).inactive
    assert "no intra-node hop" in str(on(Topology(4, 1), Strategy.zeropp(intra_gradients=Int8(128))))
    (alone,) = on(ALONE, zeropp).inactive
    assert alone.endswith("gradients reduced as int4(128) on the inter-node hop (one rank: nothing is sent)")
    delta = "weights gathered as int8(64), changes as int4(64)"
    assert delta in on(TWO_NODES, DELTA).active
    assert on(ONE, DELTA).inactive[0].startswith(f"{delta} (one node: no gain")


def test_error_feedback_is_active_on_each_hop_by_itself() -> None:
    inside = on(ONE, INSIDE_WITH_FEEDBACK, 1024)
    of_hop = "error feedback on the intra-node hop (beta 0.8, reset every 1024 steps, kept in fp32; 1 KiB a rank)"
    assert {"gradients reduced as int8(64) on the intra-node hop", of_hop} < {*inside.active}
    assert "error feedback on the inter-node hop (one node: no inter-node hop)" in inside.inactive
    assert on(ONE, Strategy("GGG", intra_gradients=Int8(64))).inactive == ()
    assert all("one rank: nothing is sent" in text for text in on(ALONE, Strategy.loco()).inactive)
    both = on(TWO_NODES, replace(COARSE, error_feedback=BOTH), 1536)
    of_both = "error feedback on both hops (beta 0.8, reset every 1024 steps, kept in int8(32); 1.5 KiB a rank)"
    assert of_both in both.active


def partly(adapter: Adapter) -> list[tuple[str, str]]:
    """In a worker: what a model logs of which only the root has a strategy, the blocks being torch's own."""
    with collected() as records:
        net = models.make_net()
        for i, block in enumerate(net.blocks):
            net.blocks[i] = adapter.wrap(block, STOCK)
        adapter.wrap(net, Strategy.zeropp(gpus_per_node=2))(models.batch(0, 0) % 61)
    return records


@over_adapters
def test_the_line_says_which_share_of_a_model_has_the_strategy(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    net = models.Net()
    numel = sum(p.numel() for p in net.parameters())
    own = numel - sum(p.numel() for p in net.blocks.parameters())
    [(level, line)] = pool(4).run(partly, adapter)[0]
    assert level == "INFO"
    share = f"1 of 3 units, {100 * own / numel:.0f} % of parameters"
    assert line.startswith(f"Net: IGG on 2 nodes x 2, {share}: weights gathered as int8(256); ")


def test_a_share_is_not_rounded_to_all_or_nothing() -> None:
    assert str(Coverage(1, 18, 5, 100)) == "1 of 5 units, 18 % of parameters"
    assert str(Coverage(1, 1, 5, 1000)) == "1 of 5 units, under 1 % of parameters"
    assert str(Coverage(4, 999, 5, 1000)) == "4 of 5 units, over 99 % of parameters"
    assert str(Coverage(1, 0, 5, 1000)) == "1 of 5 units, 0 % of parameters"


def test_reductions_of_synchronous_and_of_local_steps_are_told_apart() -> None:
    strategy = Strategy("III", gradients=Int4(128), error_feedback=LoCo(), local_steps=LocalSteps(8, start=100))
    found = on(TWO_NODES, strategy)
    assert not found.inactive
    assert found.active[1:5] == (
        "gradients reduced as int8(128) on the intra-node hop in synchronous steps",
        "gradients reduced as int4(128) on the inter-node hop in synchronous steps",
        "gradients reduced in full precision in local steps",
        f"local steps, weights exchanged between nodes {strategy.local_steps}",
    )
    assert found.active[5].startswith("error feedback on the inter-node hop")
    assert "local steps, weights" in str(on(ONE, strategy).inactive)
    assert not any(text.endswith("in local steps") for text in on(Topology(4, 1), strategy).active)
