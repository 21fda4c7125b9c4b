"""Comparison that the first figure shows: every peer and fsdp_zpp, one after the other on one machine."""

from __future__ import annotations

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


def entries(rows: list[Row]) -> dict[str, list[Row]]:
    """Return the measurements of each strategy that is shown, in the order of LABELS; most were measured once."""
    return {name: [row for row in rows if row["strategy"] == name] for name in LABELS}


def times_text(own: list[Row]) -> str:
    """Return the median step times of a strategy as text, in ms."""
    return ", again ".join(f"{row['step_ms']:.0f}" for row in own)

