"""Figure of the study of local steps: how far above synchronous training it ends, and what decides that."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping

import numpy as np
from charts import INK, End, Figure, drawn, entitle, label_ends, laid_out, look
from figures import size_of
from gaps import REFERENCE
from local_gaps import TunedRuns, every, variant
from matplotlib.axes import Axes
from words import in_words

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
