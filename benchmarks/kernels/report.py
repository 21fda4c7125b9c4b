"""Tables of kernels, from results/: docs/results/kernels.md.

python benchmarks/kernels/report.py [--check]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "common"))

import result_pages
from markdown_tables import crossed
from result_files import Result, Row, read
from result_pages import RESULTS_PAGES, with_origin

FOLDER = Path(__file__).parent
OWN, DEEPSPEED, ON_H100 = "block-256", "deepspeed-block-256", "h100-block-256"
EARLIER, ELSEWHERE = "block-256-earlier", "bitsandbytes: "
SIZES_MIB, OTHERS_MIB = (256, 16), 256


def rate(row: Row) -> str:
    """Return the share of a copy's rate, or the copy's own rate."""
    return f"{row['of_a_copy']:.2f}" if "of_a_copy" in row else f"{row['tb_per_s']:.2f} TB/s"


def with_copies(rows: Iterable[Row], copies: Mapping[Any, float]) -> list[Row]:
    """Return rows after one for the device copy of each size, without a share."""
    return [{"kernel": "device copy", "mib": int(mib), "tb_per_s": rate} for mib, rate in copies.items()] + [*rows]


def by_size(rows: Iterable[Row]) -> str:
    """Return a table with kernels down, and sizes, or the columns that rows name, across."""
    return crossed(rows, {"of a copy's rate": "{kernel}"}, lambda row: row.get("column", f"{row['mib']} MiB"), rate)


def beside(result: Result, column: str, kernels: set[str], prefix: str = "") -> list[Row]:
    """Return another run's rows at ``OTHERS_MIB`` for a column of their own, of ``kernels``, named without a prefix."""
    rows = [row | {"column": column} for row in with_copies(result["rows"], result["copies_tb_per_s"])]
    rows = [row | {"kernel": row["kernel"].removeprefix(prefix)} for row in rows if row["mib"] == OTHERS_MIB]
    return [row for row in rows if row["kernel"] in kernels]


def tables() -> dict[str, str]:
    """Return the table of the page by its name, with the files that it is from."""
    results = read(FOLDER / "results")
    rows = with_copies(results[OWN]["rows"], results[OWN]["copies_tb_per_s"])
    # bitsandbytes was not there when the other kernels were measured anew.
    rows += [row for row in results[EARLIER]["rows"] if row["kernel"].startswith(ELSEWHERE)]
    rows = [row for size in SIZES_MIB for row in rows if row["mib"] == size]
    kernels = {row["kernel"] for row in rows}
    rows += beside(results[ON_H100], f"on an H100, {OTHERS_MIB} MiB", kernels)
    rows += beside(results[DEEPSPEED], f"DeepSpeed's, {OTHERS_MIB} MiB", kernels, "DeepSpeed: ")
    rows = [row for row in rows if not re.search("int8 over 8|int3 over 4", row["kernel"])]  # about as fast as others
    rows = [row | {"kernel": row["kernel"].replace("dequantize + sum", "sum").replace(" +", ",")} for row in rows]
    return {"kernels": with_origin(by_size(rows), "kernels", results, [OWN, EARLIER, ON_H100, DEEPSPEED], brief=True)}


if __name__ == "__main__":
    result_pages.main(__doc__, {RESULTS_PAGES / "kernels.md": tables()})
