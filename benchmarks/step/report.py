"""Tables and figures of steps, from results/, on pages of docs/results, in guides, in recipes.md and in README.md.

python benchmarks/step/report.py [--check]
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "common"))

import result_files
import result_pages
from result_pages import GUIDES, RESULTS_PAGES, ROOT, Figures, Tables, svg_with_origin, with_origin
from tables import (
    GATHERING,
    LORA,
    NO_NVLINK,
    ONE_NODE_FIRST,
    RECIPES,
    STEP_TIME,
    Comparison,
    Results,
    beside_one_node,
    cpu,
    first_page,
    gathering,
    hops,
    offload,
    planned,
)

FOLDER = Path(__file__).parent
CHUNK_SIZES = {"128 KiB (default)": "hops-2x2-128KiB", "512 KiB": "hops-2x2-512KiB", "1 MiB": "hops-2x2-1024KiB"}
SINGLE = {
    "cpu": (cpu, "cpu-1.35B-2x2"),
    "planned": (planned, "planned-1.35B-2x2"),
}
OFFLOAD = "offload-2x1"
BESIDE_PEERS = (
    "fsdp2:full_shard",
    "fsdp2:hybrid_shard",
    "deepspeed-zeropp",
    "megatron-hfsdp",
    "zeropp",
    "fsdp2:zeropp",
    "zeropp-delta",
    "fsdp2:zeropp-delta",
)
"""Strategies in the figure on the first page, in its order."""
FIGURES = {
    "step-time.svg": ("step_time", "1.35B-2x2-eager", BESIDE_PEERS),
    "step-time-6.7B.svg": ("step_time", "6.7B-2x2"),
    "lora-memory.svg": ("memory", "lora-6.7B-2x2"),
    "step-trace.svg": ("trace", "trace-1.35B-2x2-shared"),
}
"""Functions of figures.py, the results that they draw, and what else they are given."""


def compared(results: Results, comparisons: dict[str, Comparison]) -> dict[str, str]:
    """Return the tables of runs side by side."""
    return {name: with_origin(one.markdown(results), "step", results, one.files) for name, one in comparisons.items()}


def pages(results: Results) -> dict[Path, Tables]:
    """Return all tables, by page and name."""
    step_time = compared(results, STEP_TIME)
    sizes = {label: results[name] for label, name in CHUNK_SIZES.items()}
    step_time["hops"] = with_origin(hops(sizes, "between nodes", least=6), "step", results, CHUNK_SIZES.values())
    for table, (make, name) in SINGLE.items():
        step_time[table] = with_origin(make(results[name]["rows"]), "step", results, [name])
    both = (name for pair in ONE_NODE_FIRST.values() for name in pair)
    step_time["one-node-of-four"] = with_origin(beside_one_node(results), "step", results, both)
    offloaded = with_origin(offload(results[OFFLOAD]["rows"]), "step", results, [OFFLOAD])
    return {
        RESULTS_PAGES / "step-time.md": step_time,
        RESULTS_PAGES / "lora.md": compared(results, LORA),
        GUIDES / "accumulation.md": {"offload": offloaded},
        GUIDES / "weights-for-rl.md": {"gathering": with_origin(gathering(results), "step", results, GATHERING)},
        GUIDES / "one-machine-without-nvlink.md": compared(results, NO_NVLINK),
        ROOT / "docs" / "recipes.md": compared(results, RECIPES),
        ROOT / "README.md": {"first-page": first_page(results)},
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
