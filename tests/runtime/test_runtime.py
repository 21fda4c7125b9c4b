"""Models as they run: when steps end, and what is said of an active strategy.

adapters/test_training_laws.py has the line that a model logs of its strategy.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import models
from harness.adapter import STOCK, Adapter
from harness.covering import over_adapters
from harness.messages import collected
from harness.pool import Pool
from harness.strategies import BOTH, COARSE, INSIDE_WITH_FEEDBACK
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdp_zpp import Int4, Int4Delta, Int8, LocalSteps, LoCo, Strategy
from fsdp_zpp.comm.weight_gather import ShardVersion
from fsdp_zpp.runtime import lifecycle
from fsdp_zpp.runtime.lifecycle import StepTracker
from fsdp_zpp.runtime.log_line import Coverage, StrategySummary, summarize
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
