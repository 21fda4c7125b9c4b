"""Tables of what is not a step of strategies side by side: hops, the CPU's part, kernels of a step, the planner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from readme_tables import markdown

Row = dict[str, Any]


def rate(row: Row) -> str:
    """A collective's time and what a rank sends in it a second."""
    return f"{row['ms']:.2f} ({row['gb_per_s']:.2f})"


def hops(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Runs of hops.py side by side, each under its label."""
    lines: dict[tuple[str, str, float], list[str]] = {}
    for result in runs.values():
        for row in result["rows"]:
            lines.setdefault((row["hop"], row["collective"], row["mib"]), []).append(rate(row))
    headings = ["hop", "collective", "sent by a rank, MiB", *(f"{label}: ms (GB/s)" for label in runs)]
    return markdown(headings, ([hop, name, f"{mib:g}", *cells] for (hop, name, mib), cells in lines.items()))


def hop_settings(rows: list[Row]) -> str:
    """One size between nodes under settings of NCCL's."""
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        lines.setdefault(row["setting"], {})[row["collective"]] = rate(row)
    names = list(dict.fromkeys(row["collective"] for row in rows))
    cells = ([setting, *(by_name[name] for name in names)] for setting, by_name in lines.items())
    return markdown(["setting", *(f"{name}: ms (GB/s)" for name in names)], cells)


def cpu(rows: list[Row]) -> str:
    """What of a step rank 0's CPU spends where."""
    columns = {
        "forward": "forward_ms",
        "backward": "backward_ms",
        "optimizer": "optimizer_ms",
        "then waits for the GPU": "waits_for_gpu_ms",
        "together, ms": "together_ms",
        "first hops, till the first layer": "first_hops_ms",
    }
    lines = []
    for row in rows:
        figures = ["" if row[key] is None else f"{row[key]:.4g}" for key in columns.values()]
        lines.append([row["strategy"], *figures, ", ".join(f"{ms:.2f}" for ms in row["python_loop_ms"])])
    return markdown(["strategy", *columns, "a loop of Python, before and after"], lines)


def kernels(rows: list[Row]) -> str:
    """What of a step rank 0's GPU spends where."""
    lines = [
        [
            row["strategy"],
            f"{row['all_gathers_between_nodes_ms']} ({row['one_all_gather_ms']:g})",
            f"{row['all_to_alls_between_nodes_ms']} ({row['one_all_to_all_ms']:g})",
            f"{row['other_kernels_ms']}",
            f"{row['step_ms']}",
        ]
        for row in rows
    ]
    headings = (
        "strategy",
        "all-gathers between nodes, ms (median of one)",
        "all-to-alls between nodes, ms (median of one)",
    )
    return markdown([*headings, "other kernels, ms", "a step, ms"], lines)


def planned(rows: list[Row]) -> str:
    """Planned beside measured, in the order of the planned times."""
    order = [row["levels"] for row in sorted(rows, key=lambda row: row["step_ms"])]
    lines = [
        [
            row["levels"],
            f"{row['planned_communication_ms']:.0f}",
            f"{row['step_ms']:.0f}",
            f"{place}, {order.index(row['levels']) + 1}",
            f"{row['planned_states_gib']:.2f}",
            f"{row['states_gib']:.2f}",
            f"{row['states_gib'] / row['planned_states_gib'] - 1:+.1%}",
        ]
        for place, row in enumerate(sorted(rows, key=lambda row: row["planned_communication_ms"]), start=1)
    ]
    headings = ["levels", "communication planned, ms", "step measured, ms", "place planned, measured"]
    return markdown([*headings, "states planned, GiB", "measured, GiB", "off by"], lines)
