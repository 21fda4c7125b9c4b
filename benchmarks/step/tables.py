"""Tables of steps: runs side by side, other measurements than steps of strategies, and the table on the first page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from columns import (
    BETWEEN_NODES,
    HOST,
    PEAK,
    STEP,
    Column,
    figures_of,
    filled,
    measured,
    of_a_run,
    times_as_fast,
)
from labels import label
from markdown_tables import crossed, listed, markdown
from result_files import Result, Row

# ---- columns that only pages and runs of benchmarks have, beside those of columns.py


def _paired(own: list[Row], rows: list[Row]) -> str:
    return " and ".join(
        "{1:.2f} ({0:.2f}-{2:.2f})".format(*row["paired"]) for row in own if "paired" in row and row is not rows[0]
    )


def share(of: str, key: str, heading: str, form: str = "{:.2f}") -> Column:
    """Make a column with a figure as a share of that of the strategy ``of``."""

    def cell(own: list[Row], rows: list[Row]) -> str:
        references = figures_of(rows, key, of)
        return " and ".join(form.format(figure / references[0]) for figure in figures_of(own, key) if references)

    return Column(heading, cell)


MEDIAN = measured("step, ms", "step_ms", "{:.0f}")
PAIRED = Column("of the first row's time (quartiles)", _paired)
GENERATED = measured("generated tokens/s", "generate_tokens_per_s", "{:.1f}")
AGAINST_FULL_SHARD = times_as_fast("full_shard", "speedup over FULL_SHARD")
AGAINST_FSDP2 = times_as_fast("fsdp2:full_shard", "speedup over FULL_SHARD")
AGAINST_FLOAT8 = times_as_fast("fsdp2:float8-full_shard", "speedup over FULL_SHARD in float8")
AGAINST_HSDP = times_as_fast("fsdp2:hybrid_shard", "speedup over HSDP")


def summary(rows: list[Row]) -> str:
    """Return a run's table while it runs: all figures, without columns that would be empty."""
    columns = [*of_a_run(), PAIRED, measured("peak while built, GiB", "build_peak_gib", "{:.1f}"), GENERATED]
    cells = filled(rows, columns)
    return markdown(cells, zip(*cells.values(), strict=True))


# ---- runs side by side, and the columns of each

HSDP = "fsdp2:hybrid_shard"
USUAL = (STEP, AGAINST_FULL_SHARD, PEAK)
WHOLE = (STEP, AGAINST_FSDP2, AGAINST_HSDP, PEAK, HOST, BETWEEN_NODES)
WHOLE_OF_FSDP = (STEP, AGAINST_FULL_SHARD, *WHOLE[2:])
"""Columns of a run whose FULL_SHARD is FSDP's."""
WHOLE_BESIDE_HSDP = (STEP, *WHOLE[2:])
"""Columns of a run without FULL_SHARD."""
OF_HSDPS_PEAK = share(HSDP, "peak_gib", "of HSDP's peak", "{:.0%}")
DELTAS = ("zeropp-delta", "fsdp2:zeropp-delta")
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


IN_TURN = {
    "two nodes of 2": "lora-6.7B-2x2-in-turn",
    "two nodes of 2 that share GPUs": "lora-6.7B-2x2-shared-in-turn",
    "two nodes of 1": "lora-6.7B-2x1-in-turn",
}
MIXTURES = {
    "24 layers, 2 x 1, sockets": "moe-2.6B-2x1",
    "24 layers, 2 x 1, no peer-to-peer": "moe-2.6B-2x1-no-p2p",
    "24 layers, 2 x 1, NVLink": "moe-2.6B-2x1-fast",
    "24 layers, 2 x 2, sockets": "moe-2.6B-2x2",
    "24 layers, 2 x 2, sockets, earlier machine": "moe-2.6B-2x2-earlier-on-G",
    "12 layers, 2 x 1, sockets": "moe-2.7B-2x1",
    "12 layers, 2 x 1, no peer-to-peer": "moe-2.7B-2x1-no-p2p",
    "12 layers, 2 x 1, NVLink": "moe-2.7B-2x1-fast",
}
"""Runs of mixtures of experts, below each other: a further run is a further line."""
MIXTURES_BESIDE_PEERS = {
    "2 x 1, sockets": "moe-2.6B-2x1-peers",
    "2 x 1, sockets, another machine": "moe-2.6B-2x1-megatron",
    "2 x 1, no peer-to-peer": "moe-2.6B-2x1-no-p2p-peers",
    "2 x 1, no peer-to-peer, another machine": "moe-2.6B-2x1-no-p2p-megatron",
    "2 x 1, NVLink": "moe-2.6B-2x1-fast-peers",
    "2 x 2, sockets": "moe-2.6B-2x2-expert-parallel",
}
NO_PEER_TO_PEER = {
    "6.7B, 2 GPUs": "6.7B-2x1-no-p2p",
    "6.7B, checkpointing, 2 GPUs": "6.7B-2x1-no-p2p-checkpointing",
    "6.7B, 4 GPUs": "6.7B-1x4-no-p2p",
    "1.35B, 2 GPUs": "1.35B-2x1-no-p2p",
    "1.35B, compiled, 2 GPUs": "1.35B-2x1-no-p2p-compiled",
    "1.35B, 4 GPUs": "1.35B-1x4-no-p2p",
}
"""Runs on one host whose GPUs copy through its memory."""
FOUR = "1.35B-2x2-four-micro-batches"
STEP_TIME = {
    "eager": one("1.35B-2x2-eager", *WHOLE),
    "compiled": one("1.35B-2x2-compiled", *WHOLE_OF_FSDP),
    "eager-again": one("1.35B-2x2-h200", *WHOLE),
    "micro-batches": Comparison(
        {
            "1": "1.35B-2x2-micro-batch-1",
            "8": "1.35B-2x2-micro-batch-8",
            "1, another machine": "1.35B-2x2-micro-batch-1-again",
        },
        WHOLE,
        below="micro-batch",
    ),
    "DeepSpeed": one("1.35B-2x2-earlier-on-A", *USUAL, only=("full_shard", "zeropp", HSDP, "deepspeed-zeropp")),
    "float8": one("1.35B-2x1-float8", STEP, AGAINST_FLOAT8, PEAK, BETWEEN_NODES),
    "large": one("6.7B-2x2", *WHOLE),
    "large-compiled": one("6.7B-2x2-compiled", *WHOLE),
    "mixtures": Comparison(
        MIXTURES,
        WHOLE,
        below="layers, nodes x GPUs, link",
    ),
    "mixtures-beside-peers": Comparison(
        MIXTURES_BESIDE_PEERS,
        WHOLE,
        below="nodes x GPUs, link",
    ),
    "no-peer-to-peer": Comparison(
        NO_PEER_TO_PEER, (STEP, AGAINST_FSDP2, PEAK, HOST, BETWEEN_NODES), below="model, GPUs"
    ),
    "hosts-without-peer-to-peer": one("1.35B-2x2-no-p2p", STEP, AGAINST_HSDP, PEAK, BETWEEN_NODES),
    "four-micro-batches": one(f"{FOUR}-eager", *WHOLE),
    "four-micro-batches-DeepSpeed": one(f"{FOUR}-deepspeed", *WHOLE_BESIDE_HSDP),
    "four-micro-batches-earlier": Comparison(
        {"eager": f"{FOUR}-earlier-on-C", "compiled": f"{FOUR}-compiled"}, (STEP, PEAK)
    ),
    "four-micro-batches-delta": one(
        f"{FOUR}-delta",
        STEP,
        share(HSDP, "step_ms", "of HSDP's time"),
        PEAK,
        HOST,
    ),
    "one-node": one("1.35B-1x2-in-turn", STEP, PAIRED),
    "fast": Comparison(
        {"first machine": "1.35B-2x1-fast", "slower machine": "1.35B-2x1-fast-slower-machine"}, (PAIRED,)
    ),
    "without-codecs": one("1.35B-2x2-first-version", *USUAL),
    "nodes-of-one": one("1.35B-2x1", *USUAL),
    "four-nodes-of-one": one("1.35B-4x1", *WHOLE),
    "slow-links": Comparison(
        {
            "none: one rank alone": ("1.35B-1x1-free-running", "1.35B-1x1-free-running-first"),
            "10 Gbit/s": "1.35B-2x1-shared-10-gbps",
            "1 Gbit/s": "1.35B-2x1-shared-1-gbps",
            "1 Gbit/s, first step": ("1.35B-2x1-shared-1-gbps-hsdp", "1.35B-2x1-shared-1-gbps-full-shard"),
        },
        (MEDIAN, PEAK, BETWEEN_NODES),
        below="link",
    ),
    "exchanges": Comparison(
        {
            "2 x 1, NVLink": "1.35B-2x1-exchanges-fast",
            "2 x 1, sockets": "1.35B-2x1-exchanges",
            "2 x 2, sockets": ("1.35B-2x2-exchanges", "1.35B-2x2-exchanges-8"),
            "4 x 1, sockets": ("1.35B-4x1-exchanges", "1.35B-4x1-exchanges-8"),
        },
        (MEDIAN, PEAK, HOST, BETWEEN_NODES),
        below="nodes x GPUs, link",
    ),
    "shared": one("1.35B-2x2-shared-four-micro-batches", *USUAL),
    "shared-nodes-of-four": one("1.35B-2x4-shared", *WHOLE),
    "loco-fast": one("1.35B-2x1-fast-loco", STEP, PAIRED),
    "loco": one("1.35B-2x2-loco", STEP, PEAK),
    "loco-and-IIG": one("1.35B-2x2-loco-and-IIG", *WHOLE_BESIDE_HSDP),
    "chunks": Comparison(
        {
            "shared GPU, 128 KiB": "1.35B-2x1-shared-128KiB-chunks",
            "shared GPU, 512 KiB": "1.35B-2x1-shared-512KiB-chunks",
            "own GPUs, 128 KiB": "1.35B-2x2-128KiB-chunks",
            "own GPUs, 512 KiB": "1.35B-2x2-512KiB-chunks",
        },
        (MEDIAN,),
        DELTAS,
    ),
    "connections": Comparison(
        {
            "shared GPUs, 8": "1.35B-2x2-shared-default-connections",
            "shared GPUs, 32": "1.35B-2x2-shared-first",
            "own GPUs, 8": ("1.35B-2x2-8-connections", "1.35B-2x2-earlier-on-B"),
            "own GPUs, 32": "1.35B-2x2-32-connections",
        },
        (MEDIAN,),
        ("zeropp", *DELTAS, HSDP),
    ),
}
NO_NVLINK = {
    "no-peer-to-peer": Comparison(
        {
            name: NO_PEER_TO_PEER[name]
            for name in ("6.7B, 2 GPUs", "6.7B, 4 GPUs", "1.35B, 2 GPUs", "1.35B, compiled, 2 GPUs")
        }
        | {"mixture of experts, 2.6B, 2 GPUs": "moe-2.6B-2x1-no-p2p"},
        (STEP, AGAINST_FSDP2, PEAK),
        ("fsdp2:full_shard", *(f"fsdp2:zeropp{kind}" for kind in ("", "-delta", "-GGG", "-alone", "-delta-alone"))),
        below="model, GPUs",
    ),
}
LORA = {
    "lora": Comparison(
        {
            "one": "lora-6.7B-2x2",
            "another": "lora-6.7B-2x2-again",
            "a third, earlier version": "lora-6.7B-2x2-earlier-on-A",
        },
        (STEP, AGAINST_FULL_SHARD, AGAINST_HSDP, PEAK, OF_HSDPS_PEAK, HOST),
        below="machine",
    ),
    "lora-in-turn": Comparison(IN_TURN, (PAIRED,)),
    "lora-70B": Comparison(
        {
            "two of 2": "lora-70B-2x2",
            "two of 2, earlier version": "lora-70B-2x2-earlier-on-A",
            "one of 2, earlier version": "lora-70B-1x2",
        },
        (STEP, PEAK, GENERATED),
        below="nodes",
    ),
    "lora-nodes-of-one": one("lora-6.7B-2x1", STEP, PEAK, GENERATED),
    "qlora-in-turn": Comparison(
        {"NVLink": "lora-6.7B-1x2-qlora-in-turn", "no peer-to-peer": "lora-6.7B-1x2-no-p2p-qlora-in-turn"},
        (STEP, PAIRED, HOST),
    ),
    "qlora": Comparison(
        {
            "6.7B, NVLink": "lora-6.7B-1x2-qlora",
            "6.7B, no peer-to-peer": "lora-6.7B-1x2-no-p2p-qlora",
            "70B, checkpointing, NVLink": "lora-70B-1x2-qlora",
        },
        (STEP, PEAK, HOST),
        below="model, link",
    ),
    "lora-no-peer-to-peer": one("lora-6.7B-2x1-no-p2p", STEP, AGAINST_FSDP2, PEAK, HOST),
    "lora-shared": Comparison(
        {"first machine": "lora-6.7B-2x2-shared-first", "second machine": "lora-6.7B-2x2-shared-second"},
        (STEP, PEAK),
    ),
    "lora-one-node": one("lora-6.7B-1x2-in-turn", STEP, PAIRED),
}
TOKENS = measured("tokens/s, all GPUs", "tokens_per_s", "{:,.0f}")
RECIPES = {
    "recipe-full": one("6.7B-2x2", STEP, TOKENS, PEAK, only=(HSDP, "fsdp2:full_shard", "fsdp2:zeropp", *DELTAS)),
    "recipe-mixture": one("moe-2.6B-2x2", STEP, TOKENS, PEAK),
    "recipe-70B": Comparison(
        {"2 x 2": "lora-70B-2x2", "1 x 2": "lora-70B-1x2-qlora"}, (STEP, TOKENS, PEAK), below="nodes x GPUs"
    ),
}
"""By the names of the tables in docs/results/step-time.md and lora.md, one-machine-without-nvlink.md and recipes.md."""


# ---- hops, the CPU's part, the planner, offload, gathering, and two layouts

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


# ---- the first page: a line for each training, under torch's strategies and under ours

HEAD = ("training", "FULL_SHARD, ms", "HSDP, ms", "fsdp_zpp, ms", "against FULL_SHARD", "against HSDP")


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
TRAININGS = (
    Training("Llama 1.35B, 2 nodes of 2", "1.35B-2x2-eager", "fsdp2:full_shard", ZEROPP),
    Training("Llama 6.7B, 2 nodes of 2", "6.7B-2x2", "fsdp2:full_shard", ZEROPP),
    Training("LoRA of 6.7B, 2 nodes of 2", "lora-6.7B-2x2", "full_shard", {"": "fsdp2:once-zeropp"}),
    Training("mixture of experts, 2.6B, 2 nodes of 1", "moe-2.6B-2x1", "fsdp2:full_shard", ZEROPP),
    Training("Llama 6.7B, 1 machine of 4 without NVLink", "6.7B-1x4-no-p2p", "fsdp2:full_shard", ALONE),
)


def first_page(results: Results) -> str:
    """Return the table; a line without HSDP is of a run in which HSDP is the same as replicating."""
    return markdown(HEAD, (_line(training, results[training.run]["rows"]) for training in TRAININGS))


def _line(training: Training, rows: list[Row]) -> list[str]:
    times = {row["strategy"]: row["step_ms"] for row in rows if "step_ms" in row}
    ours = {name: times[strategy] for name, strategy in training.ours.items()}
    full_shard, hsdp = times[training.full_shard], times.get(HSDP)
    steps = ", ".join(f"{name} {step:.0f}".strip() for name, step in ours.items())
    against = [_range([other / step for step in ours.values()]) if other else "" for other in (full_shard, hsdp)]
    return [training.title, f"{full_shard:.0f}", f"{hsdp:.0f}" if hsdp else "", steps, *against]


def _range(ratios: list[float]) -> str:
    return " to ".join(dict.fromkeys(f"{ratio:.1f}x" for ratio in sorted(ratios)))
