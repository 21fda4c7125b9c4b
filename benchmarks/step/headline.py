"""The comparison that README.md shows: every peer and ours, one after the other on one machine."""

from __future__ import annotations

from dataclasses import dataclass

from result_files import Row
from result_pages import markdown

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
OURS = ("zeropp", "fsdp2:zeropp", "zeropp-delta", "fsdp2:zeropp-delta")


@dataclass(frozen=True)
class Entry:
    """A strategy's measurements in the run; most were measured once.

    Attributes:
        name: As run.py knows it.
        rows: In the order in which they were measured.
    """

    name: str
    rows: list[Row]

    @property
    def is_ours(self) -> bool:
        """Whether fsdp_zpp is measured, not a peer."""
        return self.name in OURS

    @property
    def times(self) -> list[float]:
        """Median step times, ms."""
        return [row["step_ms"] for row in self.rows]

    @property
    def peak_gib(self) -> float:
        """The highest of the peaks."""
        return max(row["peak_gib"] for row in self.rows)

    @property
    def said(self) -> str:
        """Step times as text."""
        return ", again ".join(f"{time:.0f}" for time in self.times)


def entries(rows: list[Row]) -> list[Entry]:
    """What is shown, in the order of LABELS."""
    return [Entry(name, [row for row in rows if row["strategy"] == name]) for name in LABELS]


def speedup(entry: Entry, reference: Entry) -> str:
    """How many times as fast as the reference: the lowest and the highest ratio of their measurements."""
    if entry is reference:
        return "1.0x"
    lowest = min(reference.times) / max(entry.times)
    highest = max(reference.times) / min(entry.times)
    return f"{lowest:.1f}x to {highest:.1f}x"


def table(rows: list[Row]) -> str:
    """The table in README.md."""
    found = entries(rows)
    lines = [[LABELS[each.name], each.said, speedup(each, found[0]), f"{each.peak_gib:.1f}"] for each in found]
    return markdown(["strategy", "step, ms", "against FULL_SHARD", "peak memory, GiB"], lines)
