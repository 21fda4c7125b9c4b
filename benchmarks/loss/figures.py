"""Figures of losses: of comparisons, and gaps of the convergence study to the reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from charts import INK, SERIES, End, Figure, drawn, entitle, label_ends, laid_out, look
from gaps import CHANGES, FAMILIES, REFERENCE, Runs
from matplotlib.axes import Axes
from result_files import Result, Row
from words import in_words

from fsdp_zpp.bench.results import PEER

_WARM = 0.15
"""Share of a run left out of the convergence figures: losses fall so far there that no difference would be seen."""


def draw_losses(runs: Sequence[Row], path: Path) -> None:
    """Draw training and validation losses of a comparison as a PNG; the reference comes first, broad and grey."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for index, run in enumerate(runs):
        # Runs often lie on top of each other.
        color, width = (f"C{index - 1}", 1) if index else ("tab:gray", 3)
        steps = range(1, len(run["losses"]) + 1)
        axes.plot(steps, run["losses"], alpha=0.4, color=color, lw=width, label=f"{run['label']}, training")
        done, losses = zip(*run["validation"], strict=True)
        axes.plot(done, losses, "o-", color=color, lw=width, label=f"{run['label']}, validation")
    axes.set(xlabel="optimizer step", ylabel="cross-entropy, nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


@drawn
def seeds_compared(results: Sequence[Result]) -> Figure:
    """Draw FULL_SHARD and a strategy: losses of the first seed, and differences of validation losses for all seeds."""
    figure = laid_out(450)
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=(1.2, 1))
    for run, color, width in zip(results[0]["rows"], (PEER, SERIES[0]), (5, 1.6), strict=True):
        # In a run's legend the line that is easier to see stands for both.
        losses.plot(range(1, len(run["losses"]) + 1), run["losses"], color=color, lw=width / 2, alpha=0.45)
        done, validation = zip(*run["validation"], strict=True)
        losses.plot(done, validation, "o-", color=color, lw=width, ms=width + 3, label=in_words(run["label"]))
    first = results[0]["rows"][1]
    size = size_of(first, len(first["losses"]) * first["tokens_per_step"])
    entitle(figure, f"{in_words(first['label'])} beside FULL_SHARD", f"Llama, {size}")
    losses.set_title("Validation loss, and training loss (thin), nats a byte")
    losses.legend(loc="upper left", bbox_to_anchor=(1, 1))
    ends = []
    for index, result in enumerate(results):
        reference, run = (np.array(row["validation"]) for row in result["rows"])
        gap = 100 * (run[:, 1] / reference[:, 1] - 1)
        differences.plot(run[:, 0], gap, marker="o", ms=5, **look(index))
        ends.append(End(gap[-1], f"Seed {index}: {gap[-1]:+.1f}", look(index)))
    differences.axhline(0, color=INK, lw=1)
    differences.set(title="Validation loss above FULL_SHARD, %", xlabel="Optimizer step")
    for axes in (losses, differences):
        axes.grid()
    figure.draw_without_rendering()
    label_ends(differences, ends)
    return figure


@drawn
def gaps_svg(runs: Runs, prefix: str = "") -> Figure:
    """Draw a panel for every family: gaps to the reference with the same seed, against the bytes trained on.

    Args:
        runs: Runs of the convergence study.
        prefix: ``w8:`` for int8 weights.
    """
    reference = prefix + REFERENCE
    members = {
        prefix + family: [name for name in runs.members(prefix + family) if runs.seeds(name, reference)]
        for family in FAMILIES
    }
    families = {prefix + family: title for family, title in FAMILIES.items() if members[prefix + family]}
    figure = laid_out(60 + 190 * len(families))
    if not families:
        return figure
    panels = figure.subplots(len(families), 1, squeeze=False, sharex=True)[:, 0]
    seed = runs.seeds(reference)[0]
    size = size_of(runs.row(reference, seed), runs.curve(reference, seed)[-1][0])
    than = "8-bit weights alone" if prefix else "FULL_SHARD"
    entitle(figure, f"Validation loss above {than}, %", f"GPT-2, {size}")
    ends: list[list[End]] = []
    for (family, title), axes in zip(families.items(), panels, strict=True):
        ends.append([])
        for name in members[family]:
            index = CHANGES.index(name.removeprefix(family))
            last = _band(axes, runs, name, reference, index)
            change = in_words(name.removeprefix(prefix)).partition(", ")[2] or "Plain"
            ends[-1].append(End(last, f"{change}: {last:+.1f}", look(index)))
        axes.axhline(0, color=INK, lw=1)
        axes.set_title(f"{title}, {len(runs.seeds(members[family][0], reference))} seeds")
        axes.grid()
    panels[-1].set(xlabel="Bytes trained on, millions")
    figure.draw_without_rendering()
    for axes, of_axes in zip(panels, ends, strict=True):
        label_ends(axes, of_axes)
    return figure


def _band(axes: Axes, runs: Runs, name: str, reference: str, index: int) -> float:
    """Draw the mean gap over seeds as a line, in a band from the lowest to the highest; return the last mean."""
    seeds = runs.seeds(name, reference)
    tokens = np.array(runs.curve(name, seeds[0]))[:, 0]
    losses, of_reference = (
        np.array([np.array(runs.curve(each, seed))[:, 1] for seed in seeds]) for each in (name, reference)
    )
    curves = 100 * (losses / of_reference - 1)
    shown = tokens >= _WARM * tokens[-1]
    tokens, curves = tokens[shown] / 1e6, curves[:, shown]
    axes.plot(tokens, curves.mean(axis=0), **look(index))
    axes.fill_between(tokens, curves.min(axis=0), curves.max(axis=0), color=look(index)["color"], alpha=0.12, lw=0)
    return float(curves[:, -1].mean())


def size_of(row: Row, tokens: float) -> str:
    """Return the size of a run's model and data; a token is a byte."""
    return f"{row['parameters'] / 1e6:.3g} M parameters, {tokens / 1e6:.2g} M bytes"
