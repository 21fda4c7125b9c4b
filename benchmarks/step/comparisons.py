"""Runs that the tables of steps show side by side, and the columns of each."""

from __future__ import annotations

from dataclasses import dataclass

from columns import (
    AGAINST_FULL_SHARD,
    BETWEEN_NODES,
    EXPOSED,
    GENERATED,
    HOST,
    PAIRED,
    PEAK,
    STEP,
    Column,
    share,
)
from labels import label
from markdown_tables import markdown
from result_files import Result, Row

HSDP, MEGATRON = "fsdp2:hybrid_shard", "megatron-hfsdp"
USUAL = (STEP, AGAINST_FULL_SHARD, PEAK)
DELTAS = ("zeropp-delta", "fsdp2:zeropp-delta")
Results = dict[str, Result]


@dataclass(frozen=True)
class Comparison:
    """Runs beside each other, a line a strategy; or, with a heading for what tells them apart, below each other.

    Attributes:
        runs: Results by their labels on the page.
        columns: Columns of each run.
        only: Strategies that are shown; by default, all.
        below: Heading over the labels of the runs, if they are below each other.
    """

    runs: dict[str, str]
    columns: tuple[Column, ...]
    only: tuple[str, ...] = ()
    below: str = ""

    def markdown(self, results: Results) -> str:
        """Return the table."""
        return self._one_below_another(results) if self.below else self._side_by_side(results)

    def _side_by_side(self, results: Results) -> str:
        lines: dict[str, dict[str, list[str]]] = {}
        for run in self.runs.values():
            rows = results[run]["rows"]
            for name, row in self._named(rows):
                lines.setdefault(name, {})[run] = [column.cell(row, rows) for column in self.columns]
        headings = [
            f"{run}: {column.heading}" if run else column.heading for run in self.runs for column in self.columns
        ]
        blank = [""] * len(self.columns)
        cells = (
            [label(name), *(text for run in self.runs.values() for text in by_run.get(run, blank))]
            for name, by_run in lines.items()
        )
        return markdown(["strategy", *headings], cells)

    def _one_below_another(self, results: Results) -> str:
        lines = [
            [called, label(name), *(column.cell(row, results[run]["rows"]) for column in self.columns)]
            for called, run in self.runs.items()
            for name, row in self._named(results[run]["rows"])
        ]
        return markdown([self.below, "strategy", *(column.heading for column in self.columns)], lines)

    def _named(self, rows: list[Row]) -> list[tuple[str, Row]]:
        """Return the rows that are shown; a strategy's second row is named ``again``."""
        seen: set[str] = set()
        named = []
        for row in rows:
            name = row["strategy"]
            if not self.only or name in self.only:
                named.append((f"{name} again" if name in seen else name, row))
                seen.add(name)
        return named


def one(run: str, *columns: Column) -> Comparison:
    """Compare the strategies of one run."""
    return Comparison({"": run}, columns)


SHARED = {f"{machine} machine": f"1.35B-2x2-shared-{machine}" for machine in ("first", "second", "third")}
IN_TURN = {
    "two nodes of 2": "lora-6.7B-2x2-in-turn",
    "two nodes of 2 that share GPUs": "lora-6.7B-2x2-shared-in-turn",
    "two nodes of 1": "lora-6.7B-2x1-in-turn",
}
FOUR = "1.35B-2x2-four-micro-batches"
STEP_TIME = {
    "eager": one("1.35B-2x2-eager", *USUAL),
    "compiled": one("1.35B-2x2-compiled", *USUAL),
    "large": one("6.7B-2x2", *USUAL, BETWEEN_NODES),
    "four-micro-batches-eager": one(f"{FOUR}-eager", *USUAL),
    "four-micro-batches-compiled": one(f"{FOUR}-compiled", *USUAL),
    "four-micro-batches-delta": one(
        f"{FOUR}-delta",
        STEP,
        share(HSDP, "step_ms", "of FSDP2 HSDP's time"),
        share(MEGATRON, "step_ms", "of Megatron-FSDP's"),
        HOST,
    ),
    "four-micro-batches-delta-memory": one(
        f"{FOUR}-delta",
        PEAK,
        share(HSDP, "peak_gib", "of FSDP2 HSDP's peak", "{:.0%}"),
        share(MEGATRON, "peak_gib", "of Megatron-FSDP's", "{:.0%}"),
    ),
    "four-micro-batches-earlier": one(f"{FOUR}-earlier-on-A", *USUAL),
    "earlier-on-A": one("1.35B-2x2-earlier-on-A", *USUAL),
    "earlier-on-B": one("1.35B-2x2-earlier-on-B", *USUAL),
    "one-node": Comparison({"1.35B": "1.35B-1x4", "6.7B": "6.7B-1x4", "6.7B, LoRA": "lora-6.7B-1x4"}, (STEP,)),
    "one-node-in-turn": one("1.35B-1x2-in-turn", STEP, PAIRED),
    "fast": Comparison(
        {"first machine": "1.35B-2x1-fast", "slower machine": "1.35B-2x1-fast-slower-machine"},
        (STEP, PAIRED),
        below="measured on",
    ),
    "without-codecs": one("1.35B-2x2-first-version", *USUAL),
    "nodes-of-one": one("1.35B-2x1", *USUAL, EXPOSED),
    "nodes-of-one-shared": Comparison(
        {
            "2": "1.35B-2x1-shared-micro-batch-2",
            "2, launch queues 4x": "1.35B-2x1-shared-micro-batch-2-deep-queues",
            "8": "1.35B-2x1-shared-micro-batch-8",
            "8, one rank alone": "1.35B-1x1-micro-batch-8",
            "8, again": "1.35B-2x1-shared-micro-batch-8-again",
            "8, one rank alone, again": "1.35B-1x1-micro-batch-8-again",
        },
        (STEP, HOST, PEAK),
        only=(HSDP, *DELTAS, "fsdp2:full_shard"),
        below="micro-batch",
    ),
    "nodes-of-one-h100": Comparison(
        {
            "one node of two": "1.35B-1x2-h100",
            "two nodes of one": "1.35B-2x1-h100",
            "one node of two, again": "1.35B-1x2-h100-again",
        },
        (STEP, HOST, PEAK),
        below="layout",
    ),
    "slow-links": Comparison(
        {
            "none: one rank alone": "1.35B-1x1-free-running",
            "10 Gbit/s": "1.35B-2x1-shared-10-gbps",
            "none: one rank alone, first day": "1.35B-1x1-free-running-first",
            "1 Gbit/s": "1.35B-2x1-shared-1-gbps",
            "1 Gbit/s, HSDP's first step": "1.35B-2x1-shared-1-gbps-hsdp",
            "1 Gbit/s, FULL_SHARD's first step": "1.35B-2x1-shared-1-gbps-full-shard",
        },
        (STEP, PEAK, BETWEEN_NODES),
        below="link",
    ),
    "shared": Comparison(SHARED, (STEP,)),
    "shared-speedup": Comparison(SHARED, (AGAINST_FULL_SHARD,)),
    "shared-batches": Comparison(
        {
            "1": "1.35B-2x2-shared-micro-batch-1",
            "4 x 2": "1.35B-2x2-shared-four-micro-batches",
        },
        (STEP, PEAK),
        below="micro-batches",
    ),
    "loco-fast": one("1.35B-2x1-fast-loco", STEP, PAIRED),
    "loco": one("1.35B-2x2-loco", STEP, PEAK),
    "chunks": Comparison(
        {
            "shared GPU, 128 KiB": "1.35B-2x1-shared-128KiB-chunks",
            "shared GPU, 512 KiB": "1.35B-2x1-shared-512KiB-chunks",
            "C, 128 KiB": "1.35B-2x2-128KiB-chunks",
            "C, 512 KiB": "1.35B-2x2-eager",
        },
        (STEP,),
        DELTAS,
    ),
    "connections": Comparison({"8 connections": "1.35B-2x2-8-connections", "32": "1.35B-2x2-32-connections"}, (STEP,)),
    "shared-connections": Comparison(
        {"8 connections": "1.35B-2x2-shared-default-connections", "32": "1.35B-2x2-shared-first"},
        (STEP,),
        ("zeropp", *DELTAS),
    ),
}
LORA = {
    "lora": one("lora-6.7B-2x2", *USUAL, share(HSDP, "peak_gib", "of HSDP's peak", "{:.0%}")),
    "lora-in-turn": Comparison(IN_TURN, (PAIRED,)),
    "lora-in-turn-steps": Comparison(IN_TURN, (STEP,)),
    "lora-70B": Comparison(
        {"two of 2": "lora-70B-2x2", "one of 2": "lora-70B-1x2"}, (STEP, PEAK, GENERATED), below="nodes"
    ),
    "lora-nodes-of-one": one("lora-6.7B-2x1", STEP, PEAK, GENERATED),
    "lora-shared": Comparison(
        {"first machine": "lora-6.7B-2x2-shared-first", "second machine": "lora-6.7B-2x2-shared-second"},
        (STEP, PEAK),
    ),
    "lora-one-node": one("lora-6.7B-1x2-in-turn", STEP, PAIRED),
    "lora-nvlink": one("lora-6.7B-1x4", STEP),
}
"""By the names of the tables in docs/results/step-time.md and lora.md."""
