"""When hops ran: intervals between events of a stream on a GPU, of wall time on a CPU. Nothing waits for the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from .kinds import Kind, Level

Mark = float | torch.cuda.Event
"""A time: seconds on a CPU, an event on a GPU."""

MOST_INTERVALS = 100_000
"""Most intervals of one kind that are kept: without a limit, events would pile up in a long evaluation."""


def mark(device: torch.device) -> Mark:
    """Return the present time of the current stream, which comes when the stream has done what it was given so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def has_come(at: Mark) -> bool:
    """Return whether the time of a mark is known by now."""
    return isinstance(at, float) or at.query()


def milliseconds_between(start: Mark, end: Mark) -> float:
    """Return the milliseconds from one mark to another of the same device; both must have come."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float)
        assert isinstance(end, float)
        return 1e3 * (end - start)
    return float(start.elapsed_time(end))


@dataclass(frozen=True, slots=True)
class TimedHop:
    """When one collective of a hop ran.

    Args:
        kind: ``gather`` or ``reduce``.
        level: ``inter`` or ``intra``.
        start: When its stream came to it.
        end: When its stream had its result.
    """

    kind: Kind
    level: Level
    start: Mark
    end: Mark


class HopTimer:
    """Notes when hops run.

    Attributes:
        hops: Those since the list was emptied, in the order in which they were launched, at most ``MOST_INTERVALS``.
    """

    def __init__(self) -> None:
        self.hops: list[TimedHop] = []

    @contextmanager
    def timing(self, kind: Kind, level: Level, device: torch.device) -> Iterator[None]:
        """Return a context in which a collective of a hop is launched."""
        if len(self.hops) >= MOST_INTERVALS:
            yield
            return
        start = mark(device)
        yield
        self.hops.append(TimedHop(kind, level, start, mark(device)))
