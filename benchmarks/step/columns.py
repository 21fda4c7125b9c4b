"""Columns that only pages and runs of benchmarks have, beside those of :mod:`fsdp_zpp.bench.results`."""

from __future__ import annotations

from markdown_tables import markdown
from result_files import Row

from fsdp_zpp.bench.results import Column, figures_of, filled, measured, of_a_run, times_as_fast


def _paired(own: list[Row], rows: list[Row]) -> str:
    return " and ".join(
        "{1:.2f} ({0:.2f}-{2:.2f})".format(*row["paired"]) for row in own if "paired" in row and row is not rows[0]
    )


def share(of: str, key: str, heading: str, form: str = "{:.2f}") -> Column:
    """Make a column with a figure as a share of that of the strategy ``of``."""

    def cell(own: list[Row], rows: list[Row]) -> str:
        references = figures_of(rows, key, of)
        return " and ".join(form.format(figure / references[0]) for figure in figures_of(own, key) if references)

    return Column(heading, cell)


MEDIAN = measured("step, ms", "step_ms", "{:.0f}")
PAIRED = Column("of the first row's time (quartiles)", _paired)
GENERATED = measured("generated tokens/s", "generate_tokens_per_s", "{:.1f}")
AGAINST_FULL_SHARD = times_as_fast("full_shard", "speedup over FULL_SHARD")
AGAINST_FSDP2 = times_as_fast("fsdp2:full_shard", "speedup over FULL_SHARD")
AGAINST_FLOAT8 = times_as_fast("fsdp2:float8-full_shard", "speedup over FULL_SHARD in float8")
AGAINST_HSDP = times_as_fast("fsdp2:hybrid_shard", "speedup over HSDP")


def summary(rows: list[Row]) -> str:
    """Return a run's table while it runs: all figures, without columns that would be empty."""
    columns = [*of_a_run(rows), PAIRED, measured("peak while built, GiB", "build_peak_gib", "{:.1f}"), GENERATED]
    cells = filled(rows, columns)
    return markdown(cells, zip(*cells.values(), strict=True))
