"""The report of the training example: table, plot and JSON."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from os import cpu_count
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from train_loop import RunResult
from train_options import Options
from train_traffic import Hop, hop_bytes


def print_table(console: Console, results: list[RunResult], options: Options) -> None:
    """Print the figures of all runs, and how the bytes were counted."""
    table = Table(title=f"{options.world} ranks as {options.nodes} x {options.gpus_per_node}")
    table.add_column("run")
    columns = ("train loss", "validation loss", "step", "tokens/s", "peak memory", "inter-node", "intra-node")
    for column in columns:
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            result.label,
            f"{result.train_loss:.4f}",
            f"{result.validation_loss:.4f}",
            f"{result.step_seconds * 1e3:,.1f} ms",
            f"{result.tokens_per_second:,.0f}",
            f"{result.peak_memory / 2**30:.2f} GiB",
            _bytes(result, "inter") if options.nodes > 1 else "no inter-node hop",
            _bytes(result, "intra"),
        )
    console.print(table)
    console.print(
        "Bytes: what one rank sends in an optimizer step, and the share of full_shard's. Those are counted, "
        f"not measured: in {options.precision}, each unit gathered twice a micro-batch (the root once) and "
        "reduced once a step, with the fewest bytes that two hops allow. Peak memory: "
        + ("allocated by torch." if options.device == "cuda" else "of the process, earlier runs included."),
        style="dim",
    )
    if options.compare:
        console.print(f"Validation loss against full_shard: {validation_difference(results):+.3f} %")


def validation_difference(results: list[RunResult]) -> float:
    """By how many percent the last run's validation loss is above the first's."""
    return 100 * (results[-1].validation_loss / results[0].validation_loss - 1)


def _bytes(result: RunResult, hop: Hop) -> str:
    sent, reference = hop_bytes(result.traffic, hop), hop_bytes(result.full_shard_traffic, hop)
    if reference and not sent:
        return "torch's own, not counted"  # on one node
    share = f" ({sent / reference:.0%})" if reference else ""
    return f"{sent / 1e6:,.2f} MB{share}"


def plot(results: list[RunResult], path: Path) -> None:
    """Draw training and validation losses of all runs."""
    # Without pyplot there is no window and no global figure: Agg draws the PNG.
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    # The runs often lie on top of each other: the first is drawn broad, below the last.
    styles: Sequence[dict[str, Any]] = ({"color": "tab:gray", "lw": 3}, {"color": "tab:blue", "lw": 1})[-len(results) :]
    for result, style in zip(results, styles, strict=True):
        steps = range(1, len(result.losses) + 1)
        axes.plot(steps, result.losses, alpha=0.4, label=f"{result.label}, training", **style)
        axes.plot(*zip(*result.validation, strict=True), "o-", label=f"{result.label}, validation", **style)
    axes.set(xlabel="optimizer step", ylabel="cross-entropy, nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def write_json(results: list[RunResult], options: Options, path: Path) -> None:
    """Write all figures with what is needed to read them later."""
    report: dict[str, Any] = {
        "machine": _machine(options.device),
        "versions": _versions(),
        "arguments": dataclasses.asdict(options) | {"run": options.run.label},
        "nodes": options.nodes,
        "runs": [dataclasses.asdict(result) for result in results],
    }
    if options.compare:
        report["validation_difference_percent"] = validation_difference(results)
    path.write_text(json.dumps(report, indent=1, default=str) + "\n")


def _machine(device: str) -> dict[str, Any]:
    machine: dict[str, Any] = {"platform": platform.platform(), "cpus": cpu_count()}
    if device == "cuda":
        machine["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return machine


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("torch", "transformers", "fsdp_zpp"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # run from a source tree
            versions[package] = "not installed"
    return versions
