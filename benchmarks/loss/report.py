"""Table and figure of losses, from results/: docs/results/loss.md, and the table of docs/design/codecs.md.

python benchmarks/loss/report.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "common"))

import result_pages
import tables
from markdown_tables import markdown
from result_files import Result, read
from result_pages import RESULTS_PAGES, Figures, svg_with_origin, with_origin

RESULTS = Path(__file__).parent / "results"
DESIGN = result_pages.ROOT / "docs" / "design"
ERROR_BARS = "error-bars-*"
SECOND_TEXT = "second-text-h200"
EIGHT_NODES = "eight-nodes-h200"
LARGER = "larger-model-h200"
ZEROPP = {"w8:int4": "zeropp"}
DELTAS = {"d4:int4": "zeropp with Int4Delta", "d2:int4": "zeropp with Int2Delta"}
THREE_BITS = {"w8:int3": "zeropp with Int3"}
LOCAL = "local32:int4+loco:momentum-auto"
SHOWN: dict[str, tuple[str, dict[str, str]]] = {
    ERROR_BARS: ("full_shard", ZEROPP),
    SECOND_TEXT: ("full_shard", DELTAS),
    EIGHT_NODES: ("full_shard", ZEROPP | DELTAS),
    LARGER: ("full_shard", ZEROPP | THREE_BITS),
    "convergence-2x1-h200": (
        "full_shard",
        {
            "w8:full_shard": "weights in int8(256)",
            "int8": "gradients in int8(128)",
            "int4": "gradients in int4(128)",
            "int4+loco": "gradients in int4(128), LoCo",
            "int2": "gradients in 2 bits",
            "int2+loco": "the same, LoCo",
        },
    ),
    "convergence-2x2-h200": (
        "full_shard",
        {"int4c": "gradients in int4(2048) between nodes", "int4c+loco": "the same, LoCo"},
    ),
    "local-steps-*": (
        "full_shard",
        {
            LOCAL: "local steps, every=32",
            f"{LOCAL}:start256": "local steps, 8 % synchronous",
            f"{LOCAL}:start512": "local steps, 17 % synchronous",
            f"{LOCAL}:start768": "local steps, 25 % synchronous",
            "local32:topk+loco:start256": "local steps, TopK, 8 % synchronous",
        },
    ),
    "diloco-scaling-*": ("synchronous", {"local30:none:at-once:outer0.6": "DiLoCo's recipe, every=30"}),
    "muon-2x2-h200": (
        "muon:unsharded",
        {"muon:III": "Muon under III, no codecs", "muon:zeropp": "Muon under zeropp"},
    ),
    "lora-h200": (
        tables.LORA_REFERENCE,
        {"int8": "LoRA with zeropp, base in int8(256)", "nf4": "LoRA with zeropp, base in NF4"},
    ),
}
"""Studies, each with its reference and with what is said of its configurations that are shown."""
REPEATS = "repeats-h200"
"""Runs of the reference of ``eight-nodes-h200`` with the same seeds again."""
REAL_RANKS = "real-ranks-h200"
"""A run of ``larger-model-h200`` on two GPUs, in place of simulated nodes."""
LLAMA = tuple(f"compare-h200-zeropp-seed{seed}" for seed in range(3))
HEAD = ("parameters, bytes", "nodes x GPUs", "what is sent", "seeds", "above full precision, %")

ENTROPY_HEAD = (
    "sent",
    "step",
    "bits a code",
    "saved by an ideal coder",
    "by zlib",
    "by LZMA",
    "bytes of scales",
    "error",
    "with bf16 scales",
)


def results_of(study: str) -> dict[str, Result]:
    """Return a study's results; DiLoCo's recipe was also tried on half of the data, which is not shown."""
    results = read(RESULTS, study)
    most = max(result["arguments"].get("tokens", 0) for result in results.values())
    return {name: result for name, result in results.items() if result["arguments"].get("tokens", 0) == most}


def table() -> str:
    """Return the page's table, and under it where it is from."""
    rows: list[tuple[str, ...]] = []
    used: dict[str, Result] = {}
    for study, (reference, shown) in SHOWN.items():
        results = results_of(study)
        rows += tables.gap_rows(list(results.values()), shown, reference)
        used |= results
    again, real = results_of(REPEATS), results_of(REAL_RANKS)
    once = [*results_of(EIGHT_NODES).values(), *_renamed(again, REPEATS)]
    rows += tables.gap_rows(once, {REPEATS: "eight nodes' full precision, the same seeds again"})
    above_them = {name: f"{words}, above these" for name, words in (ZEROPP | DELTAS).items()}
    rows += tables.gap_rows(once, above_them, REPEATS)
    larger = results_of(LARGER)
    (zeropp,) = ZEROPP
    beside = [*larger.values(), *_renamed(real, REAL_RANKS)]
    rows += tables.gap_rows(beside, {REAL_RANKS: "zeropp on two GPUs, above the simulated reference"})
    above_zeropp = {name: f"{words}, above zeropp" for name, words in THREE_BITS.items()}
    rows += tables.gap_rows(beside, above_zeropp, zeropp)
    used |= again | real
    llama = {name: read(RESULTS, "compare-h200")[name] for name in LLAMA}
    rows += tables.compared_rows(list(llama.values()), "zeropp, a Llama, 300 steps")
    return with_origin(markdown(HEAD, rows), "loss", used | llama, brief=True)


def _renamed(results: dict[str, Result], name: str) -> list[Result]:
    """Return one-row results under another name."""
    return [result | {"rows": [result["rows"][0] | {"name": name}]} for result in results.values()]


def entropy_table() -> str:
    """Return the table of what a lossless stage could save."""
    results = read(RESULTS, "entropy-cpu")
    return with_origin(markdown(ENTROPY_HEAD, tables.entropy_rows(list(results.values()))), "loss", results)


def draw() -> str:
    """Return the SVG of the gap during training."""
    import figures  # tables need no matplotlib

    studies = {ERROR_BARS: ZEROPP, SECOND_TEXT: DELTAS}
    results = {study: results_of(study) for study in studies}
    drawn = figures.error_bars_svg([(list(results[study].values()), shown) for study, shown in studies.items()])
    return svg_with_origin(drawn, "loss", results[ERROR_BARS] | results[SECOND_TEXT])


FIGURES: Figures = {"loss.svg": draw}


if __name__ == "__main__":
    pages = {RESULTS_PAGES / "loss.md": {"gaps": table()}, DESIGN / "codecs.md": {"entropy": entropy_table()}}
    result_pages.main(__doc__, pages, FIGURES)
