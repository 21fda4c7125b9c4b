"""Tables of what is not a step of strategies side by side: hops, the CPU's part, kernels of a step, the planner."""

from __future__ import annotations

from collections.abc import Mapping

from labels import label
from result_files import Result, Row
from result_pages import markdown


def rate(row: Row) -> str:
    """A collective's time and what a rank sends in it a second."""
    return f"{row['ms']:.2f} ({row['gb_per_s']:.2f})"


def hops(runs: Mapping[str, Result], hop: str) -> str:
    """Runs of hops.py over one hop side by side, each under its label."""
    lines: dict[tuple[str, float], list[str]] = {}
    for result in runs.values():
        for row in result["rows"]:
            if row["hop"] == hop:
                lines.setdefault((row["collective"], row["mib"]), []).append(rate(row))
    headings = ["collective", "sent by a rank, MiB", *(f"{size}: ms (GB/s)" for size in runs)]
    return markdown(headings, ([name, f"{mib:g}", *cells] for (name, mib), cells in lines.items()))


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
        "waits for the GPU": "waits_for_gpu_ms",
        "together": "together_ms",
    }
    lines = ([label(row["strategy"]), *(f"{row[key]:.4g}" for key in columns.values())] for row in rows)
    return markdown(["rank 0's CPU, ms", *columns], lines)


def cpu_conditions(rows: list[Row]) -> str:
    """What comes before the first layer, and how fast that CPU was just then."""
    lines = [
        [
            label(row["strategy"]),
            "" if row["first_hops_ms"] is None else f"{row['first_hops_ms']:.1f}",
            *(f"{ms:.2f}" for ms in row["python_loop_ms"]),
        ]
        for row in rows
    ]
    return markdown(["strategy", "first hops, ms", "Python loop before, ms", "after, ms"], lines)


def kernels(rows: list[Row]) -> str:
    """What of a step rank 0's GPU spends where."""
    lines = [
        [
            label(row["strategy"]),
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


def planned_times(rows: list[Row]) -> str:
    """Planned beside measured times, in the order of the planned ones."""
    order = [row["levels"] for row in sorted(rows, key=lambda row: row["step_ms"])]
    lines = [
        [
            row["levels"],
            f"{row['planned_communication_ms']:.0f}",
            f"{row['step_ms']:.0f}",
            f"{place}",
            f"{order.index(row['levels']) + 1}",
        ]
        for place, row in enumerate(in_planned_order(rows), start=1)
    ]
    headings = ["scopes", "communication planned, ms", "step measured, ms", "rank planned", "rank measured"]
    return markdown(headings, lines)


def planned_memory(rows: list[Row]) -> str:
    """Planned beside measured memory of the model's states, in the same order."""
    lines = [
        [
            row["levels"],
            f"{row['planned_states_gib']:.2f}",
            f"{row['states_gib']:.2f}",
            f"{row['states_gib'] / row['planned_states_gib'] - 1:+.1%}",
        ]
        for row in in_planned_order(rows)
    ]
    return markdown(["scopes", "states planned, GiB", "measured, GiB", "off by"], lines)


def in_planned_order(rows: list[Row]) -> list[Row]:
    """From the least planned communication to the most."""
    return sorted(rows, key=lambda row: row["planned_communication_ms"])
