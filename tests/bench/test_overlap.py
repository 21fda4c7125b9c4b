"""The interval arithmetic behind the share of communication that is not hidden."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from fsdp_zpp.bench.overlap import Interval, exposed, overlap, union

INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)).map(lambda pair: (pair[0], sum(pair))))


def ticks(intervals: list[Interval]) -> set[int]:
    """Every whole unit of time that the intervals cover."""
    return {tick for start, end in intervals for tick in range(int(start), int(end))}


@given(INTERVALS, INTERVALS)
def test_exposed_time_is_what_counting_ticks_gives(communication: list[Interval], computation: list[Interval]) -> None:
    busy, alone = exposed(communication, computation)
    assert busy == len(ticks(communication))
    assert alone == len(ticks(communication) - ticks(computation))


@given(INTERVALS)
def test_a_union_is_sorted_and_disjoint(intervals: list[Interval]) -> None:
    merged = union(intervals)
    assert ticks(merged) == ticks(intervals)
    assert all(left[1] < right[0] for left, right in pairwise(merged))


def test_a_trace_counts_kernels_and_no_annotations(tmp_path: Path) -> None:
    events = [
        {"cat": "kernel", "name": "ncclDevKernel_AllGather_RING_LL", "ts": 0, "dur": 6000},
        {"cat": "kernel", "name": "gemm", "ts": 4000, "dur": 4000},
        {"cat": "gpu_user_annotation", "name": "nccl:all_gather", "ts": 0, "dur": 9000},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 0, "dur": 1000},
        {"ph": "M", "name": "process_name"},
    ]
    trace = tmp_path / "trace.json.gz"
    with gzip.open(trace, "wt") as file:
        json.dump({"traceEvents": events}, file)
    assert overlap(trace, steps=2) == {
        "communication_ms": 3.0,
        "exposed_ms": 2.0,
        "exposed_share": pytest.approx(2 / 3),
    }


def test_a_trace_without_nccl_has_no_share(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json.gz"
    with gzip.open(trace, "wt") as file:
        json.dump({"traceEvents": []}, file)
    assert overlap(trace, steps=1)["exposed_share"] is None
