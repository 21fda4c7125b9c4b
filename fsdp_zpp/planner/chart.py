"""A plan as a chart: memory against predicted step time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_zpp.extras import how_to_install

from .config import GIB
from .estimate import Estimate
from .report import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NEAR = 0.04
"""Points that are closer than this fraction of both axes share a label."""


def draw_plan(plan: Plan, path: Path) -> None:
    """Draw one point per strategy, in grey if it does not fit, to an image file whose suffix sets the format.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
        ValueError: If matplotlib can't write the format.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogFormatter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"the chart needs matplotlib: {how_to_install('examples')}") from error
    # Without pyplot there is neither a window nor a global figure that somebody must close.
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for fits, colour, label in ((True, "tab:blue", "fits"), (False, "0.7", "does not fit")):
        points = [_point(estimate) for estimate in plan.estimates if estimate.fits == fits]
        if points:
            axes.plot(*zip(*points, strict=True), "o", color=colour, label=label, ls="")
    if plan.choice is not None:
        x, y = _point(plan.choice)
        axes.plot([x], [y], "o", mfc="none", mec="tab:red", ms=12, label=f"the choice: {plan.choice.name}", ls="")
    if plan.budget.gpu_memory is not None:
        axes.axvline(plan.budget.gpu_memory, color="0.5", ls="--", lw=1, label=f"{plan.budget.gpu_memory:g} GiB")
    # Strategies differ by factors in memory, NNN and GGG by up to the world size, which crowds them on linear axes.
    axes.set_xscale("log")
    # A single GPU sends nothing, and a log axis can't show 0.
    if all(estimate.time.total > 0 for estimate in plan.estimates):
        axes.set_yscale("log")
    axes.set(xlabel="memory, GiB a GPU", ylabel="predicted step time, s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(LogFormatter())
    axes.margins(0.08)
    axes.grid(alpha=0.3)
    _label_points(axes, plan)
    axes.legend()
    figure.savefig(path, dpi=150)


def _point(estimate: Estimate) -> tuple[float, float]:
    return estimate.memory.total / GIB, estimate.time.total


def _label_points(axes: Axes, plan: Plan) -> None:
    """Write the names beside each point; points that would cover each other's names share a label."""
    # Distances are taken as the eye sees them, after the scaling of both axes.
    to_axes = axes.transData + axes.transAxes.inverted()
    groups: list[tuple[tuple[float, float], list[Estimate]]] = []
    for estimate in sorted(plan.estimates, key=_point):
        x, y = to_axes.transform(_point(estimate))
        for (at_x, at_y), members in groups:
            if abs(x - at_x) < _NEAR and abs(y - at_y) < _NEAR:
                members.append(estimate)
                break
        else:
            groups.append(((x, y), [estimate]))
    for _, members in groups:
        axes.annotate(
            ", ".join(estimate.name for estimate in members),
            _point(members[0]),
            xytext=(5, 5),
            textcoords="offset points",
            fontsize=8,
            color="black" if any(estimate.fits for estimate in members) else "0.5",
        )
