"""The figure of the convergence benchmark: validation loss against tokens, and how far it is above the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from convergence_report import Runs

_WARM = 0.15
"""Share of a run left out of the figure: there losses fall so far that no difference would be seen."""


def draw(runs: Runs, families: Mapping[str, str], reference: str, path: Path) -> None:
    """Draw a column of two panels for every family: losses, and gaps to the reference with the same seed.

    Args:
        runs: What is drawn.
        families: Titles by the name of the plain configuration.
        reference: The configuration without encoded gradients.
        path: Of the PNG.
    """
    # Without pyplot there is no window and no global figure: Agg draws the PNG.
    figure = Figure(figsize=(5.2 * len(families), 8), layout="constrained")
    columns = figure.subplots(2, len(families), squeeze=False, sharex=True).T
    for (family, title), (losses, gaps) in zip(families.items(), columns, strict=True):
        names = [reference, *(name for name in runs.names if name.split("+")[0] == family)]
        for index, name in enumerate(names):
            color = "black" if name == reference else f"C{index - 1}"
            _band(losses, runs, name, runs.seeds(name), color, lambda name, seed: _curve(runs, name, seed)[1])
            _band(gaps, runs, name, runs.seeds(name, reference), color, _gap_to(runs, reference))
        losses.set(title=title, ylabel="validation loss, nats a byte")
        gaps.set(xlabel="tokens, millions", ylabel=f"above {reference}, %")
        losses.legend(fontsize="small")
        for axes in (losses, gaps):
            axes.grid(alpha=0.3)
    figure.suptitle("Mean over seeds; bands from the lowest to the highest")
    figure.savefig(path, dpi=120)


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
