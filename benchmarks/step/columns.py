"""Columns of tables of steps: the text of each for a row of a result, beside the others of its run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from markdown_tables import markdown
from result_files import Row


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        heading: Text over it.
        cell: Function that returns its text for a row, given all rows of that run; empty if the row lacks the figure.
    """

    heading: str
    cell: Callable[[Row, list[Row]], str]


def measured(heading: str, key: str, form: str) -> Column:
    """Make a column with one figure of a row."""
    return Column(heading, lambda row, _: form.format(row[key]) if row.get(key) is not None else "")


def _step(row: Row, _: list[Row]) -> str:
    if "step_ms" not in row:
        return row.get("failed", "")
    return f"{row['step_ms']:.0f} ({row['fastest_ms']:.0f} to {row['slowest_ms']:.0f})"


def _peak(row: Row, _: list[Row]) -> str:
    if row.get("peak_counts_others"):
        return "not known"
    return f"{row['peak_gib']:.1f}" if row.get("peak_gib") is not None else ""


def _paired(row: Row, rows: list[Row]) -> str:
    if "paired" not in row or row is rows[0]:
        return ""
    return "{1:.2f} ({0:.2f} to {2:.2f})".format(*row["paired"])


def _exposed(row: Row, _: list[Row]) -> str:
    return f"{row['exposed_ms']:.0f} ({row['exposed_share']:.0%})" if row.get("exposed_share") else ""


def sent(heading: str, hop: str) -> Column:
    """Make a column with the MiB that a rank sends over one hop a step: weights + gradients."""

    def cell(row: Row, _: list[Row]) -> str:
        figures = [mib for name, mib in row.get("sent_mib_a_step", {}).items() if name.endswith(hop)]
        return " + ".join(f"{mib:.0f}" if mib >= 10 else f"{mib:.2f}" for mib in figures)

    return Column(heading, cell)


def first_named(rows: list[Row], strategy: str, key: str) -> float | None:
    """Return a figure of the first row of that strategy, if it is there."""
    return next((row[key] for row in rows if row["strategy"] == strategy and row.get(key)), None)


def times_as_fast(than: str, heading: str) -> Column:
    """Make a column with the speedup over the strategy ``than``."""

    def cell(row: Row, rows: list[Row]) -> str:
        time = first_named(rows, than, "step_ms")
        return f"{time / row['step_ms']:.2f}x" if time and "step_ms" in row else ""

    return Column(heading, cell)


def share(of: str, key: str, heading: str, form: str = "{:.2f}") -> Column:
    """Make a column with a figure as a share of that of the strategy ``of``."""

    def cell(row: Row, rows: list[Row]) -> str:
        whole = first_named(rows, of, key)
        return form.format(row[key] / whole) if whole and row.get(key) else ""

    return Column(heading, cell)


STEP = Column("step, ms (fastest to slowest)", _step)
PEAK = Column("peak, GiB", _peak)
PAIRED = Column("of the first row's time (quartiles)", _paired)
EXPOSED = Column("exposed communication, ms (share)", _exposed)
HOST = measured("CPU finished after, ms", "host_ms", "{:.0f}")
GENERATED = measured("generated tokens/s", "generate_tokens_per_s", "{:.1f}")
UTILIZATION = measured("of the GPUs' peak FLOP/s", "utilization", "{:.1%}")
BETWEEN_NODES = sent("sent between nodes, MiB", "inter")
AGAINST_FULL_SHARD = times_as_fast("full_shard", "speedup over FULL_SHARD")


def summary(rows: list[Row]) -> str:
    """Return a run's table while it runs: all figures, without columns that would be empty."""
    columns = [
        Column("strategy", lambda row, _: row["strategy"]),
        STEP,
        times_as_fast(rows[0]["strategy"], "speedup over the first"),
        PEAK,
        measured("tokens/s", "tokens_per_s", "{:.0f}"),
        PAIRED,
        HOST,
        UTILIZATION,
        EXPOSED,
        BETWEEN_NODES,
        sent("sent inside a node, MiB", "intra"),
        measured("peak while built, GiB", "build_peak_gib", "{:.1f}"),
        GENERATED,
    ]
    cells = {column.heading: [column.cell(row, rows) for row in rows] for column in columns}
    filled = {heading: texts for heading, texts in cells.items() if any(texts)}
    return markdown(filled, zip(*filled.values(), strict=True))
