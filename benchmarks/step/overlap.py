"""Communication that computation hides, from a Chrome trace that torch.profiler wrote.

[Note: Time of communication]
A NCCL kernel runs from when its rank enters the collective until the data has come, and spins while it waits for the
other ranks. So the time of communication includes waiting for a rank that computes, on a fast network, too. Copies by
the GPU's copy engines are neither communication nor computation.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same points in time as disjoint intervals (start, end), in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def intersection(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """Return the intersection of two unions, as a union."""
    common, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def length(intervals: list[Interval]) -> float:
    """Return the length of a union, in the unit of its intervals."""
    return sum(end - start for start, end in intervals)


def split(events: Iterable[dict[str, Any]]) -> tuple[list[Interval], list[Interval]]:
    """Split a trace into NCCL's kernels and all others.

    Args:
        events: ``traceEvents`` of a trace, times in microseconds. Only kernels on the GPU count: annotations, too, may
            be called nccl and have a time on the GPU.

    Returns:
        The intervals of NCCL's kernels, then those of all other kernels.
    """
    communication, computation = [], []
    for event in events:
        if event.get("cat") != "kernel":
            continue
        interval = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        (communication if event["name"].startswith("nccl") else computation).append(interval)
    return communication, computation


def exposed(communication: Iterable[Interval], computation: Iterable[Interval]) -> tuple[float, float]:
    """Return the time with communication, and the part of it without computation, in the unit of the intervals."""
    busy = union(communication)
    return length(busy), length(busy) - length(intersection(busy, union(computation)))


def overlap(trace: Path, steps: int) -> dict[str, float | None]:
    """Return one rank's communication in a gzipped trace of ``steps`` steps, in ms a step.

    The share of exposed communication is None without NCCL.
    """
    with gzip.open(trace, "rt") as file:
        total, alone = exposed(*split(json.load(file)["traceEvents"]))
    return {
        "communication_ms": total / 1e3 / steps,
        "exposed_ms": alone / 1e3 / steps,
        "exposed_share": alone / total if total else None,
    }
