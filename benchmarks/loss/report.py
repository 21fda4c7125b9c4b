"""Tables and figures of losses, from results/: docs/results/loss.md.

python benchmarks/loss/report.py [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "common"))

import result_pages
import tables
from result_files import Result, read
from result_pages import RESULTS_PAGES, Figures, svg_with_origin, with_origin

RESULTS = Path(__file__).parent / "results"
ON_2X1, ON_2X2 = "convergence-2x1-h200", "convergence-2x2-h200"
LOCAL_STEPS = "local-steps-*"
ON_CPUS, ON_GPUS = "compare-cpu", "compare-h200"
ENCODING_ERRORS = "encoding-errors-cpu"


def seeds(name: str) -> tuple[str, ...]:
    """Return the names of the runs of all seeds of a comparison."""
    return tuple(f"{name}-seed{seed}" for seed in range(3))


def of_gaps(prefix: str = "") -> Callable[[list[Result]], str]:
    """Return the function that makes a table of the convergence study."""
    return lambda results: tables.convergence(tables.Runs(results), prefix)


STRATEGIES = tuple(f"compare-cpu-{name}-seed0" for name in ("zeropp", "loco", "int4delta", "fsdp2"))
TABLES: dict[str, tuple[Callable[[list[Result]], str], str, tuple[str, ...]]] = {
    "zeropp on CPUs": (tables.by_seed, ON_CPUS, seeds("compare-cpu-zeropp")),
    "zeropp on GPUs": (tables.by_seed, ON_GPUS, seeds("compare-h200-zeropp")),
    "no codec on GPUs": (tables.by_seed, ON_GPUS, seeds("compare-h200-GGG")),
    "strategies on CPUs": (tables.by_strategy, ON_CPUS, STRATEGIES),
    "gradients on 2 x 1": (of_gaps(), ON_2X1, ()),
    "gradients and weights on 2 x 1": (of_gaps("w8:"), ON_2X1, ()),
    "gradients on 2 x 2": (of_gaps(), ON_2X2, ()),
    "small parameters": (
        lambda results: tables.small_parameters(results[0]["rows"]),
        ENCODING_ERRORS,
        ("small-parameters-cpu",),
    ),
    "straddling": (lambda results: tables.straddling(results[0]["rows"]), ENCODING_ERRORS, ("straddling-cpu",)),
    "local steps": (tables.local_steps, LOCAL_STEPS, ()),
    "DiLoCo's recipe": (tables.diloco, "diloco-scaling-*", ()),
    "Muon on CPUs": (tables.muon, "muon-2x2-cpu", ()),
    "Muon on GPUs": (tables.muon, "muon-2x2-h200", ()),
}
"""Functions that make the tables, by their names on the page, the studies that they are from, and the runs that they
show: all, if none is named."""


def runs_of(studies: str, names: tuple[str, ...]) -> dict[str, Result]:
    """Return the named runs of studies, or all."""
    results = read(RESULTS, studies)
    return {name: results[name] for name in names or results}


def table(name: str) -> str:
    """Return a table, and under it where it is from."""
    make, studies, names = TABLES[name]
    results = runs_of(studies, names)
    return with_origin(make(list(results.values())), "loss", results, names)


def draw(kind: str, studies: str, names: tuple[str, ...], *given: str) -> str:
    """Return a figure's SVG: of the losses of a comparison's seeds, of gaps, or of those of local steps."""
    import figures  # tables need no matplotlib

    results = runs_of(studies, names)
    runs = list(results.values())
    if kind == "losses":
        drawing = figures.seeds_compared(runs)
    elif kind == "local steps":
        drawing = figures.local_steps_svg(tables.by_nodes(runs))
    else:
        drawing = figures.gaps_svg(tables.Runs(runs), *given)
    return svg_with_origin(drawing, "loss", results, names)


FIGURES: Figures = {
    "loss.svg": partial(draw, "losses", ON_GPUS, seeds("compare-h200-zeropp")),
    "loss-cpu.svg": partial(draw, "losses", ON_CPUS, seeds("compare-cpu-zeropp")),
    "coarse-gradients.svg": partial(draw, "gaps", ON_2X1, ()),
    "coarse-gradients-int8-weights.svg": partial(draw, "gaps", ON_2X1, (), "w8:"),
    "coarse-gradients-2x2.svg": partial(draw, "gaps", ON_2X2, ()),
    "local-steps-loss.svg": partial(draw, "local steps", LOCAL_STEPS, ()),
}


if __name__ == "__main__":
    result_pages.main(__doc__, {RESULTS_PAGES / "loss.md": {name: table(name) for name in TABLES}}, FIGURES)
