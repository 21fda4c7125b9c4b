"""Figures of losses: of a comparison, and of gaps to full precision during training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from charts import INK, End, Figure, drawn, entitle, label_ends, laid_out, look
from matplotlib.axes import Axes
from result_files import Result, Row
from tables import REFERENCE, beside_reference, size_of, with_error

_WARM = 0.15
"""Share of a run left out of the figure of gaps: losses fall so far there that no difference would be seen."""


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
def error_bars_svg(studies: Sequence[tuple[Sequence[Result], Mapping[str, str]]]) -> Figure:
    """Draw mean gaps to the reference with the same seed, in bands of one standard error, against the bytes trained on.

    Args:
        studies: Results of each study, and the configurations that are drawn, with what is said of them.
    """
    figure = laid_out(280)
    axes = figure.subplots()
    ends = []
    for results, shown in studies:
        for nodes, runs in beside_reference(results, REFERENCE).items():
            for name in (name for name in shown if name in runs.names):
                seeds = runs.seeds(name, REFERENCE)
                tokens = np.array(runs.curve(name, seeds[0]))[:, 0]
                losses, of_reference = (
                    np.array([np.array(runs.curve(each, seed))[:, 1] for seed in seeds]) for each in (name, REFERENCE)
                )
                after = tokens >= _WARM * tokens[-1]
                gaps = 100 * (losses / of_reference - 1)[:, after]
                line = look(len(ends))
                _draw_band(axes, tokens[after] / 1e6, gaps, line)
                text = f"{shown[name]}, {nodes} nodes:\n{with_error(gaps[:, -1].tolist(), '+.2f')}"
                ends.append(End(float(gaps[:, -1].mean()), text, line))
                size = size_of(runs.row(name, seeds[0]), tokens[-1])
    entitle(figure, "Validation loss above FULL_SHARD, %", f"GPT-2, {size}; bands are one standard error")
    axes.axhline(0, color=INK, lw=1)
    axes.set(xlabel="Bytes trained on, millions")
    axes.grid()
    figure.draw_without_rendering()
    label_ends(axes, ends)
    return figure


def _draw_band(axes: Axes, across: np.ndarray, gaps: np.ndarray, line: Mapping[str, Any]) -> None:
    """Draw the mean of gaps [seeds, points] in a band of one standard error."""
    mean = gaps.mean(axis=0)
    error = gaps.std(axis=0, ddof=1) / len(gaps) ** 0.5 if len(gaps) > 1 else 0 * mean
    axes.plot(across, mean, **line)
    axes.fill_between(across, mean - error, mean + error, color=line["color"], alpha=0.15, lw=0)
