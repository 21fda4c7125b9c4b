"""A plan as a chart: memory against predicted step time."""

from __future__ import annotations

from pathlib import Path

from fsdp_zpp.extras import how_to_install

from .chart_labels import write_labels
from .estimate import Estimate
from .report import Plan, shown_rows


def draw_plan(plan: Plan, path: Path) -> None:
    """Draw a point for each row of the table, in grey if it does not fit, to an image whose suffix sets the format.

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
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    rows, _ = shown_rows(plan)
    for fits, colour, label in ((True, "tab:blue", "fits"), (False, "0.7", "does not fit")):
        points = [_point(estimate) for estimate in rows if estimate.fits == fits]
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
    if all(estimate.time.total > 0 for estimate in rows):
        axes.set_yscale("log")
    axes.set(xlabel="memory, GiB a GPU", ylabel="predicted step time, s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(LogFormatter())
    axes.margins(0.15)
    axes.grid(alpha=0.3)
    # Below the axes, where it covers no point.
    figure.legend(loc="outside lower center", ncols=4)
    write_labels(axes, figure, [(each.name, _point(each), each.fits) for each in rows])
    figure.savefig(path, dpi=150)


def _point(estimate: Estimate) -> tuple[float, float]:
    return estimate.gib, estimate.time.total
