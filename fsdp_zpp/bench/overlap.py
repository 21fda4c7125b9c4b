"""Communication that computation hides, from a Chrome trace that torch.profiler wrote.

[Note: Time of communication]
A NCCL kernel runs from when its rank enters the collective until the data has come, and spins while it waits for the
other ranks. So the time of communication includes waiting for a rank that computes, on a fast network, too. Copies by
the GPU's copy engines are neither communication nor computation.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from .training import Training

TRACED_STEPS = 2
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


def length(*intervals: Interval) -> float:
    """Return the time that intervals cover, in their unit."""
    return sum(end - start for start, end in union(intervals))


def exposed(communication: Iterable[Interval], computation: Iterable[Interval]) -> tuple[float, float]:
    """Return the time with communication, and the part of it without computation, in the unit of the intervals."""
    busy, others = union(communication), union(computation)
    return length(*busy), length(*busy, *others) - length(*others)


def events_of(trace: Path) -> list[dict[str, Any]]:
    """Read the events of a gzipped trace, with times in microseconds."""
    with gzip.open(trace, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
        return events


def kernels(events: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], bool, Interval]]:
    """Yield the kernels of a trace, each with whether it is NCCL's, and its interval.

    Annotations, too, may be called nccl and have a time on the GPU.
    """
    for event in events:
        if event.get("cat") == "kernel":
            yield (
                event,
                event["name"].startswith("nccl"),
                (float(event["ts"]), float(event["ts"]) + float(event["dur"])),
            )


def overlap(trace: Path, steps: int) -> dict[str, float | None]:
    """Return one rank's communication in a gzipped trace of ``steps`` steps, in ms a step.

    The share of exposed communication is None without NCCL.
    """
    by_kind: dict[bool, list[Interval]] = {True: [], False: []}
    for _, is_nccls, interval in kernels(events_of(trace)):
        by_kind[is_nccls].append(interval)
    total, alone = exposed(by_kind[True], by_kind[False])
    return {
        "communication_ms": total / 1e3 / steps,
        "exposed_ms": alone / 1e3 / steps,
        "exposed_share": alone / total if total else None,
    }


def traced(training: Training, tokens: torch.Tensor, trace: Path, with_host: bool = True) -> dict[str, float | None]:
    """Trace further steps on rank 0, write the trace, and return its figures of communication. Collective.

    Args:
        training: What makes the steps.
        tokens: Those of this rank.
        trace: File for the gzipped trace; its folder is made.
        with_host: Whether the trace also has what the CPU does, which takes long to write.

    Returns:
        The figures on rank 0, nothing on the others.
    """
    if dist.get_rank() != 0:
        for _ in range(TRACED_STEPS):
            training.step(tokens)
        return {}
    on_gpu = tokens.is_cuda
    activities = [ProfilerActivity.CPU] * with_host + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities, acc_events=True) as profiler:  # which warns without
        for _ in range(TRACED_STEPS):
            training.step(tokens)
        if on_gpu:
            torch.cuda.synchronize()
    trace.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(trace))
    return overlap(trace, TRACED_STEPS)
