"""Tables of steps in README.md, from results/.

python benchmarks/step/report.py [--check]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "common"))

import readme_tables
import result_files
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
    Row,
    share,
)
from single_runs import cpu, hop_settings, hops, kernels, planned

FOLDER = Path(__file__).parent
HSDP, MEGATRON = "fsdp2:hybrid_shard", "megatron-hfsdp"
Results = dict[str, result_files.Result]


@dataclass(frozen=True)
class Comparison:
    """Runs side by side, a line a strategy.

    Attributes:
        runs: What a heading calls each run, and its result.
        columns: What is shown of each.
        only: The strategies that are shown; by default, all.
    """

    runs: dict[str, str]
    columns: tuple[Column, ...]
    only: tuple[str, ...] = ()

    def markdown(self, results: Results) -> str:
        """The table."""
        lines: dict[str, dict[str, list[str]]] = {}
        for run in self.runs.values():
            rows = results[run]["rows"]
            for name, row in self._named(rows):
                lines.setdefault(name, {})[run] = [column.cell(row, rows) for column in self.columns]
        headings = [
            f"{label}: {column.heading}" if label else column.heading for label in self.runs for column in self.columns
        ]
        blank = [""] * len(self.columns)
        cells = (
            [name, *(text for run in self.runs.values() for text in by_run.get(run, blank))]
            for name, by_run in lines.items()
        )
        return readme_tables.markdown(["strategy", *headings], cells)

    def _named(self, rows: list[Row]) -> list[tuple[str, Row]]:
        """The rows that are shown; a strategy's second row is called ``again``."""
        seen: set[str] = set()
        named = []
        for row in rows:
            name = row["strategy"]
            if not self.only or name in self.only:
                named.append((f"{name} again" if name in seen else name, row))
                seen.add(name)
        return named


USUAL = (STEP, AGAINST_FULL_SHARD, PEAK)
DELTAS = ("zeropp-delta", "fsdp2:zeropp-delta")
COMPARISONS = {
    "step-time": Comparison({"C, eager": "1.35B-2x2-eager", "D, compiled": "1.35B-2x2-compiled"}, USUAL),
    "earlier": Comparison({"A": "1.35B-2x2-earlier-on-A", "B": "1.35B-2x2-earlier-on-B"}, USUAL),
    "one-node": Comparison({"1.35B": "1.35B-1x4", "6.7B": "6.7B-1x4", "6.7B, LoRA": "lora-6.7B-1x4"}, (STEP,)),
    "without-codecs": Comparison({"": "1.35B-2x2-first-version"}, USUAL),
    "chunks": Comparison(
        {
            "two ranks on a GPU, 128 KiB": "1.35B-2x1-shared-128KiB-chunks",
            "512 KiB": "1.35B-2x1-shared-512KiB-chunks",
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
    "four-micro-batches": Comparison(
        {"C, eager": "1.35B-2x2-four-micro-batches-eager", "D, compiled": "1.35B-2x2-four-micro-batches-compiled"},
        USUAL,
    ),
    "four-micro-batches-delta": Comparison(
        {"": "1.35B-2x2-four-micro-batches-delta"},
        (
            STEP,
            share(HSDP, "step_ms", "of FSDP2 HSDP's time"),
            share(MEGATRON, "step_ms", "of Megatron-FSDP's"),
            HOST,
            PEAK,
            share(HSDP, "peak_gib", "of HSDP's peak", "{:.0%}"),
            share(MEGATRON, "peak_gib", "of Megatron-FSDP's", "{:.0%}"),
        ),
    ),
    "four-micro-batches-earlier": Comparison({"": "1.35B-2x2-four-micro-batches-earlier-on-A"}, USUAL),
    "large": Comparison({"": "6.7B-2x2"}, (*USUAL, BETWEEN_NODES)),
    "nodes-of-one": Comparison({"": "1.35B-2x1"}, (*USUAL, EXPOSED)),
    "nodes-of-one-shared": Comparison(
        {
            "micro-batch of 2": "1.35B-2x1-shared-micro-batch-2",
            "of 8": "1.35B-2x1-shared-micro-batch-8",
            "of 8, one rank alone": "1.35B-1x1-micro-batch-8",
        },
        (STEP, HOST, PEAK),
    ),
    "slow-links": Comparison(
        {
            "one rank alone": "1.35B-1x1-free-running",
            "10 Gbit/s": "1.35B-2x1-shared-10-gbps",
            "1 Gbit/s": "1.35B-2x1-shared-1-gbps",
            "1 Gbit/s, HSDP's first step": "1.35B-2x1-shared-1-gbps-hsdp",
            "1 Gbit/s, FULL_SHARD's first step": "1.35B-2x1-shared-1-gbps-full-shard",
        },
        (STEP, PEAK),
    ),
    "shared": Comparison(
        {f"{machine} machine": f"1.35B-2x2-shared-{machine}" for machine in ("first", "second", "third")},
        (STEP, AGAINST_FULL_SHARD),
    ),
    "shared-batches": Comparison(
        {
            "micro-batch of 1": "1.35B-2x2-shared-micro-batch-1",
            "four micro-batches of 2": "1.35B-2x2-shared-four-micro-batches",
        },
        (STEP, PEAK),
    ),
    "fast": Comparison(
        {"": "1.35B-2x1-fast", "a slower machine, later": "1.35B-2x1-fast-slower-machine"}, (STEP, PAIRED)
    ),
    "one-node-in-turn": Comparison({"": "1.35B-1x2-in-turn"}, (STEP, PAIRED)),
    "loco-fast": Comparison({"": "1.35B-2x1-fast-loco"}, (STEP, PAIRED)),
    "loco": Comparison({"": "1.35B-2x2-loco"}, (STEP, PEAK)),
    "lora": Comparison({"": "lora-6.7B-2x2"}, (*USUAL, share(HSDP, "peak_gib", "of HSDP's peak", "{:.0%}"))),
    "lora-in-turn": Comparison(
        {
            "two nodes of 2": "lora-6.7B-2x2-in-turn",
            "two nodes of 2 that share GPUs": "lora-6.7B-2x2-shared-in-turn",
            "two nodes of 1": "lora-6.7B-2x1-in-turn",
        },
        (STEP, PAIRED),
    ),
    "lora-one-node": Comparison({"": "lora-6.7B-1x2-in-turn"}, (STEP, PAIRED)),
    "lora-70B": Comparison(
        {"two nodes of 2": "lora-70B-2x2", "one node of 2": "lora-70B-1x2"}, (STEP, PEAK, GENERATED)
    ),
    "lora-nodes-of-one": Comparison({"": "lora-6.7B-2x1"}, (STEP, PEAK, GENERATED)),
    "lora-shared": Comparison(
        {"one machine": "lora-6.7B-2x2-shared-first", "another": "lora-6.7B-2x2-shared-second"}, (STEP, PEAK)
    ),
}
CHUNK_SIZES = {"128 KiB, NCCL's default": "hops-2x2-128KiB", "512 KiB": "hops-2x2-512KiB", "1 MiB": "hops-2x2-1024KiB"}


def tables() -> dict[str, str]:
    """All tables of README.md by name, each with the files that it is from."""
    results = result_files.read(FOLDER / "results")
    made = {name: (one.markdown(results), list(one.runs.values())) for name, one in COMPARISONS.items()}
    made["hops"] = hops({label: results[name] for label, name in CHUNK_SIZES.items()}), list(CHUNK_SIZES.values())
    single = {
        "hop-settings": (hop_settings, "hops-2x1-shared"),
        "cpu": (cpu, "cpu-1.35B-2x2"),
        "kernels": (kernels, "kernels-1.35B-2x2"),
        "planned": (planned, "planned-1.35B-2x2"),
    }
    made |= {table: (make(results[name]["rows"]), [name]) for table, (make, name) in single.items()}
    return {name: f"{table}\n\n{readme_tables.provenance(results, runs)}" for name, (table, runs) in made.items()}


if __name__ == "__main__":
    readme_tables.main(__doc__, FOLDER / "README.md", tables())
