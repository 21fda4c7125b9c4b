"""Columns of tables of steps: the text of each for the rows of a strategy, beside the others of its run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from result_files import Row

from fsdp_zpp.bench.results import TEXTS, speedup


@dataclass(frozen=True)
class Column:
    """A column.

    Args:
        heading: Text over it.
        cell: Function that returns its text for the rows of one strategy, given all rows of that run; empty if they
            lack the figure.
    """

    heading: str
    cell: Callable[[list[Row], list[Row]], str]


def each(heading: str, text: Callable[[Row], str]) -> Column:
    """Make a column with a text for every measurement of a strategy."""
    return Column(heading, lambda own, _: " and ".join(filter(None, dict.fromkeys(map(text, own)))))


def measured(heading: str, key: str, form: str) -> Column:
    """Make a column with one figure of a row."""
    return each(heading, lambda row: form.format(row[key]) if row.get(key) is not None else "")


def _peak(own: list[Row], _: list[Row]) -> str:
    if any(row.get("peak_counts_others") for row in own):
        return "not known"
    peaks = [row["peak_gib"] for row in own if row.get("peak_gib") is not None]
    return f"{max(peaks):.1f}" if peaks else ""


def _exposed(row: Row) -> str:
    return f"{row['exposed_ms']:.0f} ({row['exposed_share']:.0%})" if row.get("exposed_share") else ""


def figures_of(rows: list[Row], key: str, strategy: str = "") -> list[float]:
    """Return a figure of the rows that have it, or of those of one strategy."""
    return [row[key] for row in rows if row.get(key) and strategy in ("", row["strategy"])]


def times_as_fast(than: str, heading: str, form: str = "{:.2f}", to: str = "-") -> Column:
    """Make a column with the speedup over ``than``: from the lowest ratio of measurements ``to`` the highest."""

    def cell(own: list[Row], rows: list[Row]) -> str:
        references, times = figures_of(rows, "step_ms", than), figures_of(own, "step_ms")
        if not references or not times:
            return ""
        if own[0]["strategy"] == than:
            return f"{form.format(1)}x"
        ends = (form.format(min(references) / max(times)), form.format(max(references) / min(times)))
        return f"{to.join(dict.fromkeys(ends))}x"

    return Column(heading, cell)


def of_bench(heading: str) -> Column:
    """Make a column of the table that ``fsdp_zpp bench`` prints."""
    return each(heading, TEXTS[heading])


STEP = of_bench("step, ms (fastest-slowest)")
PEAK = Column("peak, GiB", _peak)
HOST = of_bench("CPU finished after, ms")
BETWEEN_NODES = of_bench("sent between nodes, MiB")


def filled(rows: list[Row], columns: Iterable[Column]) -> dict[str, list[str]]:
    """Return the cells of each column, a row each, by its heading, without columns that would be empty."""
    cells = {column.heading: [column.cell([row | speedup(row, rows[0])], rows) for row in rows] for column in columns}
    return {heading: texts for heading, texts in cells.items() if any(texts)}


def of_a_run() -> list[Column]:
    """Return the columns of one run's table: those of ``fsdp_zpp bench``, and of its traces."""
    of_all = [PEAK if heading == PEAK.heading else of_bench(heading) for heading in TEXTS]
    return [*of_all, each("exposed communication, ms (share)", _exposed)]
