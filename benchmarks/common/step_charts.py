"""Charts of strategies: the time of a step as a bar, and memory beside it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

Row = dict[str, Any]
"""Measurement of a strategy: ``step_ms``, ``fastest_ms`` and ``slowest_ms``, and ``peak_gib`` if it is known."""

INK, SOFT, PEER, OURS = "#1f2430", "#5b6472", "#8a93a3", "#2b66d1"
"""Colors: of text, of what is less important, of other libraries' bars, of fsdp_zpp's."""
ONBAR = {PEER: "#10141b", OURS: "#ffffff"}
"""Colors of text on bars."""
WIDTH, TEXT = 640, 16
"""Width of a figure and size of its text, in points: on 640 pixels, text is as large as that of a page."""
ROW, _LINE, BAR, GAP = 31, 20, 20, 9
_PEAKS = 132
"""Width of the bars of memory with their text and heading."""


@dataclass(frozen=True)
class Bar:
    """Bars of one strategy: its name, the text at its time, bold text behind it, a color, and its measurements."""

    name: str
    text: str
    speedup: str
    color: str
    rows: Sequence[Row]

    @property
    def peak(self) -> float:
        """Return the largest peak of memory in GiB, 0 if it is not known."""
        return max((row.get("peak_gib") or 0.0 for row in self.rows), default=0.0)


def new_figure(height: float) -> Figure:
    """Return an empty figure of this height in points."""
    # Without pyplot there is neither a window nor a global figure that somebody must close.
    return Figure(figsize=(WIDTH / 72, height / 72))


def steps_figure(bars: Sequence[Bar], heading: str, note: str = "") -> Figure:
    """Return a figure with the times of steps under a heading, peaks of memory if any are known, and a note below."""
    names = [textwrap.fill(bar.name, 26, break_long_words=False) for bar in bars]
    rows = [ROW + _LINE * name.count("\n") for name in names]
    figure, axes = canvas(ROW + sum(rows) + (ROW if note else 4))
    peak = max(bar.peak for bar in bars)
    left = max(width_of(line) for name in names for line in name.splitlines()) + GAP
    right = WIDTH - (_PEAKS + 2 * GAP if peak else 0)
    room = right - left
    scale = _scale(bars, room)
    write(axes, 0, ROW / 2, heading, weight="bold")
    if peak:
        write(axes, WIDTH - _PEAKS, ROW / 2, "Memory, GiB", weight="bold")
        peak_scale = (_PEAKS - GAP - width_of(f"{peak:.1f}")) / peak
    top = float(ROW)
    for bar, name, row in zip(bars, names, rows, strict=True):
        middle = top + row / 2
        write(axes, left - GAP, middle, name, ha="right")
        _draw_time(axes, left, middle, bar, scale, room)
        if bar.peak:
            axes.barh(middle, bar.peak * peak_scale, left=WIDTH - _PEAKS, height=BAR, color=bar.color)
            write(axes, WIDTH - _PEAKS + bar.peak * peak_scale + GAP, middle, f"{bar.peak:.1f}")
        top += row
    write(axes, 0, top + ROW / 2, note, color=SOFT)
    return figure


def width_of(text: str, weight: str = "normal") -> float:
    """Return how wide a text is in matplotlib's font, in points; fonts of most systems are narrower."""
    font = FontProperties(size=TEXT, weight=weight)
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0])


def canvas(height: float) -> tuple[Figure, Axes]:
    """Return a figure with axes over all of it, whose unit is the point and which show nothing."""
    figure = new_figure(height)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(height, 0))
    axes.set_axis_off()
    return figure, axes


def write(axes: Axes, x: float, y: float, text: str, ha: str = "left", **look: Any) -> None:
    """Write a text with its middle at a height, in the units of :func:`canvas`."""
    axes.text(x, y, text, ha=ha, va="center", fontsize=TEXT, **({"color": INK} | look))


def _texts_width(bar: Bar) -> float:
    return 3 * GAP + width_of(bar.text) + width_of(bar.speedup, "bold")


def _ends(bar: Bar, key: str) -> tuple[float, float]:
    figures = [row[key] for row in bar.rows]
    return min(figures), max(figures)


def _text_place(bar: Bar, scale: float, room: float) -> float | None:
    """Return where texts start: behind the bar if there is room, else in one of the longest; None if neither."""
    behind = _ends(bar, "slowest_ms")[1] * scale
    if behind + _texts_width(bar) <= room:
        return behind + GAP
    is_long = behind >= 0.7 * room and _ends(bar, "step_ms")[0] * scale >= _texts_width(bar)
    return GAP if is_long else None


def _scale(bars: Sequence[Bar], room: float) -> float:
    """Return the largest number of points a ms with which all texts have room; with a tenth of it, all do."""
    largest = room / max(_ends(bar, "slowest_ms")[1] for bar in bars)
    scales = [largest * part / 50 for part in range(50, 4, -1)]
    return next((scale for scale in scales if all(_text_place(bar, scale, room) for bar in bars)), scales[-1])


def _draw_time(axes: Axes, left: float, middle: float, bar: Bar, scale: float, room: float) -> None:
    """Draw a strategy's median time, paler from its lowest to its highest, and a line from the fastest step on."""
    low, high = _ends(bar, "step_ms")
    axes.barh(middle, high * scale, left=left, height=BAR, color=bar.color, alpha=0.5)
    axes.barh(middle, low * scale, left=left, height=BAR, color=bar.color)
    steps = (_ends(bar, "fastest_ms")[0], _ends(bar, "slowest_ms")[1])
    axes.plot([left + step * scale for step in steps], [middle + BAR / 2 + 2] * 2, color=SOFT, lw=1.5)
    place = _text_place(bar, scale, room) or steps[1] * scale + GAP
    color = INK if place > GAP else ONBAR[bar.color]
    write(axes, left + place, middle, bar.text, color=color)
    write(axes, left + place + width_of(bar.text) + GAP, middle, bar.speedup, color=color, weight="bold")
