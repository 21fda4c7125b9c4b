"""Tables in Markdown: of cells, of rows of results, and of rows of which two keys go down and across."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from result_files import Row

Cell = str | Callable[[Row], str]
"""A form that a row fills in (``"{ms:.2f}"``), or a function of the row."""


def markdown(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of texts."""
    headings = list(headings)
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in rows)])


def filled(cell: Cell, row: Row) -> str:
    """Return a cell's text for a row."""
    return cell.format_map(row) if isinstance(cell, str) else cell(row)


def listed(rows: Iterable[Row], columns: Mapping[str, Cell]) -> str:
    """Return a table with a line for each row.

    Args:
        rows: Rows of a result.
        columns: Cells by their headings.
    """
    return markdown(columns, ([filled(cell, row) for cell in columns.values()] for row in rows))


def crossed(rows: Iterable[Row], down: Mapping[str, Cell], across: Cell, cell: Cell) -> str:
    """Return a table with a line for each different text of ``down`` and a column for each of ``across``.

    Args:
        rows: Rows of a result, at most one for each place in the table; a place without a row stays empty.
        down: Cells that name a line, by their headings.
        across: Names a column.
        cell: Fills a place.
    """
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    columns: dict[str, None] = {}
    for row in rows:
        columns[column := filled(across, row)] = None
        lines.setdefault(tuple(filled(name, row) for name in down.values()), {})[column] = filled(cell, row)
    cells = ([*names, *(by_column.get(column, "") for column in columns)] for names, by_column in lines.items())
    return markdown([*down, *columns], cells)


def aligned(table: str) -> str:
    """Return a table in Markdown with its columns aligned, for a terminal."""
    heading, _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines())
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    lines = (heading, ["-" * width for width in widths], *rows)
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
