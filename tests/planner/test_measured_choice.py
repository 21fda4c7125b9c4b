"""The planner's choice among strategies that were measured is the fastest of them, or within a tenth of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness.benchmarks import BENCHMARKS

from fsdp_zpp import plan
from fsdp_zpp.planner.choice import choose
from fsdp_zpp.planner.model_size import ModelSize, Unit

VOCABULARY, RANK = 32000, 16


def llama(hidden: int, inner: int, layers: int, keys: int, *, adapters: bool) -> ModelSize:
    """A Llama whose layers are units, trained whole or by adapters of rank 16 on q, k, v and o."""
    root = 2 * VOCABULARY * hidden + hidden
    layer = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * inner + 2 * hidden
    if not adapters:
        return ModelSize((Unit(root, reshard_after_forward=False), Unit(layer, count=layers)))
    trained = RANK * (2 * 2 * hidden + 2 * (hidden + keys))
    return ModelSize((Unit(0, root, reshard_after_forward=False), Unit(trained, layer, count=layers)))


def mixture(hidden: int, layers: int, queries: int, keys: int) -> ModelSize:
    """A Qwen3-MoE of 64 experts that are 512 wide, 8 of them for a token."""
    experts = 64 * 3 * hidden * 512
    layer = Unit(2 * hidden * (queries + keys) + 64 * hidden + experts, count=layers, expert_trainable=experts)
    root = Unit(2 * VOCABULARY * hidden, reshard_after_forward=False)
    return ModelSize((root, layer), idle_trainable=layers * experts * 7 // 8)


SIZES = {
    "1.35B": llama(2048, 5504, 24, 2048, adapters=False),
    "6.7B": llama(4096, 11008, 32, 4096, adapters=False),
    "6.7B adapters": llama(4096, 11008, 32, 4096, adapters=True),
    "70B adapters": llama(8192, 28672, 80, 1024, adapters=True),
    "qwen3-moe-2.6B": mixture(1024, 24, 1024, 256),
    "qwen3-moe-2.7B": mixture(2048, 12, 4096, 512),
}
NAMES = {
    "full_shard": "FULL_SHARD",
    "hybrid_shard": "HYBRID_SHARD",
    "zeropp": "zeropp",
    "zeropp-delta": "zeropp Int4Delta",
    "zeropp-IIG": "zeropp IIG",
    "zeropp-delta-IIG": "zeropp IIG Int4Delta",
    "zeropp-GGG": "zeropp GGG",
    "loco": "loco",
    "IGG": "IGG",
    "once-zeropp": "mixzpp",  # wrapped once, as README's mixzpp is
    "once-zeropp-nf4": "mixzpp nf4(64)",
}
"""Rows of a plan by the names of what was measured, under FSDP or FSDP2."""
GPUS = {"NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100"}
# Gbit/s of a GPU, as all-gathers reach them between two of these GPUs of one host.
NVLINK, WITHOUT_PEER_TO_PEER, SOCKETS = 8 * 254, 8 * 24.8, 8 * 2.5


def measured(path: Path) -> dict[str, float]:
    """The fastest step in ms of each planned row: of either adapter, and of repetitions."""
    found: dict[str, float] = {}
    for row in json.loads(path.read_text())["rows"]:
        name = NAMES.get(row["strategy"].removeprefix("fsdp2:"))
        if name is not None and "step_ms" in row:
            found[name] = min(row["step_ms"], found.get(name, row["step_ms"]))
    return found


def is_planned(path: Path) -> bool:
    """Whether several planned rows were measured, each rank on a GPU of its own, whose plan one is."""
    result = json.loads(path.read_text())
    options = result["arguments"]
    own = not options.get("gpus") and options["nodes"] * options["gpus_per_node"] > 1
    own = own and "expert-parallel" not in path.stem  # other strategies for experts, which this plan has not
    return own and result["manifest"]["machine"]["gpu"] in GPUS and len(measured(path)) > 1


def options_of(path: Path) -> tuple[ModelSize, dict[str, Any]]:
    """The model of a result, and the other arguments of its plan."""
    result = json.loads(path.read_text())
    options = result["arguments"]
    size = SIZES[options["size"] + " adapters" * bool(options.get("lora"))]
    between = SOCKETS
    if options.get("fast_network"):
        blocked = (result.get("environment") or {}).get("NCCL_P2P_DISABLE") == "1"
        between = WITHOUT_PEER_TO_PEER if blocked else NVLINK
    return size, {
        "nodes": options["nodes"],
        "gpus_per_node": options["gpus_per_node"],
        "inter_gbps": between * options["gpus_per_node"],
        "intra_gbps": NVLINK,
        "gpu": GPUS[result["manifest"]["machine"]["gpu"]],
        "micro_batches": options["micro_batches"],
        "tokens": options["micro_batch"] * options["sequence"],
    }


RESULTS = [
    path
    for kind in ("1.35B", "6.7B", "moe", "lora")
    for path in sorted((BENCHMARKS / "step/results").glob(f"{kind}-*.json"))
    if is_planned(path)
]


MISSED = {
    "lora-6.7B-2x1-no-p2p": "the CPU binds, and an NF4 base took less time than int8, contrary to lora-6.7B-2x2",
}
"""Results that the plan does not explain, which must not become more."""


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.xfail(reason=MISSED[path.stem], strict=True)])
        if path.stem in MISSED
        else pytest.param(path, id=path.stem)
        for path in RESULTS
    ],
)
def test_the_choice_is_within_a_tenth_of_the_fastest(path: Path) -> None:
    times = measured(path)
    size, options = options_of(path)
    made = plan(size, **options)
    chosen = choose([row for row in made.rows if row.name in times], made.cluster.slow_links)
    assert chosen is not None
    assert times[chosen.name] <= 1.1 * min(times.values()), (chosen.name, times)


def test_there_are_results_of_all_kinds() -> None:
    assert len(RESULTS) >= 20
    stems = " ".join(path.stem for path in RESULTS)
    assert all(kind in stems for kind in ("1.35B-2x2", "moe-2.6B-2x1-no-p2p", "moe-2.7B-2x1-fast", "lora-70B-2x2"))
