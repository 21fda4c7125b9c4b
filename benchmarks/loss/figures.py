"""Figures of losses: of comparisons, and of the convergence study with gaps to the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from charts import INK, PEER, SERIES, Figure, drawn
from gaps import FAMILIES, REFERENCE, Runs
from matplotlib.axes import Axes
from result_files import Result, Row

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
    figure = Figure(figsize=(4.6, 5.4), layout="constrained")
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=(1.5, 1))
    for run, color, width in zip(results[0]["rows"], (PEER, SERIES[0]), (3.5, 1.2), strict=True):
        # In a run's legend the line that is easier to see stands for both.
        losses.plot(range(1, len(run["losses"]) + 1), run["losses"], color=color, lw=width / 2, alpha=0.45)
        done, validation = zip(*run["validation"], strict=True)
        losses.plot(done, validation, "o-", color=color, lw=width, ms=width + 2, label=run["label"])
    losses.set(title="training and validation loss, seed 0", ylabel="nats per token")
    losses.legend()
    for index, result in enumerate(results):
        reference, run = (np.array(row["validation"]) for row in result["rows"])
        gap = 100 * (run[:, 1] / reference[:, 1] - 1)
        differences.plot(run[:, 0], gap, "o-", ms=3.5, lw=1.2, color=SERIES[index], label=f"seed {index}")
    differences.axhline(0, color=INK, lw=1)
    label = results[0]["rows"][1]["label"]
    differences.set(title=f"validation loss of {label} above full_shard", xlabel="optimizer step", ylabel="%")
    differences.legend(ncols=len(results))
    for axes in (losses, differences):
        axes.grid()
    return figure


@drawn
def gaps_svg(runs: Runs, prefix: str = "") -> Figure:
    """Draw a row of two panels for every family: losses, and gaps to the reference with the same seed.

    Args:
        runs: Runs of the convergence study.
        prefix: ``w8:`` for int8 weights.
    """
    families = {prefix + family: title for family, title in FAMILIES.items() if runs.members(prefix + family)}
    reference = prefix + REFERENCE
    figure = Figure(figsize=(7.6, 3.4 * len(families)), layout="constrained")
    rows = figure.subplots(len(families), 2, squeeze=False, sharex=True)

    def loss(name: str, seed: int) -> np.ndarray:
        return np.array(runs.curve(name, seed))[:, 1]

    def gap(name: str, seed: int) -> np.ndarray:
        return 100 * (loss(name, seed) / loss(reference, seed) - 1)

    for (family, title), (losses, gaps) in zip(families.items(), rows, strict=True):
        for index, name in enumerate([reference, *runs.members(family)]):
            color = INK if name == reference else SERIES[index - 1]
            _band(losses, runs, name, runs.seeds(name), color, loss)
            _band(gaps, runs, name, runs.seeds(name, reference), color, gap)
        losses.set_title(title, loc="left")
        losses.set(ylabel="validation loss, nats a byte")
        gaps.set(ylabel=f"above {reference}, %")
        losses.legend()
        for axes in (losses, gaps):
            axes.grid()
            axes.tick_params(labelbottom=True)
    for axes in rows[-1]:
        axes.set(xlabel="tokens, millions")
    return figure


def _band(
    axes: Axes, runs: Runs, name: str, seeds: list[int], color: str, values: Callable[[str, int], np.ndarray]
) -> None:
    """Draw the mean over seeds as a line, in a band from the lowest to the highest."""
    if not seeds:
        return
    tokens = np.array(runs.curve(name, seeds[0]))[:, 0]
    curves = np.stack([values(name, seed) for seed in seeds])
    shown = tokens >= _WARM * tokens[-1]
    tokens, curves = tokens[shown] / 1e6, curves[:, shown]
    axes.plot(tokens, curves.mean(axis=0), color=color, lw=1.4, label=f"{name} ({len(seeds)} seeds)")
    axes.fill_between(tokens, curves.min(axis=0), curves.max(axis=0), color=color, alpha=0.15, lw=0)
