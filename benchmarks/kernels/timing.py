"""Time of a kernel on a GPU: from memory, not from caches, and without the host's share.

A case is prepared as often as it takes for its tensors to exceed the second-level cache many times, all calls are
captured into one CUDA graph, and the graph is replayed: each call finds its input in memory and writes where nothing is
cached, and calls follow one another as in a stream that never runs dry. At small sizes that includes the kernel's start
and end (about a microsecond), but no Python, and no launch from the host.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

ROTATED_NBYTES = 2**29  # 9 times an H200's second-level cache
MIN_LAPS = 7
LAPS_MS = 30

Prepared = tuple[Callable[[], object], int]


@dataclass(frozen=True)
class Case:
    """A kernel at one size.

    Args:
        name: Name in tables.
        prepare: Makes a call on tensors of its own, and returns it with the bytes that it reads and writes.
    """

    name: str
    prepare: Callable[[], Prepared]


def tensors_nbytes(*tensors: Tensor) -> int:
    """Return the bytes of tensors together."""
    return sum(tensor.nbytes for tensor in tensors)


def measure(case: Case) -> float:
    """Return the bytes that a case reads and writes in a second, in the median lap over all its prepared calls."""
    call, nbytes = case.prepare()
    count = math.ceil(ROTATED_NBYTES / nbytes)
    calls = [call, *(case.prepare()[0] for _ in range(count - 1))]
    call()
    torch.cuda.synchronize()

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            # Results are kept: a call that reuses the memory of an earlier one would write into the cache.
            kept = [call() for call in calls]
        finally:
            with warnings.catch_warnings():
                # A library that launches in another stream leaves the graph empty, and that takes no time to replay.
                warnings.filterwarnings("error", "The CUDA Graph is empty")
                graph.capture_end()
    torch.cuda.synchronize()
    seconds = statistics.median(_laps(graph))
    del kept
    return count * nbytes / seconds


def _laps(graph: torch.cuda.CUDAGraph) -> list[float]:
    """Return the seconds of each of many replays."""
    graph.replay()
    first = _timed(graph, 1)[0]
    return _timed(graph, max(MIN_LAPS, int(LAPS_MS / 1e3 / first)))


def _timed(graph: torch.cuda.CUDAGraph, laps: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(laps + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairwise(events)]
