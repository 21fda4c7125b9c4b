"""Tables and figures of losses, from results/: docs/results/loss.md.

python benchmarks/loss/report.py [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "common"))

import gaps
import local_gaps
import result_pages
import tables
from result_files import Result, read
from result_pages import RESULTS_PAGES, Figures, with_origin

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
ON_2X1, ON_2X2 = "convergence-2x1-h200/*", "convergence-2x2-h200/*"
LOCAL_STEPS = "local-steps-*/*"


@dataclass(frozen=True)
class Table:
    """A table and what it is made of.

    Attributes:
        make: Makes it of results.
        paths: Of the results, without ``.json``; a ``*`` stands for all that there are.
    """

    make: Callable[[list[Result]], str]
    paths: tuple[str, ...]

    def markdown(self) -> str:
        """The table, and under it where it is from."""
        results = read(RESULTS, *self.paths)
        return with_origin(self.make(list(results.values())), "loss", results, results)


def seeds(name: str) -> tuple[str, ...]:
    """The results of all seeds of a comparison."""
    return tuple(f"{name}-seed{seed}" for seed in range(3))


TABLES = {
    "zeropp on CPUs": Table(tables.by_seed, seeds("compare-cpu-zeropp")),
    "zeropp on GPUs": Table(tables.by_seed, seeds("compare-h200-zeropp")),
    "no codec on GPUs": Table(tables.by_seed, seeds("compare-h200-GGG")),
    "times on GPUs": Table(tables.times, (*seeds("compare-h200-zeropp"), *seeds("compare-h200-GGG"))),
    "strategies on CPUs": Table(
        tables.by_strategy,
        tuple(f"compare-cpu-{name}-seed0" for name in ("zeropp", "loco", "int4delta", "fsdp2")),
    ),
    "all scopes": Table(tables.by_strategy, ("compare-cpu-scopes-seed0",)),
    "gradients on 2 x 1": Table(lambda results: gaps.table(gaps.Runs(results)), (ON_2X1,)),
    "gradients and weights on 2 x 1": Table(lambda results: gaps.table(gaps.Runs(results), "w8:"), (ON_2X1,)),
    "gradients on 2 x 2": Table(lambda results: gaps.table(gaps.Runs(results)), (ON_2X2,)),
    "small parameters": Table(lambda results: tables.small_parameters(results[0]["rows"]), ("small-parameters-cpu",)),
    "straddling": Table(lambda results: tables.straddling(results[0]["rows"]), ("straddling-cpu",)),
}
"""By their names on the page."""


def draw(kind: str, *given: str) -> str:
    """A figure's SVG: of the losses of a comparison's seeds, or of gaps, or of those of local steps."""
    import figures  # tables need no matplotlib
    import local_figures

    if kind == "losses":
        return figures.seeds_compared(list(read(RESULTS, *seeds(*given)).values()))
    results, *prefix = given
    if kind == "local steps":
        return local_figures.every_svg(local_gaps.by_nodes(list(read(RESULTS, results).values())))
    return figures.gaps_svg(gaps.Runs(list(read(RESULTS, results).values())), *prefix)


FIGURES: Figures = {
    "loss.svg": partial(draw, "losses", "compare-h200-zeropp"),
    "loss-cpu.svg": partial(draw, "losses", "compare-cpu-zeropp"),
    "coarse-gradients.svg": partial(draw, "gaps", ON_2X1),
    "coarse-gradients-int8-weights.svg": partial(draw, "gaps", ON_2X1, "w8:"),
    "coarse-gradients-2x2.svg": partial(draw, "gaps", ON_2X2),
}

if read(RESULTS, LOCAL_STEPS):
    TABLES["local steps"] = Table(local_gaps.table, (LOCAL_STEPS,))
    TABLES["learning rates of local steps"] = Table(local_gaps.learning_rates, (LOCAL_STEPS,))
    FIGURES = {**FIGURES, "local-steps-loss.svg": partial(draw, "local steps", LOCAL_STEPS)}


if __name__ == "__main__":
    made = {name: table.markdown() for name, table in TABLES.items()}
    result_pages.main(__doc__, {RESULTS_PAGES / "loss.md": made}, FIGURES)
