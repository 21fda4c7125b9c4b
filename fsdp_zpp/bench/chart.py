"""Bars of strategies: the time of a step, with a thin line from the fastest to the slowest, beside peak memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_zpp.extras import how_to_install

from .result_file import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FAINT, PEER, OURS, MEMORY = "#59636f", "#8b95a1", "#2f7fe0", "#d9822b"
"""Colors: of lines, of other libraries, of fsdp_zpp, of memory."""
_WIDTH = 4.4
"""Inches; text of 10 points is still legible when the figure is scaled to a phone's 360 pixels."""


@dataclass(frozen=True)
class Bar:
    """What is drawn of one strategy.

    Attributes:
        name: Text above its bar.
        text: Text behind the bar of its time.
        color: Color of that bar.
        rows: Its measurements.
    """

    name: str
    text: str
    color: str
    rows: Sequence[Row]


def draw_steps(rows: Sequence[Row], path: Path) -> None:
    """Draw the rows that have a time to an image file, whose suffix sets the format.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
        ValueError: If matplotlib can't write the format, or nothing was measured.
    """
    colors = {True: PEER, False: OURS}
    bars = [
        Bar(row["label"], f"{row['step_ms']:.0f}", colors[row["is_torchs"]], [row]) for row in rows if "step_ms" in row
    ]
    if not bars:
        raise ValueError(f"nothing was measured, so there is nothing to draw to {path}")
    steps_figure(bars).savefig(path, dpi=150)


def check_format(path: Path) -> None:
    """Raise unless :func:`draw_steps` can write to ``path``.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
        ValueError: If matplotlib can't write the format.
    """
    known = new_figure(1).canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ValueError(f"--chart {path} is not an image; allowed are the suffixes .{', .'.join(sorted(known))}")


def new_figure(height: float) -> Figure:
    """Return an empty figure of this height in inches.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"the chart needs matplotlib: {how_to_install('bench')}") from error
    # Without pyplot there is neither a window nor a global figure that somebody must close.
    return Figure(figsize=(_WIDTH, height), layout="constrained")


def steps_figure(bars: Sequence[Bar]) -> Figure:
    """Return a figure with times, and with peaks of memory if any are known."""
    figure = new_figure(0.6 + 0.46 * len(bars))
    peaks = [max((row.get("peak_gib") or 0.0 for row in bar.rows), default=0.0) for bar in bars]
    if any(peaks):
        times, memory = figure.subplots(1, 2, sharey=True, width_ratios=(1.75, 1))
    else:
        times, memory = figure.subplots(), None
    for place, (bar, peak) in enumerate(zip(bars, peaks, strict=True)):
        name_above(times, place, bar.name)
        draw_bar(times, place, bar.rows[0]["step_ms"], bar.text, bar.color)
        fastest, slowest = min(row["fastest_ms"] for row in bar.rows), max(row["slowest_ms"] for row in bar.rows)
        times.plot([fastest, slowest], [place + 0.35] * 2, color=FAINT, lw=1)
        if memory is not None:
            draw_bar(memory, place, peak, f"{peak:.1f}", MEMORY)
    frame(times, "step, ms", len(bars))
    if memory is not None:
        frame(memory, "peak memory, GiB", len(bars))
    times.set_xlim(0, 1.5 * max(row["step_ms"] for bar in bars for row in bar.rows))
    return figure


def draw_bar(axes: Axes, place: int, length: float, text: str, color: str) -> None:
    """Draw a bar with its text behind it."""
    bars = axes.barh(place + 0.13, length, height=0.36, color=color)
    axes.bar_label(bars, [text], padding=4, fontsize=9)


def name_above(axes: Axes, place: int, text: str) -> None:
    """Write a bar's name above it, where it has the whole width."""
    axes.text(0, place - 0.12, f" {text}", ha="left", va="bottom", fontsize=9.5)


def frame(axes: Axes, xlabel: str, bars: int) -> None:
    """Set what is around ``bars`` bars."""
    axes.set(xlabel=xlabel, yticks=[], ylim=(bars - 0.4, -0.55))
    axes.spines["left"].set_visible(False)
    axes.locator_params(axis="x", nbins=4)
