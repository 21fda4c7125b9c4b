"""Runs that the tables of steps show side by side, and the columns of each."""

from __future__ import annotations

from dataclasses import dataclass

from columns import AGAINST_FLOAT8, AGAINST_FSDP2, AGAINST_FULL_SHARD, AGAINST_HSDP, GENERATED, MEDIAN, PAIRED, share
from labels import label
from markdown_tables import markdown
from result_files import Result

from fsdp_zpp.bench.results import BETWEEN_NODES, HOST, PEAK, STEP, Column, measured

HSDP = "fsdp2:hybrid_shard"
USUAL = (STEP, AGAINST_FULL_SHARD, PEAK)
WHOLE = (STEP, AGAINST_FSDP2, AGAINST_HSDP, PEAK, HOST, BETWEEN_NODES)
WHOLE_OF_FSDP = (STEP, AGAINST_FULL_SHARD, *WHOLE[2:])
"""Of a run whose FULL_SHARD is FSDP's."""
WHOLE_BESIDE_HSDP = (STEP, *WHOLE[2:])
"""Of a run without FULL_SHARD."""
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
"""Of mixtures of experts, below each other: a further run is a further line."""
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
"""Of one host whose GPUs copy through its memory."""
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
        NO_PEER_TO_PEER | {"mixture of experts, 2.6B, 2 GPUs": "moe-2.6B-2x1-no-p2p"},
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
