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

from fsdp_zpp.bench.contenders import Training

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
    return sum(end - start for start, end in union(intervals))


def exposed(communication: Iterable[Interval], computation: Iterable[Interval]) -> tuple[float, float]:
    """Return the time with communication, and the part of it without computation, in the unit of the intervals."""
    busy, others = union(communication), union(computation)
    return length(*busy), length(*busy, *others) - length(*others)


def events_of(trace: Path) -> list[dict[str, Any]]:
    with gzip.open(trace, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
        return events


def kernels(events: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], bool, Interval]]:
    """Yield the kernels of a trace, each with whether it is NCCL's, and its interval."""
    for event in events:
        # Annotations, too, may be called nccl and have a time on the GPU.
        if event.get("cat") == "kernel":
            start = float(event["ts"])
            yield event, event["name"].startswith("nccl"), (start, start + float(event["dur"]))


def overlap(trace: Path, steps: int) -> dict[str, float | None]:
    """Return one rank's communication in a gzipped trace of ``steps`` steps, in ms a step."""
    by_kind: dict[bool, list[Interval]] = {True: [], False: []}
    for _, is_nccls, interval in kernels(events_of(trace)):
        by_kind[is_nccls].append(interval)
    total, alone = exposed(by_kind[True], by_kind[False])
    return {
        "communication_ms": total / 1e3 / steps,
        "exposed_ms": alone / 1e3 / steps,
        "exposed_share": alone / total if total else None,
    }


def traced(training: Training, tokens: torch.Tensor, trace: Path) -> dict[str, float | None]:
    """Trace further steps on rank 0, and return its figures of communication, on the others nothing. Collective.

    The gzipped trace is written to ``trace``.
    """
    if dist.get_rank() != 0:
        for _ in range(TRACED_STEPS):
            training.step(tokens)
        return {}
    on_gpu = tokens.is_cuda
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities, acc_events=True) as profiler:  # which warns without
        for _ in range(TRACED_STEPS):
            training.step(tokens)
        if on_gpu:
            torch.cuda.synchronize()
    trace.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(trace))
    return overlap(trace, TRACED_STEPS)
