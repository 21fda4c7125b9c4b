"""Where the CPU's time of a step goes, from the traces of ``run.py --host-time``.

    python benchmarks/step/run.py --nodes 2 --gpus-per-node 1 --host-time --strategies fsdp2:hybrid_shard,fsdp2:zeropp
    python benchmarks/step/host_time.py runs/step        # reads the traces again, without a GPU

Prints tables, and writes host-time.json beside the traces.

[Note: Critical thread]
Times are those of the thread that the step waits for: the main one, but autograd's while the main one waits in a
backward. Each moment counts for the innermost call at that time, so times add up to the step. Only the time in labels,
nodes of autograd and operators may be Python's; the trace with stacks divides it by whose the Python is, separately
for each name. It slows Python, so a name that has both Python and C++ in it counts too much for Python.

[Note: Work of sharding]
The work of sharding is the time of fsdp_zpp's and FSDP's Python, of DTensor and of collectives wherever they are, and
of all else in labels of sharding, such as operators and CUDA calls, without waits. Hooks that have no label hold next
to no operators, so their Python is all that counts outside of labels. torch.compile's wrappers of such hooks count as
its own: 2 ms a step of 24 layers, under each strategy alike. Labels and operators cost more under the profiler, so a
difference between two strategies is surer than their ratio.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "common"))

from host_calls import (
    AUTOGRAD,
    COLLECTIVES,
    COMPILED,
    DTENSOR,
    FSDP,
    MODEL,
    OPERATORS,
    OPTIMIZER,
    OTHER,
    OURS,
    STEP,
    STRATEGYS,
    TRITON,
    Call,
    Piece,
    critical,
    is_in_node,
)
from labels import label as shown
from markdown_tables import markdown
from overlap import events_of
from result_files import Row

from fsdp_zpp.bench.results import write

LAUNCHES, COPIES = "kernel launches", "copies, memsets"
EVENTS, ALLOCATOR, CALLS = "events, waits of streams", "cudaMalloc, cudaFree", "other CUDA calls"
SYNCHRONIZES, BLOCKED, STUCK = "waits: synchronization", "waits: a full queue", "waits: a collective's enqueue"
WAITS = (SYNCHRONIZES, BLOCKED, STUCK)
CATEGORIES = (
    *(OURS, FSDP, DTENSOR, TRITON, COMPILED, AUTOGRAD, MODEL, OPTIMIZER, OTHER, OPERATORS, STRATEGYS, COLLECTIVES),
    *(LAUNCHES, COPIES, EVENTS, ALLOCATOR, CALLS, *WAITS),
)
"""Categories in the order of tables."""
_KINDS = {
    "sharding: fsdp_zpp": (OURS,),
    "sharding: torch's Python": (FSDP, DTENSOR, COMPILED, AUTOGRAD, MODEL),
    "sharding: operators, Triton": (STRATEGYS, TRITON),
    "sharding: collectives": (COLLECTIVES,),
    "sharding: CUDA calls": (LAUNCHES, COPIES, EVENTS, ALLOCATOR, CALLS),
}
"""Kinds of the work of sharding on a page; its other categories have none of it."""
_CALLS = {
    "Synchronize": SYNCHRONIZES,
    "LaunchKernel|LaunchCooperative|GraphLaunch|LaunchHostFunc": LAUNCHES,
    r"Mem(cpy|set)\w*Async": COPIES,
    "Mem(cpy|set)": SYNCHRONIZES,
    "Event(Record|Query)|StreamWaitEvent": EVENTS,
    "Malloc|Free|Alloc|^cuMem": ALLOCATOR,
}
"""Categories of CUDA calls by patterns of their names, the first that fits."""
TYPICAL_TIMES, CALL_US, COLLECTIVE_US = 5, 20.0, 200.0
"""A call waits for what it takes beyond this many times a quick one of its name, and beyond these microseconds.

On an idle GPU a launch takes 4 to 10 microseconds under the profiler, and a collective's enqueue 30 to 100; they take
more if the launch queue is full, or if NCCL waits for its proxy. A quick one is the lower decile, since most may wait.
A thread that loses its core seems to wait, too.
"""
_SHOWN = 16
"""Most lines of lists in a result."""


# ---- categories


def own_times(found: Iterable[Piece]) -> dict[Call, float]:
    """Return each call's own microseconds."""
    times: dict[Call, float] = defaultdict(float)
    for start, end, call in found:
        times[call] += end - start
    return times


def owners(found: Iterable[Piece]) -> dict[tuple[str, str, bool], dict[str, float]]:
    """Return whose time in a trace with stacks is, by :attr:`Call.key`."""
    shares: dict[tuple[str, str, bool], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for call, time in own_times(found).items():
        if not call.is_cuda:
            shares[call.key][call.owner] += time
    return shares


def limits(times: dict[Call, float]) -> dict[str, float]:
    """Return from how many microseconds on a call of each name waits."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for call, time in times.items():
        if call.is_cuda or call.is_collective:
            by_name[call.name].append(time)
    return {
        name: max(CALL_US if name.startswith("cu") else COLLECTIVE_US, TYPICAL_TIMES * sorted(own)[len(own) // 10])
        for name, own in by_name.items()
    }


def category_of_call(call: Call) -> str:
    """Return the category of a CUDA call."""
    found = next((category for pattern, category in _CALLS.items() if re.search(pattern, call.name)), CALLS)
    return COLLECTIVES if call.is_collective and found == LAUNCHES else found


def divided(call: Call, time: float, limit: float | None, shares: dict[str, float] | None) -> dict[str, float]:
    """Return a call's own time by category."""
    if call.is_cuda:
        category = category_of_call(call)
        work = time if category in (SYNCHRONIZES, ALLOCATOR) or limit is None else min(time, limit)
        return {category: work, BLOCKED: time - work}
    if call.is_collective:
        work = time if limit is None else min(time, limit)
        return {COLLECTIVES: work, STUCK: time - work}
    if not shares or not (whole := sum(shares.values())):
        return {call.native: time}
    return {owner: time * share / whole for owner, share in shares.items()}


def is_sharding(call: Call, category: str) -> bool:
    """Return whether a call's time in a category is work of sharding (Note: Work of sharding)."""
    if category in WAITS:
        return False
    is_in_label = call.label != "" and not call.label.startswith("Optimizer.")
    return is_in_label or category in (OURS, FSDP, DTENSOR, STRATEGYS, COLLECTIVES)


def figures(trace: list[dict[str, Any]], stacks: list[dict[str, Any]] | None = None) -> Row:
    """Return the host's ms a step by category and of sharding, calls a step, and where waits and labels are.

    Args:
        trace: Events of the trace without stacks.
        stacks: Those of the trace with stacks; without it, Python is its label's.
    """
    found, steps = critical(trace)
    stacked, stacked_steps = critical(stacks) if stacks else ([], 1)
    times, shares = own_times(found), owners(stacked)
    limit = limits(times)
    by_category: dict[str, float] = defaultdict(float)
    sharding: dict[str, float] = defaultdict(float)
    waits: dict[str, list[float]] = defaultdict(list)
    labels: dict[str, float] = defaultdict(float)
    for call, time in times.items():
        for category, part in divided(call, time, limit.get(call.name), shares.get(call.key)).items():
            by_category[category] += part
            sharding[category] += part * is_sharding(call, category)
            if category in WAITS and part:
                waits[f"{call.name} in {call.label or _around(call)}"].append(part)
        labels[call.label or "outside of labels"] += time
    return {
        "steps": steps,
        "categories_ms": _in_order(by_category, steps),
        "sharding_ms": _in_order(sharding, steps),
        "traced_ms": _of_steps(times),
        "stacked_ms": _of_steps(own_times(stacked)),
        "calls": {name: count / steps for name, count in counts(times).items()},
        "waits": _largest({name: (sum(own), len(own)) for name, own in waits.items()}, steps),
        "labels": _largest({name: (time, 0) for name, time in labels.items()}, steps),
        "stacks_in_backward": any(call.is_python and is_in_node(call) for _, _, call in stacked),
        "python": _largest(_functions(stacked), stacked_steps),
    }


def _in_order(times: dict[str, float], steps: int) -> dict[str, float]:
    """Return ms a step of the categories that have any, in the order of tables."""
    return {name: times[name] / 1e3 / steps for name in CATEGORIES if times[name]}


def _of_steps(times: dict[Call, float]) -> float | None:
    """Return the mean ms of steps by their labels, which the categories must add up to."""
    steps = {call for own in times for call in own.line if call.name == STEP}
    return sum(call.end - call.start for call in steps) / 1e3 / len(steps) if steps else None


def _around(call: Call) -> str:
    """Return the name of the operator or the node around a call."""
    return next((other.name for other in call.line if not other.is_cuda), "nothing")


def _largest(found: dict[str, tuple[float, int]], steps: int) -> list[Row]:
    """Return rows of ms and calls a step, from the largest."""
    order = sorted(found.items(), key=lambda item: -item[1][0])[:_SHOWN]
    return [{"where": name, "ms": time / 1e3 / steps, "calls": calls / steps} for name, (time, calls) in order]


def _functions(found: Iterable[Piece]) -> dict[str, tuple[float, int]]:
    """Return the own time, and calls, of functions in Python, with the built-in ones that they call."""
    times: dict[str, float] = defaultdict(float)
    calls: dict[str, set[Call]] = defaultdict(set)
    for call, time in own_times(found).items():
        # A label in a function is a part of it, but an operator or a CUDA call is not.
        inner = (other for other in call.line if other.is_python and ".py(" in other.name)
        if call.is_python and (frame := next(inner, None)) is not None:
            times[frame.name] += time
            calls[frame.name].add(frame)
    return {name: (time, len(calls[name])) for name, time in times.items()}


def counts(calls: Iterable[Call]) -> Counter[str]:
    """Return the number of calls of each kind that has a time of its own."""
    found: Counter[str] = Counter()
    for call in calls:
        if call.is_cuda:
            found[category_of_call(call) if not call.is_collective else "CUDA calls in collectives"] += 1
        elif call.is_collective:
            found["collectives"] += call.parent is None or not call.parent.is_collective
        elif call.name.startswith("autograd::engine"):
            found["nodes of autograd"] += 1
        elif call.kind == "cpu_op" and "::" in call.name:
            found["operators"] += 1
        elif call.label == call.name:
            found["labels"] += 1
    return found


# ---- results


def table(rows: list[Row]) -> str:
    """Return a table of the host's ms a step by category, a column for each strategy."""
    texts = [[name, *(_text(row["categories_ms"].get(name)) for row in rows)] for name in CATEGORIES]
    texts = [line for line in texts if any(line[1:])]
    texts.append(["sum", *(_text(sum(row["categories_ms"].values())) for row in rows)])
    texts.append(["work of sharding", *(_text(sum(row["sharding_ms"].values())) for row in rows)])
    texts += _whole(rows)
    return markdown(["rank 0's CPU, ms a step", *(shown(row["strategy"]) for row in rows)], texts)


def _whole(rows: list[Row]) -> list[list[str]]:
    """Return lines of a table with the time of a whole step."""
    names = {"step, with the profiler": "traced_ms", "step, without": "host_ms"}
    names |= {"until the GPU is done": "until_gpu_done_ms"}
    return [[name, *(_text(row.get(key)) for row in rows)] for name, key in names.items()]


def table_of_sharding(rows: list[Row]) -> str:
    """Return a page's table: the work of sharding by kind, beside the host's other time and some counts."""

    def line(name: str, figure: Callable[[Row], float]) -> list[str]:
        return [name, *(_text(figure(row)) for row in rows)]

    texts = [line(name, partial(_part, names=names)) for name, names in _KINDS.items()]
    texts.append(line("work of sharding", lambda row: _part(row, CATEGORIES)))
    texts.append(line("model, autograd, optimizer", lambda row: _part(row, CATEGORIES, sharding=False)))
    texts.append(line("waits", lambda row: sum(row["categories_ms"].get(name, 0.0) for name in WAITS)))
    texts += _whole(rows)
    texts += [[f"{name}, number", *(f"{row['calls'][name]:.0f}" for row in rows)] for name in (LAUNCHES, "collectives")]
    return markdown(["rank 0's CPU, ms a step", *(shown(row["strategy"]) for row in rows)], texts)


def _part(row: Row, names: Iterable[str], sharding: bool = True) -> float:
    """Return the ms that categories have of the work of sharding, or of other work."""
    work = {name: row["sharding_ms"].get(name, 0.0) for name in names if name not in WAITS}
    return sum(ms if sharding else row["categories_ms"].get(name, 0.0) - ms for name, ms in work.items())


def table_of_calls(rows: list[Row]) -> str:
    """Return a table of calls a step, a column for each strategy."""
    names = dict.fromkeys(name for row in rows for name in row["calls"])
    lines = ([name, *(f"{row['calls'].get(name, 0):.0f}" for row in rows)] for name in names)
    return markdown(["calls a step", *(shown(row["strategy"]) for row in rows)], lines)


def _text(ms: float | None) -> str:
    return f"{ms:.1f}" if ms is not None else ""


def lists(rows: list[Row]) -> str:
    """Return a table of the largest waits, labels and Python functions of each strategy."""
    headings = ("strategy", "kind", "where", "ms a step", "calls a step")
    lines = (
        [shown(row["strategy"]), kind, one["where"], f"{one['ms']:.2f}", f"{one['calls']:g}" if one["calls"] else ""]
        for row in rows
        for kind in ("waits", "labels", "python")
        for one in row[kind][:8]
    )
    return markdown(headings, lines)


def analyse(folder: Path) -> None:
    """Read the traces that a run left in a folder, print tables, and write host-time.json there."""
    result = json.loads((folder / "step.json").read_text())
    rows = []
    for row in result["rows"]:
        measured = row.get("host_time") or {}
        if not measured.get("trace"):
            continue
        stacks = measured.get("stacks") and events_of(folder / measured["stacks"])
        rows.append({"strategy": row["strategy"]} | measured | figures(events_of(folder / measured["trace"]), stacks))
        given = argparse.Namespace(**result["arguments"])
        # After each, since traces may lack what the next one needs.
        write(folder / "host-time.json", result["manifest"], given, rows, environment=result.get("environment"))
        if stacks and not rows[-1]["stacks_in_backward"]:
            print(f"{row['strategy']}: stacks lack autograd's thread, so its hooks' Python counts as {AUTOGRAD}")
    for text in (table, table_of_calls, lists):
        print(text(rows), end="\n\n")


def main() -> None:
    """Read the traces of folders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="--out of run.py --host-time")
    for folder in parser.parse_args().folders:
        analyse(folder)


if __name__ == "__main__":
    main()
