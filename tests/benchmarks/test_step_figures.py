"""Charts of steps, whose texts all have room, and the share of communication that is not hidden."""

from __future__ import annotations

import gzip
import json
import random
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from harness.benchmarks import load
from hypothesis import given, strategies as st

step_charts, overlap = load("common", "step_charts"), load("step", "overlap")
Interval = tuple[float, float]


def row(label: str, step_ms: float, peak_gib: float | None, is_torchs: bool = False) -> dict[str, Any]:
    """Measurements of a strategy, as far as they are drawn."""
    times = {"step_ms": step_ms, "fastest_ms": 0.9 * step_ms, "slowest_ms": 1.2 * step_ms}
    return {"strategy": label, "label": label, "is_torchs": is_torchs, "peak_gib": peak_gib, **times}


@pytest.mark.parametrize("seed", range(4))
def test_texts_neither_leave_the_figure_nor_touch_each_other(seed: int) -> None:
    chosen = random.Random(seed)
    bars = []
    for index in range(chosen.randrange(1, 9)):
        times = [10 ** chosen.uniform(2, 4) for _ in range(chosen.choice([1, 1, 2]))]
        name = " ".join(["zeropp"] * chosen.randrange(1, 7))
        text = " to ".join(f"{time:.0f}" for time in times)
        rows = [row(name, time, 10 ** chosen.uniform(0, 2)) for time in times]
        color = (step_charts.PEER, step_charts.OURS)[index % 2]
        bars.append(step_charts.Bar(name, text, chosen.choice(["", "3.1x", "10.1-15.2x"]), color, rows))
    figure = step_charts.steps_figure(bars, "Step time in ms, and speedup over FULL_SHARD", "a note")
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts if text.get_text()]
    for box in boxes:
        assert figure.bbox.x0 - 1 <= box.x0 <= box.x1 <= figure.bbox.x1 + 1
        assert figure.bbox.y0 <= box.y0 <= box.y1 <= figure.bbox.y1
    assert not [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]


INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)).map(lambda pair: (pair[0], sum(pair))))


def ticks(intervals: list[Interval]) -> set[int]:
    """Every whole unit of time that the intervals cover."""
    return {tick for start, end in intervals for tick in range(int(start), int(end))}


@given(INTERVALS, INTERVALS)
def test_exposed_time_is_what_counting_ticks_gives(communication: list[Interval], computation: list[Interval]) -> None:
    busy, alone = overlap.exposed(communication, computation)
    assert busy == len(ticks(communication))
    assert alone == len(ticks(communication) - ticks(computation))
    merged = overlap.union(communication)
    assert ticks(merged) == ticks(communication)
    assert all(left[1] < right[0] for left, right in pairwise(merged))


def test_a_trace_counts_kernels_and_no_annotations(tmp_path: Path) -> None:
    events = [
        {"cat": "kernel", "name": "ncclDevKernel_AllGather_RING_LL", "ts": 0, "dur": 6000},
        {"cat": "kernel", "name": "gemm", "ts": 4000, "dur": 4000},
        {"cat": "gpu_user_annotation", "name": "nccl:all_gather", "ts": 0, "dur": 9000},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 0, "dur": 1000},
    ]
    trace = tmp_path / "trace.json.gz"
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    shown = {"communication_ms": 3.0, "exposed_ms": 2.0, "exposed_share": pytest.approx(2 / 3)}
    assert overlap.overlap(trace, steps=2) == shown
