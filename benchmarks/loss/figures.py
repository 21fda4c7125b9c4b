"""Figures: losses of a comparison, and of the convergence study the losses and how far they are above the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from gaps import FAMILIES, REFERENCE, Runs
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # without pyplot there is no window and no global figure: Agg draws the PNG
from records import Record

_WARM = 0.15
"""Share of a run left out of the convergence figures: losses fall so far there that no difference would be seen."""


def draw_losses(runs: Sequence[Record], path: Path) -> None:
    """Draw training and validation losses of a comparison, the reference, which comes first, broad and grey."""
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
    _save(figure, path, dpi=150)


def draw_gaps(runs: Runs, path: Path, prefix: str = "") -> None:
    """Draw a column of two panels for every family: losses, and gaps to the reference with the same seed.

    Args:
        runs: What is drawn.
        path: Of the PNG.
        prefix: ``w8:`` for int8 weights.
    """
    families = {prefix + family: what for family, what in FAMILIES.items() if runs.members(prefix + family)}
    reference = prefix + REFERENCE
    figure = Figure(figsize=(5.2 * len(families), 8), layout="constrained")
    columns = figure.subplots(2, len(families), squeeze=False, sharex=True).T
    for (family, title), (losses, gaps) in zip(families.items(), columns, strict=True):
        for index, name in enumerate([reference, *runs.members(family)]):
            color = "black" if name == reference else f"C{index - 1}"
            _band(losses, runs, name, runs.seeds(name), color, lambda name, seed: _curve(runs, name, seed)[1])
            _band(gaps, runs, name, runs.seeds(name, reference), color, _gap_to(runs, reference))
        losses.set(title=title, ylabel="validation loss, nats a byte")
        gaps.set(xlabel="tokens, millions", ylabel=f"above {reference}, %")
        losses.legend(fontsize="small")
        for axes in (losses, gaps):
            axes.grid(alpha=0.3)
    figure.suptitle("Mean over seeds; bands from the lowest to the highest")
    _save(figure, path, dpi=120)


def _save(figure: Figure, path: Path, dpi: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)


def _band(
    axes: Axes,
    runs: Runs,
    name: str,
    seeds: Sequence[int],
    color: str,
    values: Callable[[str, int], np.ndarray],
) -> None:
    """The mean over seeds as a line, in a band from the lowest to the highest."""
    if not seeds:
        return
    tokens = _curve(runs, name, seeds[0])[0]
    curves = np.stack([values(name, seed) for seed in seeds])
    shown = tokens >= _WARM * tokens[-1]
    tokens, curves = tokens[shown] / 1e6, curves[:, shown]
    axes.plot(tokens, curves.mean(axis=0), color=color, lw=1.4, label=f"{name} (seeds: {len(seeds)})")
    axes.fill_between(tokens, curves.min(axis=0), curves.max(axis=0), color=color, alpha=0.15, lw=0)


def _curve(runs: Runs, name: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    tokens, losses = np.array(runs.curve(name, seed)).T
    return tokens, losses


def _gap_to(runs: Runs, reference: str) -> Callable[[str, int], np.ndarray]:
    return lambda name, seed: 100 * (_curve(runs, name, seed)[1] / _curve(runs, reference, seed)[1] - 1)
