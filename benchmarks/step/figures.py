"""Figures of steps on pages: step times beside peak memory, and peak memory alone."""

from __future__ import annotations

from collections.abc import Mapping

from charts import OURS, PEER, Figure, drawn
from headline import LABELS, times_text
from labels import label
from result_files import Row

from fsdp_zpp.bench.chart import Bar, draw_bar, frame, name_above, new_figure, steps_figure


@drawn
def step_time(entries: Mapping[str, list[Row]]) -> Figure:
    """Draw a bar for each strategy's step, a thin line from the fastest to the slowest, and a bar for peak memory."""
    return steps_figure(
        [
            Bar(
                LABELS[name].replace("`", "").replace("Strategy.", "").replace(" 0.19.8", ""),
                times_text(rows),
                _color(name),
                rows,
            )
            for name, rows in entries.items()
        ]
    )


@drawn
def memory(runs: Mapping[str, list[Row]]) -> Figure:
    """Draw peak memory of each strategy, a panel for each run."""
    counts = [len(rows) for rows in runs.values()]
    figure = new_figure(0.8 * len(runs) + 0.44 * sum(counts))
    panels = figure.subplots(len(runs), 1, height_ratios=counts, sharex=True)
    for axes, (title, rows) in zip(panels, runs.items(), strict=True):
        for place, row in enumerate(sorted(rows, key=lambda row: -row["peak_gib"])):
            name_above(axes, place, label(row["strategy"]))
            draw_bar(axes, place, row["peak_gib"], f"{row['peak_gib']:.1f}", _color(row["strategy"]))
        frame(axes, "peak memory, GiB" if axes is panels[-1] else "", len(rows))
        axes.set_title(title, loc="left", weight="bold")
        axes.margins(x=0.12)
    return figure


def _color(strategy: str) -> str:
    """Return the color of fsdp_zpp's strategies, or of others."""
    return OURS if "zeropp" in strategy and "deepspeed" not in strategy else PEER
