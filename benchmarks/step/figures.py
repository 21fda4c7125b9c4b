"""Figures of steps on pages: step times beside peak memory, and peak memory alone."""

from __future__ import annotations

from collections.abc import Mapping

from charts import FAINT, MEMORY, OURS, PEER, Figure, drawn
from headline import LABELS, times_text
from labels import label
from matplotlib.axes import Axes
from result_files import Row

_WIDTH = 4.4
"""Inches; text of 10 points is still legible when the figure is scaled to a phone's 360 pixels."""


@drawn
def step_time(entries: Mapping[str, list[Row]]) -> Figure:
    """Draw a bar for each strategy's step, a thin line from the fastest to the slowest, and a bar for peak memory."""
    figure = Figure(figsize=(_WIDTH, 0.6 + 0.46 * len(entries)), layout="constrained")
    times, memory = figure.subplots(1, 2, sharey=True, width_ratios=(1.75, 1))
    for place, (name, rows) in enumerate(entries.items()):
        _name(times, place, LABELS[name].replace("`", "").replace("Strategy.", "").replace(" 0.19.8", ""))
        _bar(times, place, rows[0]["step_ms"], times_text(rows), _color(name))
        fastest, slowest = min(row["fastest_ms"] for row in rows), max(row["slowest_ms"] for row in rows)
        times.plot([fastest, slowest], [place + 0.35] * 2, color=FAINT, lw=1)
        peak = max(row["peak_gib"] for row in rows)
        _bar(memory, place, peak, f"{peak:.1f}", MEMORY)
    _frame(times, "step, ms", len(entries))
    _frame(memory, "peak memory, GiB", len(entries))
    times.set_xlim(0, 1.5 * max(row["step_ms"] for rows in entries.values() for row in rows))
    return figure


@drawn
def memory(runs: Mapping[str, list[Row]]) -> Figure:
    """Draw peak memory of each strategy, a panel for each run."""
    counts = [len(rows) for rows in runs.values()]
    figure = Figure(figsize=(_WIDTH, 0.8 * len(runs) + 0.44 * sum(counts)), layout="constrained")
    panels = figure.subplots(len(runs), 1, height_ratios=counts, sharex=True)
    for axes, (title, rows) in zip(panels, runs.items(), strict=True):
        for place, row in enumerate(sorted(rows, key=lambda row: -row["peak_gib"])):
            _name(axes, place, label(row["strategy"]))
            _bar(axes, place, row["peak_gib"], f"{row['peak_gib']:.1f}", _color(row["strategy"]))
        _frame(axes, "peak memory, GiB" if axes is panels[-1] else "", len(rows))
        axes.set_title(title, loc="left", weight="bold")
        axes.margins(x=0.12)
    return figure


def _color(strategy: str) -> str:
    """Return the color of fsdp_zpp's strategies, or of others."""
    return OURS if "zeropp" in strategy and "deepspeed" not in strategy else PEER


def _bar(axes: Axes, place: int, length: float, text: str, color: str) -> None:
    bars = axes.barh(place + 0.13, length, height=0.36, color=color)
    axes.bar_label(bars, [text], padding=4, fontsize=9)


def _name(axes: Axes, place: int, text: str) -> None:
    """Write a bar's name above it, where it has the whole width."""
    axes.text(0, place - 0.12, f" {text}", ha="left", va="bottom", fontsize=9.5)


def _frame(axes: Axes, xlabel: str, bars: int) -> None:
    axes.set(xlabel=xlabel, yticks=[], ylim=(bars - 0.4, -0.55))
    axes.spines["left"].set_visible(False)
    axes.locator_params(axis="x", nbins=4)
