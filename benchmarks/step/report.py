"""Tables and figures of steps, from results/, on pages of docs/results, in guides and in README.md.

python benchmarks/step/report.py [--check]
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "common"))

import result_files
import result_pages
from host_time import table_of_sharding
from result_pages import GUIDES, RESULTS_PAGES, ROOT, Figures, Tables, svg_with_origin, with_origin
from tables import (
    GATHERING,
    LORA,
    NO_NVLINK,
    STEP_TIME,
    SUMMARY,
    TRAININGS,
    Comparison,
    Results,
    gathering,
    of_trainings,
    offload,
)

FOLDER = Path(__file__).parent
OFFLOAD = "offload-2x1"
HOST_TIME = {
    "host-time-1.35B-2x1-compiled": "{}",
    "host-time-1.35B-2x2-shared-compiled": "{}, nodes of two",
}
"""Runs of the table of the CPU's time, and what its headings make of a strategy (common/labels.py)."""
BESIDE_PEERS = ("fsdp2:full_shard", "fsdp2:hybrid_shard", "deepspeed-zeropp", "fsdp2:zeropp")
LARGE = ("fsdp2:full_shard", "fsdp2:hybrid_shard", "deepspeed-zeropp", "fsdp2:zeropp", "fsdp2:zeropp-delta")
LORA_MEMORY = ("fsdp2:hybrid_shard", "full_shard", "fsdp2:once-zeropp", "fsdp2:once-zeropp-nf4")
"""Strategies in figures, in their order: bars that say the same would hide those that differ."""
FIGURES = {
    "step-time.svg": ("step_time", "1.35B-2x2-eager", BESIDE_PEERS),
    "step-time-6.7B.svg": ("step_time", "6.7B-2x2", LARGE),
    "lora-memory.svg": ("memory", "lora-6.7B-2x2", LORA_MEMORY),
}
"""Functions of figures.py, the results that they draw, and what else they are given."""


def compared(results: Results, comparisons: dict[str, Comparison], brief: bool = False) -> dict[str, str]:
    """Return the tables of runs side by side."""
    return {
        name: with_origin(one.markdown(results), "step", results, one.files, brief) for name, one in comparisons.items()
    }


def pages(results: Results) -> dict[Path, Tables]:
    """Return all tables, by page and name."""
    step_time = compared(results, STEP_TIME, brief=True)
    rows = [
        row | {"strategy": heading.format(row["strategy"])}
        for name, heading in HOST_TIME.items()
        for row in results[name]["rows"]
    ]
    step_time["host-time"] = with_origin(table_of_sharding(rows), "step", results, HOST_TIME, brief=True)
    offloaded = with_origin(offload(results[OFFLOAD]["rows"]), "step", results, [OFFLOAD])
    return {
        RESULTS_PAGES / "step-time.md": {"summary": of_trainings(SUMMARY, results, peaks=True)},
        RESULTS_PAGES / "step-time-tables.md": step_time,
        RESULTS_PAGES / "lora.md": compared(results, LORA, brief=True),
        GUIDES / "accumulation.md": {"offload": offloaded},
        GUIDES / "weights-for-rl.md": {
            "gathering": with_origin(gathering(results), "step", results, GATHERING, brief=True)
        },
        GUIDES / "one-machine-without-nvlink.md": compared(results, NO_NVLINK, brief=True),
        ROOT / "README.md": {"first-page": of_trainings(TRAININGS, results)},
    }


def draw(name: str, results: Results) -> str:
    """Return a figure's SVG."""
    import figures  # tables need no matplotlib

    function, run, *given = FIGURES[name]
    return svg_with_origin(getattr(figures, function)(results[run], *given), "step", results, [run])


def drawings(results: Results) -> Figures:
    """Return the functions that draw the figures."""
    return {name: partial(draw, name, results) for name in FIGURES}


if __name__ == "__main__":
    read = result_files.read(FOLDER / "results")
    result_pages.main(__doc__, pages(read), drawings(read))
