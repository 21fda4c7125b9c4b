"""Tables of kernels, from results/: docs/results/kernels.md.

python benchmarks/kernels/report.py [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "common"))

import result_pages
from result_files import Result, Row, read
from result_pages import RESULTS_PAGES, markdown, with_origin

FOLDER = Path(__file__).parent
OWN, BLOCKS, DEEPSPEED, COUNTERS = "block-256", "blocks", "deepspeed-block-256", "nsight-block-256"
ON_H100, REGISTERS = "h100-block-256", "registers"
OTHERS_MIB = 256


def rate(row: Row) -> str:
    """Bytes a second, and their share of a copy's."""
    return f"{row['tb_per_s']:.2f} ({row['of_a_copy']:.2f})"


def by_size(rows: list[Row], copies: Mapping[Any, float], others: Mapping[str, Mapping[str, str]] | None = None) -> str:
    """Kernels down, sizes across; the copy first.

    Args:
        rows: What was measured.
        copies: A device copy's rate at each size.
        others: Further columns by their headings, each with its texts by kernel.
    """
    others = others or {}
    mibs = list(dict.fromkeys(row["mib"] for row in rows))
    rates: dict[str, dict[int, str]] = {}
    for row in rows:
        rates.setdefault(row["kernel"], {})[row["mib"]] = rate(row)
    of_copies = {int(mib): f"{tb_per_s:.2f}" for mib, tb_per_s in copies.items()}
    lines = [
        [name, *(of.get(mib, "") for mib in mibs), *(texts.get(name, "") for texts in others.values())]
        for name, of in {"device copy": of_copies, **rates}.items()
    ]
    return markdown(["TB/s (of a copy)", *(f"{mib} MiB" for mib in mibs), *others], lines)


def by_block(rows: list[Row], key: str, heading: str, form: str) -> str:
    """What a key tells apart down, blocks across, each as a share of a copy's rate."""
    blocks = list(dict.fromkeys(row["block"] for row in rows))
    shares: dict[str, dict[int, str]] = {}
    for row in rows:
        shares.setdefault(str(row[key]), {})[row["block"]] = form.format(row["of_a_copy"])
    lines = ([name, *(of.get(block, "") for block in blocks)] for name, of in shares.items())
    return markdown([f"{heading}, in blocks of", *map(str, blocks)], lines)


def counters(rows: list[Row]) -> str:
    """What Nsight Compute counts."""
    columns = {
        "time, us": ("time_us", "{:.1f}"),
        "instructions a value": ("instructions_a_value", "{:.1f}"),
        "issue slots busy": ("issue_slots_busy", "{:.0%}"),
        "least time if they were always busy, us": ("least_us_if_always_busy", "{}"),
        "at a copy's speed, us": ("us_at_a_copys_speed", "{}"),
    }
    lines = ([row["kernel"], *(form.format(row[key]) for key, form in columns.values())] for row in rows)
    return markdown(["kernel", *columns], lines)


def beside(result: Result, prefix: str = "") -> dict[str, str]:
    """The rates of another run at ``OTHERS_MIB``, by the names of our kernels that do the same, without a prefix."""
    copy = f"{result['copies_tb_per_s'][str(OTHERS_MIB)]:.2f}"
    rows = [row for row in result["rows"] if row["mib"] == OTHERS_MIB]
    return {"device copy": copy} | {row["kernel"].removeprefix(prefix): rate(row) for row in rows}


def tables() -> dict[str, str]:
    """All tables of the page by name, each with the files that it is from."""
    results = read(FOLDER / "results")
    others = {
        f"on an H100, {OTHERS_MIB} MiB": beside(results[ON_H100]),
        f"DeepSpeed's, {OTHERS_MIB} MiB": beside(results[DEEPSPEED], "DeepSpeed: "),
    }
    own = results[OWN]
    made = {
        "kernels": (by_size(own["rows"], own["copies_tb_per_s"], others), [OWN, ON_H100, DEEPSPEED]),
        "blocks": (by_block(results[BLOCKS]["rows"], "kernel", "of a copy", "{:.2f}"), [BLOCKS]),
        "registers": (
            by_block(results[REGISTERS]["rows"], "registers", "registers a thread", "{:.3f}"),
            [REGISTERS],
        ),
        "counters": (counters(results[COUNTERS]["rows"]), [COUNTERS]),
    }
    return {name: with_origin(table, "kernels", results, runs) for name, (table, runs) in made.items()}


if __name__ == "__main__":
    result_pages.main(__doc__, {RESULTS_PAGES / "kernels.md": tables()}, {})
