"""Figure of the study of local steps: how far above synchronous training it ends, against ``every``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from charts import INK, SERIES, Figure, drawn
from gaps import REFERENCE
from local_gaps import TunedRuns, every
from matplotlib.axes import Axes

_LINES: tuple[dict[str, Any], ...] = ({"fmt": "o-"}, {"fmt": "s--", "mfc": "none"}, {"fmt": "^:", "mfc": "none"})
"""Styles of lines, each in all colors before the next."""


@drawn
def every_svg(runs: Mapping[int, TunedRuns], drawn_variants: Collection[str] | None = None) -> Figure:
    """Draw a panel for each number of nodes, with a line for each codec and other change.

    Args:
        runs: Runs by the number of nodes; those that have the reference, too, are drawn.
        drawn_variants: The variants to draw; all by default.
    """
    shown = {nodes: tuned for nodes, tuned in runs.items() if REFERENCE in tuned.rates and tuned.variants()}
    figure = Figure(figsize=(2.6 + 3 * max(len(shown), 1), 4), layout="constrained")
    if not shown:
        return figure
    panels = figure.subplots(1, len(shown), squeeze=False, sharey=True)[0]
    # A color means the same in all panels.
    known = dict.fromkeys(variant for tuned in shown.values() for variant in tuned.variants())
    variants = [variant for variant in known if drawn_variants is None or variant in drawn_variants]
    lines: dict[str, Any] = {}
    for axes, (nodes, tuned) in zip(panels, shown.items(), strict=True):
        for variant, names in tuned.variants().items():
            if variant not in variants:
                continue
            _line(axes, tuned, names, variant, variants.index(variant))
        axes.axhline(0, color=INK, lw=1)
        ticks = sorted({every(name) for name in tuned.names if name != REFERENCE})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_title(f"{nodes} nodes", loc="left")
        axes.set(xlabel="steps between exchanges", xlim=(ticks[0] / 1.5, ticks[-1] * 1.5))
        axes.grid()
        handles, labels = axes.get_legend_handles_labels()
        lines |= dict(zip(labels, handles, strict=True))
    panels[0].set_ylabel(f"validation loss above {REFERENCE}, %")
    figure.legend(lines.values(), lines.keys(), loc="outside right center")
    return figure


def _line(axes: Axes, tuned: TunedRuns, names: list[str], variant: str, index: int) -> None:
    """Draw the mean gaps over seeds, with bars from the lowest to the highest, beside the bars of others."""
    gaps = {name: of_seeds for name in names if (of_seeds := tuned.runs.gaps(name, REFERENCE))}
    if not gaps:
        return
    means = np.array([np.mean(of_seeds) for of_seeds in gaps.values()])
    extremes = np.array([(min(of_seeds), max(of_seeds)) for of_seeds in gaps.values()]).T
    places = np.array([every(name) for name in gaps]) * 1.03 ** (index - 2)
    look = {"color": SERIES[index % len(SERIES)], **_LINES[index // len(SERIES) % len(_LINES)]}
    axes.errorbar(places, means, np.abs(extremes - means), lw=1.4, ms=4.5, capsize=3, label=variant, **look)
