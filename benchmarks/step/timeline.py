"""When each hop of a step runs beside computation: intervals of one step, from a trace of ``run.py --profile``.

    python benchmarks/step/timeline.py runs/step/zeropp.trace.json.gz --gpus-per-node 2 --out runs/step/timeline.json

Prints how much of each hop's time lies beside computation or the other hop. Writes the intervals as a result, and their
picture beside it. A kernel tells its group's ranks, so a group across nodes is the inter-node hop. A trace has a rank's
clock, and a NCCL kernel waits for the other ranks within itself ([Note: Time of communication] in
overlap.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "common"))

from manifest import manifest
from overlap import Interval, events_of, kernels, length, union
from result_files import Row

from fsdp_zpp.bench.results import write

_NARROW = 100
"""Microseconds; a narrower gap can't be seen in a picture of a step."""
BETWEEN, INSIDE, COMPUTATION = LANES = ("inter-node", "intra-node", "computation")


def lanes(events: Iterable[dict[str, Any]], gpus_per_node: int) -> dict[str, list[tuple[str, Interval]]]:
    """Return (start, end) of kernels in microseconds by lane, each with its kind, which computation lacks.

    The kind of a collective tells its purpose: weights are gathered, gradients go all-to-all.
    """
    by_lane: dict[str, list[tuple[str, Interval]]] = {name: [] for name in LANES}
    for event, is_nccls, interval in kernels(events):
        lane, kind = COMPUTATION, ""
        if is_nccls:
            ranks = json.loads(event["args"].get("Process Group Ranks") or "[]")
            lane = BETWEEN if len({rank // gpus_per_node for rank in ranks}) > 1 else INSIDE
            kind = "gather" if "AllGather" in event["name"] else "reduce"
        by_lane[lane].append((kind, interval))
    return by_lane


def last_step(events: list[dict[str, Any]]) -> Interval:
    """Return the time from the end of the last optimizer step but one to that of the last, on the GPU.

    Raises:
        ValueError: If the trace has fewer than two optimizer steps.
    """
    ends = sorted(
        float(event["ts"]) + float(event["dur"])
        for event in events
        if event.get("cat") == "gpu_user_annotation" and event["name"].startswith("Optimizer.step")
    )
    if len(ends) < 2:
        raise ValueError(f"a step lies between two optimizer steps, but the trace has {len(ends)} of them")
    return ends[-2], ends[-1]


def summary(by_lane: dict[str, list[tuple[str, Interval]]], step: Interval) -> list[str]:
    """Return lines with the time of each lane in a step, and how much of it another lane is busy, too."""
    busy = {name: within(step, (interval for _, interval in own)) for name, own in by_lane.items()}
    lines = [f"a step of {(step[1] - step[0]) / 1e3:.0f} ms"]
    for name, own in busy.items():
        others = [interval for other, intervals in busy.items() if other != name for interval in intervals]
        beside = length(*own) + length(*others) - length(*own, *others)
        lines.append(f"{name}: {length(*own) / 1e3:.1f} ms, of which {beside / 1e3:.1f} ms beside others")
    return lines


def within(step: Interval, intervals: Iterable[Interval]) -> list[Interval]:
    """Return the parts of intervals in a step."""
    clipped = ((max(start, step[0]), min(end, step[1])) for start, end in intervals)
    return [(start, end) for start, end in clipped if start < end]


def rows_of(by_lane: dict[str, list[tuple[str, Interval]]], step: Interval) -> list[Row]:
    """Return when each kind of kernel runs in each lane: rows of intervals in ms since the step's start.

    Intervals with a narrow gap between them are one.
    """
    rows = []
    for lane, kernels_of in by_lane.items():
        for kind in dict.fromkeys(kind for kind, _ in kernels_of):
            intervals = within(step, (interval for own, interval in kernels_of if own == kind))
            for start, end in union((start, end + _NARROW) for start, end in intervals):
                begin, stop = (round((time - step[0]) / 1e3, 2) for time in (start, end - _NARROW))
                rows.append({"lane": lane, "kind": kind, "start_ms": begin, "end_ms": stop})
    return rows


def main() -> None:
    """Read a trace, print its summary, and write its intervals and their picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--gpus-per-node", type=int, default=2)
    parser.add_argument("--out", type=Path, help="default: beside the trace")
    arguments = parser.parse_args()
    events = events_of(arguments.trace)
    by_lane, step = lanes(events, arguments.gpus_per_node), last_step(events)
    print("\n".join(summary(by_lane, step)))
    out = arguments.out or arguments.trace.with_suffix("").with_suffix(".timeline.json")
    write(out, manifest(), arguments, rows_of(by_lane, step), step_ms=round((step[1] - step[0]) / 1e3, 3))

    from figures import trace  # figures need matplotlib

    out.with_suffix(".svg").write_text(trace(json.loads(out.read_text())))


if __name__ == "__main__":
    main()
