"""The data that a picture of a step is drawn from, and the ratios of steps that are taken in turn."""

from __future__ import annotations

import re
from typing import Any

import pytest
from harness.benchmarks import load

timeline = load("step", "timeline")
BETWEEN, COMPUTATION, INSIDE = timeline.BETWEEN, timeline.COMPUTATION, timeline.INSIDE
lanes, last_step, rows_of, summary = timeline.lanes, timeline.last_step, timeline.rows_of, timeline.summary
figures = load("step", "figures")
paired = load("step", "interleaved").paired


def kernel(name: str, start: float, duration: float, ranks: str | None = None) -> dict[str, Any]:
    """A kernel's event in a trace, times in ms."""
    arguments = {} if ranks is None else {"Process Group Ranks": ranks}
    return {"cat": "kernel", "name": name, "ts": 1e3 * start, "dur": 1e3 * duration, "args": arguments}


def optimizer(end: float) -> dict[str, Any]:
    """An optimizer step's annotation on the GPU, times in ms."""
    return {"cat": "gpu_user_annotation", "name": "Optimizer.step#SGD.step", "ts": 1e3 * end - 500, "dur": 500}


TRACE = [
    optimizer(100),
    kernel("ncclDevKernel_AllGather_RING_LL", 90, 20, "[0, 2]"),  # half of it before the step
    kernel("ncclDevKernel_AllGather_RING_LL", 112, 4, "[2, 3]"),
    kernel("ncclDevKernel_SendRecv", 120, 10, "[0, 1, 2, 3]"),
    kernel("gemm", 115, 10),
    {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 1e6, "args": {}},
    optimizer(150),
]


def test_who_talks_decides_the_lane() -> None:
    found = lanes(TRACE, gpus_per_node=2)
    assert [kind for kind, _ in found[BETWEEN]] == ["gather", "reduce"]
    assert [interval for _, interval in found[INSIDE]] == [(112e3, 116e3)]
    assert [interval for _, interval in found[COMPUTATION]] == [(115e3, 125e3)]
    assert not lanes(TRACE, gpus_per_node=4)[BETWEEN]


def test_a_step_lies_between_two_optimizer_steps() -> None:
    step = last_step(TRACE)
    assert step == (100e3, 150e3)
    assert summary(lanes(TRACE, gpus_per_node=2), step) == [
        "a step of 50 ms",
        "inter-node: 20.0 ms, of which 5.0 ms beside others",
        "intra-node: 4.0 ms, of which 1.0 ms beside others",
        "computation: 10.0 ms, of which 6.0 ms beside others",
    ]
    with pytest.raises(ValueError, match="but the trace has 1 of them"):
        last_step(TRACE[:-1])


def test_a_picture_shows_what_each_lane_does_in_a_step() -> None:
    trace = [*TRACE, kernel("gemm", 125.05, 5)]  # so soon after the other that no gap could be seen
    rows = rows_of(lanes(trace, gpus_per_node=2), last_step(trace))
    assert [tuple(row.values()) for row in rows] == [
        (BETWEEN, "gather", 0, 10),
        (BETWEEN, "reduce", 20, 30),
        (INSIDE, "gather", 12, 16),
        (COMPUTATION, "", 15, 30.05),
    ]
    drawing = figures.trace({"rows": rows, "step_ms": 50})
    shown = re.findall(r">([A-Z][a-z-]+)<", drawing)
    assert shown == ["Inter-node", "Intra-node", "Computation", "Weights", "Gradients"]
    assert drawing.count("var(--gradients)") > 1
    assert drawing.count("var(--weights)") > 1


def test_ratios_are_of_a_round() -> None:
    drifting = [1.0, 2.0, 4.0, 8.0, 16.0]
    assert paired(drifting, drifting) == [1.0, 1.0, 1.0]
    assert paired([3.0 * time for time in drifting], drifting) == [3.0, 3.0, 3.0]
