"""A bar chart of a run: step times with their spread, and peak memory."""

from __future__ import annotations

import argparse
from typing import Any

from columns import PEAK
from nodes import layout
from result_files import Row


def chart(arguments: argparse.Namespace, rows: list[Row], machine: dict[str, Any]) -> None:
    """Write step.png to ``arguments.out``, if matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print("no chart without matplotlib", flush=True)
        return

    figure = Figure(figsize=(10, 1.2 + 0.4 * len(rows)), layout="constrained")
    times, memory = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    places = range(len(rows))
    medians = [row.get("step_ms", 0) for row in rows]
    spread = [
        [row["step_ms"] - row["fastest_ms"] if "step_ms" in row else 0 for row in rows],
        [row["slowest_ms"] - row["step_ms"] if "step_ms" in row else 0 for row in rows],
    ]
    bars = times.barh(places, medians, xerr=spread, ecolor="gray")
    texts = [f"{row['step_ms']:.0f}" if "step_ms" in row else row["failed"][:60] for row in rows]
    times.bar_label(bars, texts, padding=6)
    times.set(xlabel="step, ms", yticks=places, yticklabels=[row["strategy"] for row in rows])
    times.margins(x=0.2)
    times.invert_yaxis()
    bars = memory.barh(places, [row.get("peak_gib") or 0 for row in rows], color="tab:orange")
    memory.bar_label(bars, [PEAK.cell(row, rows) for row in rows], padding=3)
    memory.set(xlabel="peak memory, GiB")
    memory.margins(x=0.2)
    memory.set_xlim(left=0)
    training = f"LoRA of rank {arguments.lora}" if arguments.lora else "full training"
    training += ", layers compiled" if arguments.compile else ""
    batches = f"{arguments.micro_batches} x {arguments.micro_batch} x {arguments.sequence} tokens a GPU"
    figure.suptitle(
        f"{arguments.size} Llama, {training}, {batches}, {layout(arguments)} ({machine.get('gpu', machine['cpu'])})"
    )
    figure.savefig(arguments.out / "step.png", dpi=120)
