"""Tables of steps: runs side by side, other measurements than steps of strategies, and the tables on the first pages.

    python benchmarks/step/tables.py '1.35B-2x2-*'     # prints the runs of these names; without any, all names

Pages show some of the runs (``report.py``); this shows any.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "common"))

from columns import (
    BETWEEN_NODES,
    HOST,
    PEAK,
    STEP,
    Column,
    filled,
    measured,
    of_a_run,
    times_as_fast,
)
from labels import label
from markdown_tables import aligned, crossed, listed, markdown
from result_files import Result, Row, read
from result_pages import origin

# ---- columns that only pages and runs of benchmarks have, beside those of columns.py


def _paired(own: list[Row], rows: list[Row]) -> str:
    return " and ".join(
        "{1:.2f} ({0:.2f}-{2:.2f})".format(*row["paired"]) for row in own if "paired" in row and row is not rows[0]
    )


MEDIAN = measured("step, ms", "step_ms", "{:.0f}")
PAIRED = Column("of the first row's time (quartiles)", _paired)
GENERATED = measured("generated tokens/s", "generate_tokens_per_s", "{:.1f}")
_AGAINST = [times_as_fast(of, "speedup over FULL_SHARD") for of in ("fsdp2:full_shard", "full_shard")]
AGAINST_FULL_SHARD = Column(
    _AGAINST[0].heading, lambda *rows: next(filter(None, (one.cell(*rows) for one in _AGAINST)), "")
)
"""Over FSDP2's FULL_SHARD, or FSDP's in a run without it."""
AGAINST_HSDP = times_as_fast("fsdp2:hybrid_shard", "speedup over HSDP")


def summary(rows: list[Row]) -> str:
    """Return a run's table while it runs: all figures, without columns that would be empty."""
    columns = [*of_a_run(), PAIRED, measured("peak while built, GiB", "build_peak_gib", "{:.1f}"), GENERATED]
    cells = filled(rows, columns)
    return markdown(cells, zip(*cells.values(), strict=True))


# ---- runs side by side, and the columns of each

HSDP = "fsdp2:hybrid_shard"
WHOLE = (STEP, AGAINST_FULL_SHARD, AGAINST_HSDP, PEAK, HOST)
ZEROPP_KINDS = ("fsdp2:zeropp", "fsdp2:zeropp-delta")
Results = dict[str, Result]


@dataclass(frozen=True)
class Comparison:
    """Runs beside each other, a line a strategy; or, with a heading for their labels, below each other.

    Attributes:
        runs: Names of results by their labels on the page; several results of one label are one run.
        columns: Columns of each run.
        only: Strategies that are shown; by default, all.
        below: Heading over the labels of the runs, if they are below each other.
    """

    runs: dict[str, str | tuple[str, ...]]
    columns: tuple[Column, ...]
    only: tuple[str, ...] = ()
    below: str = ""

    @property
    def files(self) -> list[str]:
        """Return the names of all results."""
        return [name for names in self.runs.values() for name in ((names,) if isinstance(names, str) else names)]

    def markdown(self, results: Results) -> str:
        """Return the table."""
        lines: dict[tuple[str, ...], dict[str, list[str]]] = {}
        for run, names in self.runs.items():
            rows = [row for name in ((names,) if isinstance(names, str) else names) for row in results[name]["rows"]]
            for strategy in dict.fromkeys(row["strategy"] for row in rows):
                if not self.only or strategy in self.only:
                    own = [row for row in rows if row["strategy"] == strategy]
                    place = lines.setdefault((run, label(strategy)) if self.below else (label(strategy),), {})
                    place["" if self.below else run] = [column.cell(own, rows) for column in self.columns]
        across = [""] if self.below else list(self.runs)
        headings = [f"{run}: {column.heading}" if run else column.heading for run in across for column in self.columns]
        blank = [""] * len(self.columns)
        cells = (
            [*names, *(text for run in across for text in by_run.get(run, blank))] for names, by_run in lines.items()
        )
        return markdown([*([self.below] if self.below else []), "strategy", *headings], cells)


def one(run: str, *columns: Column, only: tuple[str, ...] = ()) -> Comparison:
    """Compare the strategies of one run."""
    return Comparison({"": run}, columns, only)


MIXTURES = {
    "2x2, sockets": "moe-2.6B-2x2",
    "2x1, sockets": "moe-2.6B-2x1",
    "2x1, NVLink": "moe-2.6B-2x1-fast",
}
"""Runs of mixtures of experts, below each other: a further run is a further line."""
MIXTURES_BESIDE_PEERS = {
    "one": "moe-2.6B-2x1-peers",
    "another": "moe-2.6B-2x1-megatron",
}
NO_PEER_TO_PEER = {
    "6.7B, 2": "6.7B-2x1-no-p2p",
    "6.7B, checkpointing, 2": "6.7B-2x1-no-p2p-checkpointing",
    "6.7B, 4": "6.7B-1x4-no-p2p",
    "1.35B, 2": "1.35B-2x1-no-p2p",
    "1.35B, 4": "1.35B-1x4-no-p2p",
}
"""Runs on one host whose GPUs copy through its memory."""
PEERS = ("megatron-hfsdp", "deepspeed-zeropp")
FOUR = "1.35B-2x2-four-micro-batches"
STEP_TIME = {
    "eager": one("1.35B-2x2-eager", *WHOLE, only=("fsdp2:full_shard", HSDP, *ZEROPP_KINDS, *PEERS)),
    "compiled": one("1.35B-2x2-compiled", *WHOLE, only=("full_shard", HSDP, *ZEROPP_KINDS, *PEERS)),
    "large": Comparison(
        {"eager": "6.7B-2x2", "compiled": "6.7B-2x2-compiled"},
        WHOLE,
        ("fsdp2:full_shard", HSDP, *ZEROPP_KINDS, *PEERS),
        below="layers",
    ),
    "mixtures": Comparison(
        MIXTURES, (STEP, AGAINST_FULL_SHARD, AGAINST_HSDP, PEAK, BETWEEN_NODES), below="nodes x GPUs, link"
    ),
    "mixtures-beside-peers": Comparison(
        MIXTURES_BESIDE_PEERS,
        (STEP, AGAINST_HSDP, PEAK),
        (HSDP, *ZEROPP_KINDS, *PEERS),
        below="machine",
    ),
    "peers-without-peer-to-peer": Comparison(
        {name: NO_PEER_TO_PEER[name] for name in ("6.7B, checkpointing, 2", "1.35B, 2", "1.35B, 4")},
        (STEP, AGAINST_FULL_SHARD, PEAK),
        ("fsdp2:full_shard", *ZEROPP_KINDS, *(f"{kind}-alone" for kind in ZEROPP_KINDS), *PEERS),
        below="model, GPUs",
    ),
    "hosts-without-peer-to-peer": one("1.35B-2x2-no-p2p", STEP, AGAINST_HSDP, PEAK),
    "four-micro-batches": Comparison(
        {
            "eager": f"{FOUR}-eager",
            "eager, second": f"{FOUR}-deepspeed",
            "compiled, nodes of one": "1.35B-2x1-four-micro-batches-compiled",
        },
        (STEP, AGAINST_HSDP, PEAK),
        ("zeropp-IIG", *(f"{kind}-IIG" for kind in ZEROPP_KINDS), HSDP, "fsdp2:full_shard", "full_shard", *PEERS),
        below="layers, machine",
    ),
    "two-bits": Comparison(
        {
            "mixture, 2.6B": "moe-2.6B-2x1-deltas",
            "6.7B": "6.7B-2x1-deltas",
            "6.7B, second machine": "6.7B-2x1-int3",
            "1.35B, compiled": "1.35B-2x1-compiled-int3",
        },
        (STEP, HOST, BETWEEN_NODES),
        ("fsdp2:zeropp-delta", "fsdp2:zeropp-delta2", "fsdp2:zeropp-delta2-int3"),
        below="model",
    ),
    "nodes-of-one": Comparison(
        {
            "sockets": "1.35B-2x1-compiled",
            "NVLink": ("1.35B-2x1-fast-compiled", "1.35B-2x1-fast-compiled-again"),
            "NVLink, eager": ("1.35B-2x1-fast-eager", "1.35B-2x1-fast-eager-again"),
        },
        (STEP, HOST),
        below="link",
    ),
    "two-layers": Comparison(
        {
            "NVLink": "1.35B-2x1-fast-compiled-pairs",
            "no peer-to-peer": "1.35B-2x1-no-p2p-compiled-pairs",
            "sockets": "1.35B-2x1-compiled-pairs",
            "nodes of two": "1.35B-2x2-shared-compiled-pairs",
            "nodes of two, third machine": "1.35B-2x2-shared-compiled-pairs-again",
        },
        (STEP, HOST),
        (
            *("fsdp2:full_shard", HSDP, "fsdp2:ends-hybrid_shard"),
            *(*ZEROPP_KINDS, "fsdp2:ends-zeropp", "fsdp2:ends-zeropp-delta"),
            *(f"fsdp2:pairs-{kind}" for kind in ("full_shard", "hybrid_shard", "zeropp", "zeropp-delta")),
        ),
        below="link",
    ),
    "shared-nodes-of-four": one("1.35B-2x4-shared", STEP, AGAINST_FULL_SHARD, AGAINST_HSDP, PEAK),
    "slow-links": Comparison(
        {
            "10 Gbit/s": "1.35B-2x1-shared-10-gbps",
            "1 Gbit/s": "1.35B-2x1-shared-1-gbps",
            "1 Gbit/s, first step": "1.35B-2x1-shared-1-gbps-hsdp",
        },
        (MEDIAN, PEAK, BETWEEN_NODES),
        below="link",
    ),
}
"""By the names of the tables in docs/results/step-time-tables.md."""
NO_NVLINK = {
    "no-peer-to-peer": Comparison(
        {name: NO_PEER_TO_PEER[name] for name in ("6.7B, 2", "6.7B, 4")}
        | {"1.35B, compiled, 2": "1.35B-2x1-no-p2p-compiled-new"},
        (STEP, AGAINST_FULL_SHARD, PEAK),
        ("fsdp2:full_shard", *(f"fsdp2:zeropp{kind}" for kind in ("", "-delta", "-GGG", "-alone", "-delta-alone"))),
        below="model, GPUs",
    ),
}
_INT8, _NF4 = "fsdp2:once-zeropp", "fsdp2:once-zeropp-nf4"
LORA = {
    "lora": Comparison(
        {
            "one": "lora-6.7B-2x2",
            "another": "lora-6.7B-2x2-again",
            "third, earlier version": "lora-6.7B-2x2-earlier-on-A",
        },
        (STEP, AGAINST_FULL_SHARD, AGAINST_HSDP, PEAK),
        (_INT8, _NF4, HSDP, "full_shard"),
        below="machine",
    ),
    "lora-70B": Comparison({"two of 2": "lora-70B-2x2", "one of 2": "lora-70B-1x2-qlora"}, (STEP, PEAK), below="nodes"),
    "lora-nodes-of-one": Comparison(
        {"6.7B": "lora-6.7B-2x1", "1.35B, compiled": "lora-1.35B-2x1-compiled"},
        (STEP, PEAK, HOST),
        (HSDP, _INT8, "fsdp2:mixzpp"),
        below="model",
    ),
    "qlora-in-turn": Comparison(
        {"NVLink": "lora-6.7B-1x2-qlora-in-turn", "no peer-to-peer": "lora-6.7B-1x2-no-p2p-qlora-in-turn"},
        (STEP, PAIRED),
    ),
    "lora-no-peer-to-peer": one(
        "lora-6.7B-2x1-no-p2p",
        STEP,
        AGAINST_FULL_SHARD,
        PEAK,
        only=("fsdp2:full_shard", _INT8, f"{_INT8}-int4", _NF4),
    ),
}
"""By the names of the tables in docs/results/lora.md."""


# ---- hops, the planner, offload and gathering

RATE = "{ms:.2f} ({gb_per_s:.2f})"
_NVLINK, _NO_PEER_TO_PEER = "one node of 2, NVLink", "one node of 2, no peer-to-peer"
GATHERING = {
    "gathering-1x2": _NVLINK,
    "gathering-1x2-fsdp1": _NVLINK,
    "gathering-1x2-rank-0": _NVLINK,
    "gathering-1x2-no-p2p": _NO_PEER_TO_PEER,
    "gathering-1x2-no-p2p-fsdp1": _NO_PEER_TO_PEER,
    "gathering-2x1": "two nodes of 1, sockets",
}
"""Links by results of gathering.py, a line each: a further result is a further line."""


def hops(runs: Mapping[str, Result], hop: str, least: float = 0) -> str:
    """Return a table of runs of hops.py over one hop side by side, each under its label, from ``least`` MiB on."""
    rows = [row | {"run": run} for run, result in runs.items() for row in result["rows"] if row["hop"] == hop]
    rows = [row for row in rows if row["mib"] >= least]
    down = {"collective": "{collective}", "sent by a rank, MiB": "{mib:g}"}
    return crossed(rows, down, "{run}: ms (GB/s)", RATE)


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


# ---- the first pages: a line for each training, under torch's strategies and under ours

HEAD = ("training", "tokens a step", "FULL_SHARD, ms", "HSDP, ms", "fsdp_zpp, ms", "against FULL_SHARD", "against HSDP")
_PEAKS = "GiB: FULL_SHARD, HSDP, fsdp_zpp"


@dataclass(frozen=True)
class Training:
    """One line.

    Attributes:
        title: What is trained, on which machines.
        run: Name of the result.
        full_shard: Name of FULL_SHARD there.
        ours: Names of our strategies there, by what the page calls them beside the first.
    """

    title: str
    run: str
    full_shard: str
    ours: dict[str, str]


ZEROPP = {"": "fsdp2:zeropp", "with deltas": "fsdp2:zeropp-delta"}
ALONE = {name: f"{strategy}-alone" for name, strategy in ZEROPP.items()}
IIG = {name: f"{strategy}-IIG" for name, strategy in ZEROPP.items()}
TRAININGS = (
    Training("Llama 6.7B, 2 nodes of 2", "6.7B-2x2", "fsdp2:full_shard", ZEROPP),
    Training("LoRA of 6.7B, 2 nodes of 2", "lora-6.7B-2x2", "full_shard", {"": "fsdp2:once-zeropp"}),
    Training("Llama 6.7B, 1 machine of 4 without NVLink", "6.7B-1x4-no-p2p", "fsdp2:full_shard", ALONE),
)
"""Lines of README.md."""
SUMMARY = (
    Training("1.35B", "1.35B-2x2-eager", "fsdp2:full_shard", ZEROPP),
    Training("1.35B, a faster CPU", "1.35B-2x2-h200", "fsdp2:full_shard", ZEROPP),
    Training("1.35B, compiled", "1.35B-2x2-compiled", "full_shard", ZEROPP),
    Training("1.35B, micro-batch 1", "1.35B-2x2-micro-batch-1", "fsdp2:full_shard", ZEROPP),
    Training("1.35B, micro-batch 8", "1.35B-2x2-micro-batch-8", "fsdp2:full_shard", ZEROPP),
    Training("1.35B, 4 micro-batches, `IIG`", f"{FOUR}-eager", "fsdp2:full_shard", IIG),
    Training("6.7B", "6.7B-2x2", "fsdp2:full_shard", ZEROPP),
    Training("6.7B, compiled", "6.7B-2x2-compiled", "fsdp2:full_shard", ZEROPP),
    Training("mixture, 2.6B", "moe-2.6B-2x2", "fsdp2:full_shard", ZEROPP),
    Training("mixture, 2.6B, 2 nodes of 1", "moe-2.6B-2x1", "fsdp2:full_shard", ZEROPP),
    Training("6.7B, 1 machine of 4 without NVLink", "6.7B-1x4-no-p2p", "fsdp2:full_shard", ALONE),
)
"""Lines of docs/results/step-time.md."""


def of_trainings(trainings: Iterable[Training], results: Results, peaks: bool = False) -> str:
    """Return a table, with peaks of memory if asked; a line without HSDP is of a run where HSDP is replication."""
    head = (*HEAD, _PEAKS) if peaks else HEAD
    return markdown(head, (_line(training, results[training.run])[: len(head)] for training in trainings))


def _line(training: Training, result: Result) -> list[str]:
    given = ("micro_batch", "micro_batches", "sequence", "nodes", "gpus_per_node")
    tokens = math.prod(result["arguments"][name] for name in given)
    by_name = {row["strategy"]: row for row in result["rows"] if "step_ms" in row}
    times = {strategy: row["step_ms"] for strategy, row in by_name.items()}
    ours = {name: times[strategy] for name, strategy in training.ours.items()}
    full_shard, hsdp = times[training.full_shard], times.get(HSDP)
    steps = ", ".join(f"{name} {step:.0f}".strip() for name, step in ours.items())
    against = [_range([other / step for step in ours.values()]) if other else "" for other in (full_shard, hsdp)]
    of = [by_name.get(strategy) for strategy in (training.full_shard, HSDP, training.ours[""])]
    peaks = ", ".join(f"{row['peak_gib']:.1f}" if row else "-" for row in of)
    return [training.title, f"{tokens:,}", f"{full_shard:.0f}", f"{hsdp:.0f}" if hsdp else "", steps, *against, peaks]


def _range(ratios: list[float]) -> str:
    return " to ".join(dict.fromkeys(f"{ratio:.1f}x" for ratio in sorted(ratios)))


# ---- any run


def main(patterns: Sequence[str]) -> None:
    """Print the runs that patterns name, each with how it was made; without patterns, the names of all."""
    results = read(Path(__file__).parent / "results")
    for name, result in results.items():
        if not patterns:
            print(name, f"({result['study']}.json)")
        elif any(fnmatch(name, pattern) for pattern in patterns):
            print(f"{name}: {origin(result)}", aligned(whole(result["rows"])), "", sep="\n")


def whole(rows: list[Row]) -> str:
    """Return a table of a run, with all figures of its rows if they are no steps of strategies."""
    if any("fastest_ms" in row for row in rows):
        return summary(rows)
    keys = [key for key, value in rows[0].items() if not isinstance(value, list | dict)]
    return markdown(
        keys, ([f"{row[key]:.4g}" if isinstance(row[key], float) else f"{row[key]}" for key in keys] for row in rows)
    )


if __name__ == "__main__":
    main(sys.argv[1:])
