"""Tables of other measurements than steps of strategies, and of two layouts: hops, the CPU's part, the planner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labels import label
from markdown_tables import crossed, listed
from result_files import Result, Row

from fsdp_zpp.bench.results import HOST, STEP

RATE = "{ms:.2f} ({gb_per_s:.2f})"
_NVLINK, _NO_PEER_TO_PEER = "one node of 2, NVLink", "one node of 2, no peer-to-peer"
GATHERING = {
    "gathering-1x2": _NVLINK,
    "gathering-1x2-fsdp1": _NVLINK,
    "gathering-1x2-rank-0": _NVLINK,
    "gathering-1x4": "one node of 4, NVLink, earlier version",
    "gathering-1x2-no-p2p": _NO_PEER_TO_PEER,
    "gathering-1x2-no-p2p-fsdp1": _NO_PEER_TO_PEER,
    "gathering-2x1": "two nodes of 1, sockets",
}
"""Links by results of gathering.py, a line each: a further result is a further line."""
ONE_NODE_FIRST = {
    "1.35B": ("1.35B-1x4", "1.35B-2x2-eager"),
    "1.35B, earlier version, another machine": ("1.35B-1x4-earlier-on-A", "1.35B-2x2-earlier-on-A"),
    "6.7B": ("6.7B-1x4", "6.7B-2x2"),
}
"""Results on one node of 4 and on two nodes of 2, of one machine, by their label."""
_ON_ONE_NODE = "fsdp2:full_shard"
_BESIDE_ONE_NODE = ("fsdp2:zeropp", "fsdp2:zeropp-delta", "fsdp2:hybrid_shard", "fsdp2:full_shard")


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


def gathering(results: Mapping[str, Result]) -> str:
    """Return a table of ``gathered_weights`` beside the link alone, a line for each of :data:`GATHERING`."""
    rows = []
    for name, link in GATHERING.items():
        given, (row,) = results[name]["arguments"], results[name]["rows"]
        adapter = {"fsdp1": "FSDP", "fsdp2": "FSDP2"}[given["adapter"]]
        receivers = "all ranks" if given["rank"] is None else "one rank"
        rows.append(row | {"kind": f"{adapter}, {receivers}", "link": link})
    return listed(
        rows,
        {
            "adapter, who gets the weights": "{kind}",
            "link": "{link}",
            "link alone, ms": lambda row: f"{row['link_s'] * 1e3:.0f}",
            "`gathered_weights`, ms": lambda row: f"{row['gathered_weights_s'] * 1e3:.0f}",
            "of the link's time": lambda row: f"{row['gathered_weights_s'] / row['link_s']:.2f}",
            "above the shards, MiB": lambda row: f"{row['above_shards'] / 2**20:.0f}",
        },
    )


def beside_one_node(results: Mapping[str, Result]) -> str:
    """Return a table of strategies on two nodes beside FULL_SHARD on one, for each of :data:`ONE_NODE_FIRST`."""
    lines: list[Row] = []
    for model, (one, two) in ONE_NODE_FIRST.items():
        (reference,) = (row for row in results[one]["rows"] if row["strategy"] == _ON_ONE_NODE)
        others = (row for strategy in _BESIDE_ONE_NODE for row in results[two]["rows"] if row["strategy"] == strategy)
        lines.append({"model": model, "nodes": "one of 4", "row": reference, "ratio": 1.0})
        for row in others:
            ratio = row["step_ms"] / reference["step_ms"]
            lines.append({"model": model, "nodes": "two of 2", "row": row, "ratio": ratio})
    columns: dict[str, Any] = {"model": "{model}", "nodes": "{nodes}"}
    columns["strategy"] = lambda line: label(line["row"]["strategy"])
    columns[STEP.heading] = lambda line: STEP.cell([line["row"]], [])
    columns["of one node's time"] = "{ratio:.2f}"
    columns[HOST.heading] = lambda line: HOST.cell([line["row"]], [])
    return listed(lines, columns)
