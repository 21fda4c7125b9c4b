"""Comparison that README.md shows: every peer and fsdp_zpp, one after the other on one machine."""

from __future__ import annotations

from markdown_tables import markdown
from result_files import Row

from fsdp_zpp.bench.columns import PEAK, times_as_fast

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


def entries(rows: list[Row]) -> dict[str, list[Row]]:
    """Return the measurements of each strategy that is shown, in the order of LABELS; most were measured once."""
    return {name: [row for row in rows if row["strategy"] == name] for name in LABELS}


def times_text(own: list[Row]) -> str:
    """Return the median step times of a strategy as text, in ms."""
    return ", again ".join(f"{row['step_ms']:.0f}" for row in own)


def table(rows: list[Row]) -> str:
    """Return the table in README.md."""
    speedup = times_as_fast("full_shard", "against FULL_SHARD", "{:.1f}", "x to ")
    lines = (
        [LABELS[name], times_text(own), speedup.cell(own, rows), PEAK.cell(own, rows)]
        for name, own in entries(rows).items()
    )
    return markdown(["strategy", "step, ms", speedup.heading, "peak memory, GiB"], lines)
