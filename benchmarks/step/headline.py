"""Comparison that README.md shows: every peer and fsdp_zpp, one after the other on one machine."""

from __future__ import annotations

from dataclasses import dataclass

from markdown_tables import markdown
from result_files import Row

RUN = "1.35B-2x2-eager"
"""The run with most peers; in it FULL_SHARD was measured twice, so speedups are ranges."""

LABELS = {
    "full_shard": "FSDP, FULL_SHARD",
    "fsdp2:hybrid_shard": "FSDP2, HSDP",
    "deepspeed-zeropp": "DeepSpeed 0.19.8, ZeRO++",
    "megatron-hfsdp": "Megatron-FSDP 0.6.1, HFSDP",
    "zeropp": "FSDP, `Strategy.zeropp()`",
    "fsdp2:zeropp": "FSDP2, `Strategy.zeropp()`",
    "zeropp-delta": "FSDP, `Strategy.zeropp(weights=Int4Delta())`",
    "fsdp2:zeropp-delta": "FSDP2, `Strategy.zeropp(weights=Int4Delta())`",
}


@dataclass(frozen=True)
class Entry:
    """A strategy's measurements in the run; most were measured once.

    Attributes:
        name: Name in run.py.
        rows: Its rows, in the order in which they were measured.
    """

    name: str
    rows: list[Row]

    @property
    def times(self) -> list[float]:
        """Return the median step times, ms."""
        return [row["step_ms"] for row in self.rows]

    @property
    def peak_gib(self) -> float:
        """Return the highest of the peaks."""
        return max(row["peak_gib"] for row in self.rows)

    @property
    def times_text(self) -> str:
        """Return the step times as text."""
        return ", again ".join(f"{time:.0f}" for time in self.times)


def entries(rows: list[Row]) -> list[Entry]:
    """Return the strategies that are shown, in the order of LABELS."""
    return [Entry(name, [row for row in rows if row["strategy"] == name]) for name in LABELS]


def speedup(entry: Entry, reference: Entry) -> str:
    """Return the lowest and the highest ratio of the reference's times to an entry's."""
    if entry is reference:
        return "1.0x"
    lowest = min(reference.times) / max(entry.times)
    highest = max(reference.times) / min(entry.times)
    return f"{lowest:.1f}x to {highest:.1f}x"


def table(rows: list[Row]) -> str:
    """Return the table in README.md."""
    full_shard, *_ = shown = entries(rows)
    lines = [[LABELS[each.name], each.times_text, speedup(each, full_shard), f"{each.peak_gib:.1f}"] for each in shown]
    return markdown(["strategy", "step, ms", "against FULL_SHARD", "peak memory, GiB"], lines)
