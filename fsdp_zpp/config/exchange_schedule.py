"""Schedule of local steps: after which steps fragments are exchanged, and which steps are synchronous.

Steps are counted from the first of the training, and a segment of the schedule begins after ``from_step`` of them. In a
segment, fragments are due as if the training began with it.
"""

from __future__ import annotations

from itertools import pairwise

Segments = tuple[tuple[int, int], ...]
"""Segments of a schedule: the number of steps after which each begins, and its steps between two exchanges."""


def segments_of(every: int | Segments) -> Segments:
    """Return the segments of a schedule; an int is a single segment."""
    return ((0, every),) if isinstance(every, int) else every


def due_in(segments: Segments, step: int, fragments: int, *, spread: bool) -> list[int]:
    """Return the fragments to exchange after a step.

    In any ``every`` consecutive steps of a segment, each of them is due once.

    Args:
        segments: The schedule.
        step: Number of steps made so far, from 1 on.
        fragments: Number of fragments.
        spread: Whether fragments are spread over the steps, or all are due after the last.
    """
    begin, every = next((begin, every) for begin, every in reversed(segments) if begin < step)
    step -= begin
    if not spread:
        return list(range(fragments)) if step % every == 0 else []
    # The last fragment comes with the last of the steps, so that every=1 exchanges all of them in each step.
    return [index for index in range(fragments) if (step - (index + 1) * every // fragments) % every == 0]


def check_schedule(every: object, start: int, stop: int | None) -> None:
    """Raise unless these are arguments of :class:`LocalSteps`.

    Raises:
        ValueError: If ``every`` is no schedule, a number is out of range, or a part of the schedule would never come.
    """
    _check_every(every)
    if not is_count(start, 0):
        raise ValueError(f"start must be an int of 0 or more synchronous steps at the beginning, got {start!r}")
    if stop is None:
        return
    if not is_count(stop, 1) or stop <= start:
        raise ValueError(
            f"stop must be None or an int above start={start}, the step from which on steps are synchronous again; got "
            f"{stop!r}"
        )
    if isinstance(every, tuple) and every[-1][0] >= stop:
        raise ValueError(f"every={every!r} has a segment that begins at stop={stop} or after it: leave it out")


def _check_every(every: object) -> None:
    if not isinstance(every, tuple):
        if not is_count(every, 1):
            raise ValueError(
                f"every must be an int of 1 or more optimizer steps, or a tuple of pairs (from_step, every) such as "
                f"((0, 8), (1000, 32)); got {every!r}"
            )
        return
    pairs = [each for each in every if isinstance(each, tuple) and len(each) == 2]
    if not every or len(pairs) < len(every) or not all(is_count(a, 0) and is_count(n, 1) for a, n in pairs):
        raise ValueError(
            f"every must be an int, or a tuple of pairs (from_step, every), ints of 0 or more and of 1 or more; got "
            f"{every!r}"
        )
    begins = [begin for begin, _ in pairs]
    if begins[0] != 0 or any(later <= earlier for earlier, later in pairwise(begins)):
        raise ValueError(
            f"every must begin with from_step 0, and each from_step be above the one before; got {every!r}"
        )


def is_count(value: object, least: int) -> bool:
    """Return whether ``value`` is an int of ``least`` or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
