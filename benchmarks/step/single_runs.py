"""Tables of other measurements than steps of strategies: hops, the CPU's part, the planner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labels import label
from markdown_tables import crossed, listed
from result_files import Result, Row

RATE = "{ms:.2f} ({gb_per_s:.2f})"


def hops(runs: Mapping[str, Result], hop: str, least: float = 0) -> str:
    """Return a table of runs of hops.py over one hop side by side, each under its label, from ``least`` MiB on."""
    rows = [row | {"run": run} for run, result in runs.items() for row in result["rows"] if row["hop"] == hop]
    rows = [row for row in rows if row["mib"] >= least]
    down = {"collective": "{collective}", "sent by a rank, MiB": "{mib:g}"}
    return crossed(rows, down, "{run}: ms (GB/s)", RATE)


def cpu(rows: list[Row]) -> str:
    """Return a table of the phases of a step on rank 0's CPU."""
    keys = {"forward": "forward_ms", "backward": "backward_ms", "optimizer": "optimizer_ms"}
    keys |= {"waits for the GPU": "waits_for_gpu_ms", "together": "together_ms"}
    columns: dict[str, Any] = {"rank 0's CPU, ms": lambda row: label(row["strategy"])}
    columns |= {heading: f"{{{key}:.4g}}" for heading, key in keys.items()}
    return listed((row for row in rows if "again" not in row["strategy"]), columns)


def planned(rows: list[Row]) -> str:
    """Return a table of planned beside measured times and memory of model states, in the order of planned times."""
    return listed(
        sorted(rows, key=lambda row: row["planned_communication_ms"]),
        {
            "scopes": "{levels}",
            "communication planned, ms": "{planned_communication_ms:.0f}",
            "step measured, ms": "{step_ms:.0f}",
            "states planned, GiB": "{planned_states_gib:.2f}",
            "measured, GiB": "{states_gib:.2f}",
            "off by": lambda row: f"{row['states_gib'] / row['planned_states_gib'] - 1:+.1%}",
        },
    )


def offload(rows: list[Row]) -> str:
    """Return a table of the time of a step with CPU offload."""
    (row,) = rows
    kinds = ("on the GPU", "offloaded", "offloaded, in the backward")
    times = ({"kind": kind, "ms": row[kind] * 1e3} for kind in kinds)
    return listed(times, {"optimizer": "{kind}", "step, ms": "{ms:.0f}"})
