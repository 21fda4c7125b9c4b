"""A picture of one step from a trace of ``run.py --profile``: when each hop runs beside computation.

    python benchmarks/step/timeline.py runs/step/zeropp.trace.json.gz --gpus-per-node 2 --out runs/step/timeline.png

Also prints how much of each hop's time lies beside computation or the other hop. A kernel tells its group's ranks, so a
group across nodes is the inter-node hop. A trace has a rank's clock, and a NCCL kernel waits for the
other ranks within itself ([Note: Time of communication] in fsdp_zpp/bench/overlap.py).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fsdp_zpp.bench.overlap import Interval, events_of, kernels, length, union

BETWEEN, INSIDE, COMPUTATION = "between nodes", "inside the node", "computation"
COLORS = {BETWEEN: "tab:red", INSIDE: "tab:blue", COMPUTATION: "tab:gray"}


def lanes(events: Iterable[dict[str, Any]], gpus_per_node: int) -> dict[str, list[tuple[str, Interval]]]:
    """Return (start, end) of kernels in microseconds by lane, each with its kind.

    The kind of a collective tells its purpose: weights are gathered, gradients go all-to-all.
    """
    by_lane: dict[str, list[tuple[str, Interval]]] = {name: [] for name in COLORS}
    for event, is_nccls, interval in kernels(events):
        lane = COMPUTATION
        if is_nccls:
            ranks = json.loads(event["args"].get("Process Group Ranks") or "[]")
            lane = BETWEEN if len({rank // gpus_per_node for rank in ranks}) > 1 else INSIDE
        by_lane[lane].append(("gather" if "AllGather" in event["name"] else "reduce", interval))
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


def draw(by_lane: dict[str, list[tuple[str, Interval]]], step: Interval, title: str, out: Path) -> None:
    """Write the picture."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(13, 2.6), layout="constrained")
    axes = figure.subplots()
    for place, (name, intervals) in enumerate(by_lane.items()):
        for kind, alpha in (("gather", 0.55), ("reduce", 1.0)):
            of_kind = union(interval for own, interval in intervals if own == kind)
            bars = [((start - step[0]) / 1e3, (end - start) / 1e3) for start, end in within(step, of_kind)]
            axes.broken_barh(bars, (place - 0.4, 0.8), color=COLORS[name], alpha=alpha)
    axes.set(yticks=range(len(by_lane)), yticklabels=list(by_lane), xlabel="ms since the optimizer's last step ended")
    axes.set_xlim(0, (step[1] - step[0]) / 1e3)
    axes.invert_yaxis()
    patches = [Patch(color="black", alpha=alpha, label=text) for text, alpha in (("weights", 0.55), ("gradients", 1.0))]
    axes.legend(handles=patches, loc="upper right", fontsize="small")
    axes.set_title(title, fontsize="medium")
    figure.savefig(out, dpi=120)


def main() -> None:
    """Read a trace, print its summary and draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--gpus-per-node", type=int, default=2)
    parser.add_argument("--title", default="")
    parser.add_argument("--out", type=Path, help="default: beside the trace")
    arguments = parser.parse_args()
    events = events_of(arguments.trace)
    by_lane, step = lanes(events, arguments.gpus_per_node), last_step(events)
    lines = summary(by_lane, step)
    print("\n".join(lines))
    out = arguments.out or arguments.trace.with_suffix("").with_suffix(".png")
    draw(by_lane, step, ", ".join(filter(None, [arguments.title, lines[0]])), out)


if __name__ == "__main__":
    main()
