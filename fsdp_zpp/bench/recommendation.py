"""What a run's rows say to do, in one line: a strategy to use, or to stay with FULL_SHARD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .contenders import FULL_SHARD, HSDP
from .result_file import Row

_LEAST_GAIN = 0.03
"""A smaller gain is none: machines drift by as much from one strategy to the next."""
_TIE = 0.05
"""Of strategies whose times differ by no more than this and their spread, the first, plainest one is taken."""


@dataclass(frozen=True)
class Recommendation:
    """What to do.

    Attributes:
        line: A line to paste.
        strategy: The strategy's name among the rows; None if nothing could be measured.
    """

    line: str
    strategy: str | None


def recommend(rows: Sequence[Row]) -> Recommendation:
    """Return what to do, given the rows of a run in the order of preference among equals."""
    measured = [row for row in rows if "step_ms" in row]
    if not measured:
        said = "; ".join(f"{row['label']}: {row['failed']}" for row in rows)
        return Recommendation(f"nothing could be measured: {said}", None)
    stock, hsdp = (_first(rows, name) for name in (FULL_SHARD, HSDP))
    if stock is None or "step_ms" not in stock:
        chosen = _plainest_of_the_fastest(measured)
        return Recommendation(f"use {chosen['code']}: {_gains(chosen, stock, hsdp)}", chosen["strategy"])
    faster = [row for row in measured if is_clearly_faster(row, stock)]
    if not faster:
        return Recommendation(f"stay with FULL_SHARD: {_why_stay(rows, stock)}", stock["strategy"])
    chosen = _plainest_of_the_fastest(faster)
    return Recommendation(f"use {chosen['code']}: {_gains(chosen, stock, hsdp)}", chosen["strategy"])


def is_clearly_faster(row: Row, than: Row) -> bool:
    """Return whether a row's steps are faster by more than noise: three quarters of them are faster than as many."""
    return bool(
        row["quartiles_ms"][1] < than["quartiles_ms"][0] and row["step_ms"] < (1 - _LEAST_GAIN) * than["step_ms"]
    )


def _plainest_of_the_fastest(rows: Sequence[Row]) -> Row:
    """Return the first row that the fastest is not clearly faster than, and that takes hardly longer."""
    fastest = min(rows, key=lambda row: row["step_ms"])
    return next(
        row for row in rows if row["step_ms"] <= fastest["step_ms"] * (1 + _TIE) and not is_clearly_faster(fastest, row)
    )


def _gains(chosen: Row, stock: Row | None, hsdp: Row | None) -> str:
    """Say how a row compares with torch's own strategies."""
    parts = []
    for name, other in (("FULL_SHARD", stock), ("HSDP", hsdp)):
        if other is None or other is chosen:
            continue
        parts.append(f"{_ratio(other, chosen)}x {name}" if "step_ms" in other else f"{name}: {other['failed']}")
    if stock is not None and stock.get("peak_gib") is not None and chosen.get("peak_gib") is not None:
        parts.append(f"{chosen['peak_gib'] - stock['peak_gib']:+.1f} GiB")
    return ", ".join(parts) or f"{chosen['step_ms']:.0f} ms a step"


def _why_stay(rows: Sequence[Row], stock: Row) -> str:
    """Say by how much the others fall short of being clearly faster than FULL_SHARD."""
    others = [row for row in rows if "step_ms" in row and row is not stock]
    if not others:
        return "nothing else could be measured"
    best = min(others, key=lambda row: row["step_ms"])
    if best["step_ms"] >= stock["step_ms"]:
        return f"the best other, {best['label']}, is {_ratio(best, stock)}x slower"
    spread = (stock["slowest_ms"] - stock["fastest_ms"]) / stock["step_ms"]
    return (
        f"the best other, {best['label']}, is {_ratio(stock, best)}x as fast, which is within the noise (FULL_SHARD's "
        f"own steps differ by {spread:.0%})"
    )


def _ratio(slower: Row, faster: Row) -> str:
    ratio = slower["step_ms"] / faster["step_ms"]
    return f"{ratio:.1f}" if ratio >= 1.5 else f"{ratio:.2f}"


def _first(rows: Sequence[Row], strategy: str) -> Row | None:
    return next((row for row in rows if row["strategy"] == strategy), None)
