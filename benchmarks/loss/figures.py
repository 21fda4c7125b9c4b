"""Figures of losses: of comparisons, gaps of the convergence study to the reference, and gaps of local steps."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from charts import INK, SERIES, End, Figure, drawn, entitle, label_ends, laid_out, look
from matplotlib.axes import Axes
from result_files import Result, Row
from tables import CHANGES, FAMILIES, REFERENCE, Runs, TunedRuns, every, variant
from words import in_words

from fsdp_zpp.planner.chart import PEER

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


# ---- local steps: how far above synchronous training they end, and what decides that

_LEAST = 3
"""Points that make a line worth drawing."""
_START = re.compile(r":start(\d+)")
Lines = dict[tuple[int, str], dict[int, list[float]]]
"""Gaps of all seeds in percent, by place on the axis, of each line: nodes, and the configuration without the place."""


@drawn
def local_steps_svg(runs: Mapping[int, TunedRuns]) -> Figure:
    """Draw gaps to the reference against the steps between exchanges, and against the synchronous steps at the start.

    Args:
        runs: Runs by the number of nodes; those that have the reference, too, are drawn.
    """
    shown = {nodes: tuned for nodes, tuned in runs.items() if REFERENCE in tuned.rates}
    by_every, by_start = _lines(shown)
    kinds = {"Steps between exchanges": by_every, "Synchronous steps at the start": by_start}
    panels = {xlabel: lines for xlabel, lines in kinds.items() if lines}
    figure = laid_out(60 + 220 * len(panels))
    if not panels:
        return figure
    tuned = next(iter(shown.values())).runs
    seed = tuned.seeds(REFERENCE)[0]
    size = size_of(tuned.row(REFERENCE, seed), tuned.curve(REFERENCE, seed)[-1][0])
    entitle(figure, "Validation loss above FULL_SHARD, %", f"GPT-2, {size}")
    drawn_panels = [
        (axes, _draw(axes, lines, xlabel))
        for axes, (xlabel, lines) in zip(
            figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels.items(), strict=True
        )
    ]
    figure.draw_without_rendering()
    for axes, ends in drawn_panels:
        label_ends(axes, ends)
    return figure


def _lines(shown: Mapping[int, TunedRuns]) -> tuple[Lines, Lines]:
    """Return the lines over the steps between exchanges and over the synchronous steps at the start."""
    by_every: Lines = {}
    by_start: Lines = {}
    for nodes, tuned in shown.items():
        for name in (name for name in tuned.names if name != REFERENCE):
            gaps = tuned.runs.gaps(name, REFERENCE)
            start = _START.search(name)
            by_start.setdefault((nodes, _START.sub("", name)), {})[int(start[1]) if start else 0] = gaps
            by_every.setdefault((nodes, variant(name)), {})[every(name)] = gaps
    worth: list[Lines] = [
        {line: dict(sorted(points.items())) for line, points in lines.items() if len(points) >= _LEAST}
        for lines in (by_every, by_start)
    ]
    return worth[0], worth[1]


def _draw(axes: Axes, lines: Lines, xlabel: str) -> list[End]:
    """Draw lines of means over seeds, with bars from the lowest to the highest; return their ends."""
    words = [[f"{nodes} nodes", *in_words(name).split(", ")] for nodes, name in lines]
    common = [word for word in words[0] if all(word in others for others in words)]
    ends = []
    for index, (points, own) in enumerate(zip(lines.values(), words, strict=True)):
        means = np.array([np.mean(gaps) for gaps in points.values()])
        extremes = np.array([(min(gaps), max(gaps)) for gaps in points.values()]).T
        bars = np.abs(extremes - means)
        axes.errorbar(range(len(points)), means, bars, marker="o", ms=5, elinewidth=3, alpha=0.9, **look(index))
        differs = ", ".join(word for word in own if word not in common)
        text = f"{differs}: {means[-1]:+.1f}" if differs else f"{means[-1]:+.1f}"
        ends.append(End(float(means[-1]), textwrap.fill(text, 20), look(index)))
    ticks = sorted({place for points in lines.values() for place in points})
    axes.axhline(0, color=INK, lw=1)
    axes.set(xticks=range(len(ticks)), xticklabels=ticks, xlabel=xlabel, title=", ".join(common).capitalize())
    axes.grid()
    return ends
