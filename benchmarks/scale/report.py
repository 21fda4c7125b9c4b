"""Tables of the cost of a step for a rank's CPU, from results/: docs/results/scale.md.

python benchmarks/scale/report.py [--check]
"""

from __future__ import annotations

import statistics
import sys
from itertools import groupby
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "common"))

import result_pages
from markdown_tables import crossed, markdown
from result_files import Row, read
from result_pages import RESULTS_PAGES, with_origin

FOLDER = Path(__file__).parent
CASE = {"adapter": "{adapter}", "strategy": "{strategy}"}


def collectives(row: Row, blocks: int) -> str:
    """Return the collectives a unit and step; a range if steps differ."""
    return " to ".join(f"{n / blocks:.3g}" for n in sorted(set(row["collectives_a_step"])))


def counts(rows: list[Row], blocks: int) -> str:
    """Return a table of counts with a line for each strategy; where worlds differ, of all of them."""
    headings = [*CASE, "collectives a unit and step", "function calls a unit", "groups of a rank"]
    lines = []
    for case, of_case in groupby(rows, lambda row: (row["adapter"], row["strategy"])):
        worlds = [
            (collectives(row, blocks), f"{row['calls_around_a_unit']:.0f}", str(row["groups_of_this_rank"]))
            for row in of_case
        ]
        lines.append(
            [*case, *(" / ".join(texts if len(set(texts)) > 1 else texts[:1]) for texts in zip(*worlds, strict=True))]
        )
    return markdown(headings, lines)


def by_world(rows: list[Row], blocks: int) -> dict[str, str]:
    """Return the tables of run.py: counts, and times with a column for each world."""
    times = {
        "time around": "{ms_a_unit[around]:.2f} ({fastest_around_ms_a_unit:.2f})",
        "codecs": "{ms_a_unit[codecs]:.2f}",
        "wrapping": "{wrapping_ms:.0f}",
    }
    growth = {name: crossed(rows, CASE, "{world:,} ranks", time) for name, time in times.items()}
    return {"counts": counts(rows, blocks), **growth}


def beside_hsdp(rows: list[Row]) -> str:
    """Return a table of contenders: time without the computation's, and its ratio to HSDP's, which varies by set."""
    us = {row["contender"]: row["us_a_unit"] for row in rows}
    lines = []
    for name, times in us.items():
        accumulates = " x 4" if name.endswith(" x 4") else ""
        computation, reference = us[f"computation{accumulates}"], us[f"fsdp2 HSDP{accumulates}"]
        around = [each - base for each, base in zip(times, computation, strict=True)]
        parts = [each / (of - base) for each, of, base in zip(around, reference, computation, strict=True)]
        if not name.startswith("computation"):
            spread = f"{statistics.median(parts):.2f} ({min(parts):.2f} to {max(parts):.2f})"
            lines.append([name, f"{statistics.median(around):.0f}", spread])
    return markdown(["contender", "us a unit and step", "of FSDP2's HSDP (range of sets)"], lines)


def tables() -> dict[str, str]:
    """Return all tables of the page by name, each with the files that it is from."""
    results = read(FOLDER / "results")
    growth = by_world(results["cpu"]["rows"], results["cpu"]["arguments"]["blocks"])
    sources = {
        **{name: (table, "cpu") for name, table in growth.items() if name != "codecs"},
        "beside HSDP": (beside_hsdp(results["beside-hsdp"]["rows"]), "beside-hsdp"),
    }
    return {name: with_origin(table, "scale", results, [run]) for name, (table, run) in sources.items()}


if __name__ == "__main__":
    result_pages.main(__doc__, {RESULTS_PAGES / "scale.md": tables()})
