"""Tables of other measurements than steps of strategies: hops, the CPU's part, kernels of a step, the planner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labels import label
from markdown_tables import crossed, listed
from result_files import Result, Row

RATE = "{ms:.2f} ({gb_per_s:.2f})"
STRATEGY = {"strategy": lambda row: label(row["strategy"])}


def hops(runs: Mapping[str, Result], hop: str) -> str:
    """Return a table of runs of hops.py over one hop side by side, each under its label."""
    rows = [row | {"run": run} for run, result in runs.items() for row in result["rows"] if row["hop"] == hop]
    down = {"collective": "{collective}", "sent by a rank, MiB": "{mib:g}"}
    return crossed(rows, down, "{run}: ms (GB/s)", RATE)


def hop_settings(rows: list[Row]) -> str:
    """Return a table of one size between nodes under settings of NCCL."""
    return crossed(rows, {"setting": "{setting}"}, "{collective}: ms (GB/s)", RATE)


def cpu(rows: list[Row]) -> str:
    """Return a table of the phases of a step on rank 0's CPU."""
    keys = {"forward": "forward_ms", "backward": "backward_ms", "optimizer": "optimizer_ms"}
    keys |= {"waits for the GPU": "waits_for_gpu_ms", "together": "together_ms"}
    columns: dict[str, Any] = {"rank 0's CPU, ms": STRATEGY["strategy"]}
    return listed(rows, columns | {heading: f"{{{key}:.4g}}" for heading, key in keys.items()})


def cpu_conditions(rows: list[Row]) -> str:
    """Return a table of the hops before the first layer, and of the CPU's speed before and after."""
    return listed(
        rows,
        STRATEGY
        | {
            "first hops, ms": lambda row: "" if row["first_hops_ms"] is None else f"{row['first_hops_ms']:.1f}",
            "Python loop before, ms": "{python_loop_ms[0]:.2f}",
            "after, ms": "{python_loop_ms[1]:.2f}",
        },
    )


def kernels(rows: list[Row]) -> str:
    """Return a table of the kernels of a step on rank 0's GPU."""
    gathers, exchanges = (f"{kind} between nodes, ms (median of one)" for kind in ("all-gathers", "all-to-alls"))
    return listed(
        rows,
        STRATEGY
        | {
            gathers: "{all_gathers_between_nodes_ms} ({one_all_gather_ms:g})",
            exchanges: "{all_to_alls_between_nodes_ms} ({one_all_to_all_ms:g})",
            "other kernels, ms": "{other_kernels_ms}",
            "a step, ms": "{step_ms}",
        },
    )


def planned_times(rows: list[Row]) -> str:
    """Return a table of planned beside measured times, in the order of the planned ones."""
    measured = [row["levels"] for row in sorted(rows, key=lambda row: row["step_ms"])]
    planned = [row["levels"] for row in in_planned_order(rows)]
    return listed(
        in_planned_order(rows),
        {
            "scopes": "{levels}",
            "communication planned, ms": "{planned_communication_ms:.0f}",
            "step measured, ms": "{step_ms:.0f}",
            "rank planned": lambda row: str(planned.index(row["levels"]) + 1),
            "rank measured": lambda row: str(measured.index(row["levels"]) + 1),
        },
    )


def planned_memory(rows: list[Row]) -> str:
    """Return a table of planned beside measured memory of the model's states, in the same order."""
    return listed(
        in_planned_order(rows),
        {
            "scopes": "{levels}",
            "states planned, GiB": "{planned_states_gib:.2f}",
            "measured, GiB": "{states_gib:.2f}",
            "off by": lambda row: f"{row['states_gib'] / row['planned_states_gib'] - 1:+.1%}",
        },
    )


def in_planned_order(rows: list[Row]) -> list[Row]:
    """Sort rows from the least planned communication to the most."""
    return sorted(rows, key=lambda row: row["planned_communication_ms"])
