"""Numbers and tables as text."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[tuple[str, ...]], names: int) -> list[str]:
    """Return the lines of a table whose first ``names`` columns are aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:names], widths, strict=False)]
        right = [cell.rjust(width) for cell, width in zip(row[names:], widths[names:], strict=True)]
        lines.append("  ".join(left + right).rstrip())
    return lines


def number(value: float) -> str:
    """Format two decimals, or as many as a small number needs: models of a few MB have figures, too."""
    return f"{value:,.2f}" if value >= 0.1 or value == 0 else f"{value:.2g}"


def count(number: int, noun: str, plural: str = "s") -> str:
    """Return a number with a noun."""
    return f"{number:,} {noun}{plural * (number != 1)}"


def seconds(value: float) -> str:
    """Return a time as text, in seconds or milliseconds."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"
