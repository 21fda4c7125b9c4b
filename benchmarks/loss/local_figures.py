"""The figure of the study of local steps: how far above synchronous training it ends, against ``every``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gaps import REFERENCE
from local_gaps import TunedRuns, every
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # without pyplot there is no window and no global figure: Agg draws the PNG


def draw_every(runs: Mapping[int, TunedRuns], path: Path) -> None:
    """Draw a panel for each number of nodes, with a line for each codec and for what else is changed.

    Args:
        runs: By the number of nodes; those that have the reference, too, are drawn.
        path: Of the PNG.
    """
    drawn = {nodes: tuned for nodes, tuned in runs.items() if REFERENCE in tuned.rates and tuned.variants()}
    if not drawn:
        return
    figure = Figure(figsize=(3 + 4.2 * len(drawn), 4.6), layout="constrained")
    panels = figure.subplots(1, len(drawn), squeeze=False, sharey=True)[0]
    # A color means the same in all panels.
    variants = list(dict.fromkeys(variant for tuned in drawn.values() for variant in tuned.variants()))
    for axes, (nodes, tuned) in zip(panels, drawn.items(), strict=True):
        for variant, names in tuned.variants().items():
            _line(axes, tuned, names, variant, variants.index(variant))
        axes.axhline(0, color="black", lw=1)
        ticks = sorted({every(name) for name in tuned.names if name != REFERENCE})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set(title=f"{nodes} nodes", xlabel="steps between exchanges")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(f"above {REFERENCE}, %")
    lines: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        lines |= dict(zip(labels, handles, strict=True))
    figure.legend(lines.values(), lines.keys(), fontsize="small", loc="outside right center")
    figure.suptitle("Validation loss, mean over seeds; bars from the lowest to the highest", fontsize="medium")
    figure.savefig(path, dpi=120)


def _line(axes: Axes, tuned: TunedRuns, names: list[str], variant: str, index: int) -> None:
    """The mean gaps of a codec, beside those of others, whose bars would hide them."""
    gaps = {name: tuned.runs.gaps(name, REFERENCE) for name in names}
    gaps = {name: of_seeds for name, of_seeds in gaps.items() if of_seeds}
    if not gaps:
        return
    means = np.array([np.mean(of_seeds) for of_seeds in gaps.values()])
    extremes = np.array([(min(of_seeds), max(of_seeds)) for of_seeds in gaps.values()]).T
    places = np.array([every(name) for name in gaps]) * 1.03 ** (index - 2)
    below_and_above = np.abs(extremes - means)
    axes.errorbar(places, means, below_and_above, fmt="o-", color=f"C{index % 10}", lw=1.4, capsize=3, label=variant)
