"""Tables of losses in README.md, and the figures, from results/.

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
import readme_tables
import tables
from records import Record, read

FOLDER = Path(__file__).parent
RESULTS, FIGURES = FOLDER / "results", FOLDER / "figures"
ON_2X1, ON_2X2 = "convergence-2x1-h200/*", "convergence-2x2-h200/*"


@dataclass(frozen=True)
class Table:
    """A table and what it is made of.

    Attributes:
        make: Makes it of results.
        paths: Of the results, without ``.json``; a ``*`` stands for all that there are.
    """

    make: Callable[[list[Record]], str]
    paths: tuple[str, ...]

    def markdown(self) -> str:
        """The table, and under it where it is from."""
        results = find(*self.paths)
        return f"{self.make(list(results.values()))}\n\n{tables.provenance(results)}"


def seeds(name: str) -> tuple[str, ...]:
    """The results of all seeds of a comparison."""
    return tuple(f"{name}-seed{seed}" for seed in range(3))


TABLES = {
    "zeropp on CPUs": Table(tables.by_seed, seeds("compare-cpu-zeropp")),
    "zeropp on GPUs": Table(partial(tables.by_seed, timed=True), seeds("compare-h200-zeropp")),
    "no codec on GPUs": Table(partial(tables.by_seed, timed=True), seeds("compare-h200-GGG")),
    "strategies on CPUs": Table(
        tables.by_strategy,
        tuple(f"compare-cpu-{name}-seed0" for name in ("zeropp", "loco", "int4delta", "fsdp2")),
    ),
    "all scopes": Table(tables.by_strategy, ("compare-cpu-scopes-seed0",)),
    "gradients on 2 x 1": Table(lambda records: gaps.table(gaps.Runs(records)), (ON_2X1,)),
    "gradients and weights on 2 x 1": Table(lambda records: gaps.table(gaps.Runs(records), "w8:"), (ON_2X1,)),
    "gradients on 2 x 2": Table(lambda records: gaps.table(gaps.Runs(records)), (ON_2X2,)),
    "straddling": Table(lambda records: tables.straddling(*records), ("straddling-cpu",)),
}
"""By their names in README.md."""


def find(*paths: str) -> dict[str, Record]:
    """Results by their paths."""
    files = [file for path in paths for file in sorted(RESULTS.glob(f"{path}.json"))]
    return {file.relative_to(RESULTS).with_suffix("").as_posix(): read(file) for file in files}


def draw() -> None:
    """Draw all figures."""
    from figures import draw_gaps, draw_losses  # tables need no matplotlib

    for name, result in find("compare-cpu-zeropp-seed0", "compare-h200-zeropp-seed0").items():
        draw_losses(result["rows"], FIGURES / f"{name}.png")
    on_2x1, on_2x2 = (gaps.Runs(list(find(paths).values())) for paths in (ON_2X1, ON_2X2))
    draw_gaps(on_2x1, FIGURES / "convergence-2x1-h200.png")
    draw_gaps(on_2x1, FIGURES / "convergence-2x1-h200-int8-weights.png", "w8:")
    draw_gaps(on_2x2, FIGURES / "convergence-2x2-h200.png")


if __name__ == "__main__":
    readme_tables.main(__doc__, FOLDER / "README.md", {name: table.markdown() for name, table in TABLES.items()})
    if "--check" not in sys.argv:
        draw()
