"""Tables of what a step costs a rank's CPU, from results/: docs/results/scale.md.

python benchmarks/scale/report.py [--check]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "common"))

import result_pages
from result_files import Row, read
from result_pages import RESULTS_PAGES, markdown, with_origin

FOLDER = Path(__file__).parent
HEADINGS = (
    "adapter",
    "strategy",
    "ranks",
    "collectives a unit and step",
    "calls of functions around them and codecs, a unit",
    "their CPU time, ms a unit (fastest step)",
    "codecs, ms a unit",
    "fake collectives, ms a unit",
    "sent between nodes, kB a unit",
    "inside, kB a unit",
    "groups of a rank",
    "wrapping, ms",
    "of that making groups, ms (calls)",
    "first step, ms",
)


def collectives(row: Row, blocks: int) -> str:
    """Collectives a unit and step; a range if steps differ."""
    return " to ".join(f"{n / blocks:.3g}" for n in sorted(set(row["collectives_a_step"])))


def time_around(row: Row) -> str:
    """CPU time around collectives and codecs, the median and the fastest step."""
    return f"{row['ms_a_unit']['around']:.2f} ({row['fastest_around_ms_a_unit']:.2f})"


def cells(row: Row, blocks: int) -> list[str]:
    """Everything that is measured of one case, in the order of HEADINGS."""
    sent = row["sent_a_unit_and_step"]
    kb = {hop: sum(n for name, n in sent.items() if name.endswith(hop)) / 1e3 for hop in ("inter", "intra")}
    return [
        *(str(row[name]) for name in ("adapter", "strategy", "world")),
        collectives(row, blocks),
        f"{row['calls_around_a_unit']:.0f}",
        time_around(row),
        *(f"{row['ms_a_unit'][kind]:.2f}" for kind in ("codecs", "collectives")),
        *(f"{kb[hop]:.0f}" if sent else "" for hop in ("inter", "intra")),
        str(row["groups_of_this_rank"]),
        f"{row['wrapping_ms']:.0f}",
        f"{row['making_groups_ms']:.1f} ({row['calls_that_make_groups']})",
        f"{row['first_step_around_ms']:.0f}",
    ]


def every_case(rows: list[Row], blocks: int) -> str:
    """A line a case."""
    return markdown(HEADINGS, [cells(row, blocks) for row in rows])


def by_case(rows: list[Row]) -> list[tuple[list[str], list[Row]]]:
    """The rows of each adapter and strategy, one for each world."""
    cases = groupby(rows, lambda row: (row["adapter"], row["strategy"]))
    return [(list(case), list(found)) for case, found in cases]


def counts(rows: list[Row], blocks: int) -> str:
    """What is counted, a line a strategy; where worlds differ, all of them."""
    headings = ["adapter", "strategy", "collectives a unit and step", "function calls a unit", "groups of a rank"]
    lines = []
    for case, found in by_case(rows):
        columns = (
            [collectives(row, blocks) for row in found],
            [f"{row['calls_around_a_unit']:.0f}" for row in found],
            [str(row["groups_of_this_rank"]) for row in found],
        )
        lines.append([*case, *(texts[0] if len(set(texts)) == 1 else " / ".join(texts) for texts in columns)])
    return markdown(headings, lines)


def growth(rows: list[Row], text: Callable[[Row], str]) -> str:
    """One measurement, a line a strategy and a column a world."""
    worlds = dict.fromkeys(row["world"] for row in rows)
    lines = [[*case, *(text(row) for row in found)] for case, found in by_case(rows)]
    return markdown(["adapter", "strategy", *(f"{world:,} ranks" for world in worlds)], lines)


def beside_hsdp(rows: list[Row]) -> str:
    """A line a contender: its time without the computation's, and that as a part of HSDP's, which varies by set."""
    us = {row["contender"]: row["us_a_unit"] for row in rows}
    lines = []
    for name, found in us.items():
        accumulates = " x 4" if name.endswith(" x 4") else ""
        computation, reference = us[f"computation{accumulates}"], us[f"fsdp2 HSDP{accumulates}"]
        around = [each - base for each, base in zip(found, computation, strict=True)]
        parts = [each / (of - base) for each, of, base in zip(around, reference, computation, strict=True)]
        if not name.startswith("computation"):
            spread = f"{statistics.median(parts):.2f} ({min(parts):.2f} to {max(parts):.2f})"
            lines.append([name, f"{statistics.median(around):.0f}", spread])
    return markdown(["contender", "us a unit and step", "of FSDP2's HSDP (range of sets)"], lines)


def tables() -> dict[str, str]:
    """All tables of the page by name, each with the files that it is from."""
    results = read(FOLDER / "results")
    rows = results["cpu"]["rows"]
    made = {
        "counts": (counts(rows, results["cpu"]["arguments"]["blocks"]), "cpu"),
        "time around": (growth(rows, time_around), "cpu"),
        "codecs": (growth(rows, lambda row: f"{row['ms_a_unit']['codecs']:.2f}"), "cpu"),
        "wrapping": (growth(rows, lambda row: f"{row['wrapping_ms']:.0f}"), "cpu"),
        "beside HSDP": (beside_hsdp(results["beside-hsdp"]["rows"]), "beside-hsdp"),
        "beside HSDP first": (beside_hsdp(results["beside-hsdp-first"]["rows"]), "beside-hsdp-first"),
    }
    return {name: with_origin(table, "scale", results, [run]) for name, (table, run) in made.items()}


if __name__ == "__main__":
    result_pages.main(__doc__, {RESULTS_PAGES / "scale.md": tables()}, {})
