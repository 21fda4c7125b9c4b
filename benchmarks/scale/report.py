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
from result_pages import GUIDES, RESULTS_PAGES, with_origin

FOLDER = Path(__file__).parent
WAYS = {
    "whole": "`from_pretrained` on each rank, then sharded",
    "broadcast": "rank 0 reads, others receive",
    "parts": "each rank reads its part",
}
"""How loading.py loads a model, by the names in its result."""
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
    """Return the tables of run.py: counts, and the time around computation in the smallest and the largest world."""
    time = "{ms_a_unit[around]:.2f} ({fastest_around_ms_a_unit:.2f})"
    worlds = {row["world"] for row in rows}
    ends = [row for row in rows if row["world"] in (min(worlds), max(worlds))]
    return {"counts": counts(rows, blocks), "time around": crossed(ends, CASE, "{world:,} ranks", time)}


def beside_hsdp(rows: list[Row]) -> str:
    """Return a table of contenders: time without the computation's, and its ratio to HSDP's, which varies by set."""
    us = {row["contender"]: row["us_a_layer"] for row in rows}
    lines = []
    for name, times in us.items():
        accumulates = " x 4" if name.endswith(" x 4") else ""
        computation, reference = us[f"computation{accumulates}"], us[f"fsdp2 HSDP{accumulates}"]
        around = [each - base for each, base in zip(times, computation, strict=True)]
        parts = [each / (of - base) for each, of, base in zip(around, reference, computation, strict=True)]
        if not name.startswith("computation"):
            spread = f"{statistics.median(parts):.2f} ({min(parts):.2f}-{max(parts):.2f})"
            lines.append([name, f"{statistics.median(around):.0f}", spread])
    return markdown(["contender", "us a layer and step", "of FSDP2's HSDP (range of sets)"], lines)


def loading(rows: list[Row]) -> str:
    """Return a table of the memory of rank 0 and of the other ranks, a line for each way and adapter."""
    headings = ["way", "sharded by", "peak of rank 0, GiB", "peak of others, GiB", "shards of a rank, GiB", "seconds"]
    lines = []
    for (way, adapter), of_case in groupby(rows, lambda row: (row["way"], row["adapter"])):
        first, *others = of_case
        peaks = (f"{each:.2f}" for each in (first["peak_gib"], max(row["peak_gib"] for row in others)))
        seconds = max(row["seconds"] for row in (first, *others))
        lines.append([WAYS[way], adapter, *peaks, f"{first['shards_gib']:.2f}", f"{seconds:.0f}"])
    return markdown(headings, lines)


def tables() -> dict[str, str]:
    """Return all tables of the page on scale by name, each with the files that it is from."""
    results = read(FOLDER / "results")
    growth = by_world(results["cpu"]["rows"], results["cpu"]["arguments"]["blocks"])
    sources = {
        **{name: (table, "cpu") for name, table in growth.items()},
        "beside HSDP": (beside_hsdp(results["beside-hsdp"]["rows"]), "beside-hsdp"),
    }
    return {name: with_origin(table, "scale", results, [run], brief=True) for name, (table, run) in sources.items()}


def table_of_loading() -> dict[str, str]:
    """Return the table of the guide on loading."""
    results = read(FOLDER / "results")
    return {"loading": with_origin(loading(results["loading"]["rows"]), "scale", results, ["loading"])}


if __name__ == "__main__":
    guide = {GUIDES / "load-a-large-model.md": table_of_loading()}
    result_pages.main(__doc__, {RESULTS_PAGES / "scale.md": tables()} | guide)
