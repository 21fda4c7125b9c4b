"""What a run of step.py has found: a Markdown table, JSON with machine and versions, and a bar chart."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from typing import Any

import torch

Row = dict[str, Any]
PACKAGES = ("torch", "triton", "transformers", "peft", "deepspeed", "megatron-fsdp")
TELLING = ("NCCL_", "CUDA_DEVICE_MAX_CONNECTIONS")  # environment variables that change how fast hops are


def machine(arguments: argparse.Namespace) -> dict[str, Any]:
    """The machine and the versions of what matters; None for what is not installed."""
    cuda = arguments.device == "cuda"
    shared = f", sharing {arguments.gpus}" if arguments.gpus else ""
    return {
        "gpu": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "layout": f"{arguments.nodes} nodes x {arguments.gpus_per_node} GPUs{shared}",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
        "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(TELLING)},
    }


def version(package: str) -> str | None:
    """The installed version."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cell(row: Row, key: str, form: str = "{:.1f}") -> str:
    """A figure, if there is one."""
    return "-" if row.get(key) is None else form.format(row[key])


def sent(row: Row, hop: str) -> str:
    """MiB over one hop a step, weights + gradients."""
    figures = [mib for name, mib in row.get("sent_mib_a_step", {}).items() if name.endswith(hop)]
    return " + ".join(f"{mib:.0f}" if mib >= 10 else f"{mib:.2f}" for mib in figures) or "-"


def columns(rows: list[Row]) -> dict[str, list[str]]:
    """The table's columns by their heads, without those that would be empty."""
    first = next((row["step_ms"] for row in rows if "step_ms" in row), None)
    measured = [
        f"{row['step_ms']:.0f} ({row['fastest_ms']:.0f} to {row['slowest_ms']:.0f})" if "step_ms" in row else ""
        for row in rows
    ]
    always = {
        "strategy": [row["strategy"] for row in rows],
        "step, ms (fastest to slowest)": [row.get("failed") or text for row, text in zip(rows, measured, strict=True)],
        "against the first": [f"{first / row['step_ms']:.2f}x" if "step_ms" in row else "-" for row in rows],
        "peak, GiB": [cell(row, "peak_gib") for row in rows],
        "tokens/s": [cell(row, "tokens_per_s", "{:.0f}") for row in rows],
    }
    sometimes = {
        "time over the first's, median of rounds (quartiles)": [
            "{1:.3f} ({0:.3f} to {2:.3f})".format(*row["paired"]) if "paired" in row else "-" for row in rows
        ],
        "CPU done after, ms": [cell(row, "host_ms", "{:.0f}") for row in rows],
        "of the GPUs' peak FLOP/s": [cell(row, "utilization", "{:.1%}") for row in rows],
        "communication not hidden, ms (share)": [
            f"{row['exposed_ms']:.0f} ({cell(row, 'exposed_share', '{:.0%}')})" if row.get("exposed_share") else "-"
            for row in rows
        ],
        "sent between nodes, MiB": [sent(row, "inter") for row in rows],
        "sent inside a node, MiB": [sent(row, "intra") for row in rows],
        "peak while built, GiB": [cell(row, "build_peak_gib") for row in rows],
        "generated tokens/s": [cell(row, "generate_tokens_per_s") for row in rows],
    }
    return always | {head: cells for head, cells in sometimes.items() if set(cells) != {"-"}}


def table(rows: list[Row]) -> str:
    """The figures as Markdown. What is sent is by a rank a step, weights + gradients."""
    by_head = columns(rows)
    lines = [f"| {' | '.join(by_head)} |", "|---" * len(by_head) + "|"]
    lines += [f"| {' | '.join(cells)} |" for cells in zip(*by_head.values(), strict=True)]
    return "\n".join(lines)


def chart(arguments: argparse.Namespace, rows: list[Row]) -> None:
    """step.png: step times with their spread, and peak memory."""
    from matplotlib.figure import Figure

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
    memory.bar_label(bars, [cell(row, "peak_gib") for row in rows], padding=3)
    memory.set(xlabel="peak memory, GiB")
    memory.margins(x=0.2)
    memory.set_xlim(left=0)
    training = f"LoRA of rank {arguments.lora}" if arguments.lora else "full training"
    training += ", layers compiled" if arguments.compile else ""
    batches = f"{arguments.micro_batches} x {arguments.micro_batch} x {arguments.sequence} tokens a GPU"
    figure.suptitle(f"{arguments.size} Llama, {training}, {batches}, {machine(arguments)['layout']}")
    figure.savefig(arguments.out / "step.png", dpi=120)


def write(arguments: argparse.Namespace, rows: list[Row]) -> None:
    """Write what there is so far to ``arguments.out``; no chart without matplotlib."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    options = {name: value for name, value in vars(arguments).items() if name not in ("out", "worker")}
    result = {"machine": machine(arguments), "arguments": options, "rows": rows}
    (arguments.out / "step.json").write_text(json.dumps(result, indent=1))
    (arguments.out / "step.md").write_text(table(rows) + "\n")
    try:
        chart(arguments, rows)
    except ModuleNotFoundError as error:
        print(f"no chart without {error.name}", flush=True)
