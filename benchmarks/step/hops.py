"""How fast each hop's collective is by itself, between emulated nodes and inside them, by what a rank sends.

    python benchmarks/step/hops.py --nodes 2 --gpus-per-node 2 --mib 1,6.5,26
    NCCL_P2P_NET_CHUNKSIZE=131072 python benchmarks/step/hops.py

Weights are gathered, gradients go to all, which NCCL makes of sends and receives that it cuts smaller. Where the second
is slower between nodes, a larger ``NCCL_P2P_NET_CHUNKSIZE`` may help; nodes.py sets it, unless it is set.
Prints a Markdown table of median milliseconds, and GB/s that a rank sends, and writes the result (hops.json) to
``--out``. Under torchrun on real nodes, start it with ``--worker`` instead.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "common"))

import nodes
import result_files
import single_runs
import torch
import torch.distributed as dist
from manifest import manifest

from fsdp_zpp.collectives.hops import Hop, Kind, Level, Traffic, hop_over
from fsdp_zpp.collectives.mesh import process_mesh

WARMUP = 3
IN_A_ROW = 10
"""Ranks don't leave a barrier together, which should count for little."""


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    nodes.add_layout(parser)
    parser.add_argument("--mib", default="1,6.5,26", help="MiB that a rank sends to others, several by commas")
    parser.add_argument("--repetitions", type=int, default=10, help=f"of {IN_A_ROW} collectives in a row")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is for trying it out")
    parser.add_argument("--out", type=Path, default=Path("runs/hops"), help="folder for hops.json")
    return parser.parse_args()


def milliseconds(collective: Callable[[], Any], device: str, repetitions: int) -> float:
    """The median time of a collective, on the slowest rank, when some run in a row."""
    times = torch.empty(repetitions, dtype=torch.float64, device=device)
    for repetition in range(-WARMUP, repetitions):
        dist.barrier()
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(IN_A_ROW):
            collective()
        if device == "cuda":
            torch.cuda.synchronize()
        if repetition >= 0:
            times[repetition] = (time.perf_counter() - began) * 1e3 / IN_A_ROW
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return statistics.median(times.tolist())


def measured(hop: Hop, mib: float, device: str, repetitions: int) -> tuple[float, float]:
    """Milliseconds of a hop by which every rank sends so many MiB, and the GB/s that makes of them."""
    sent = int(mib * 2**20)
    part = sent // (hop.size - 1)
    if hop.kind == "gather":
        payload = torch.zeros((1, part), dtype=torch.uint8, device=device)
        ms = milliseconds(lambda: hop.all_gather(payload, "hop"), device, repetitions)
    else:
        payload = torch.zeros((hop.size, part), dtype=torch.uint8, device=device)
        ms = milliseconds(lambda: hop.all_to_all(payload, "hop"), device, repetitions)
    return ms, sent / ms / 1e6


def work(arguments: argparse.Namespace) -> None:
    """One rank: measure all hops in turn; rank 0 prints the table and writes the result."""
    assert dist.group.WORLD is not None
    mesh = process_mesh(dist.group.WORLD, arguments.gpus_per_node)
    kinds: tuple[tuple[Kind, str], ...] = (("gather", "all-gather"), ("reduce", "all-to-all"))
    levels: tuple[tuple[Level, str, dist.ProcessGroup | None], ...] = (
        ("inter", "between nodes", mesh.inter),
        ("intra", "inside a node", mesh.intra),
    )
    rows: list[dict[str, Any]] = []
    for level, where, group in levels:
        for kind, name in kinds:
            hop = hop_over(group, kind, level, Traffic())
            for mib in map(float, arguments.mib.split(",")) if hop is not None else ():
                ms, gb_per_s = measured(hop, mib, arguments.device, arguments.repetitions)
                rows.append({"hop": where, "collective": name, "mib": mib, "ms": ms, "gb_per_s": gb_per_s})
    if dist.get_rank() == 0:
        made_by, variables = manifest(nodes.command()), nodes.environment()
        result_files.write(arguments.out / "hops.json", made_by, arguments, rows, environment=variables)
        print(single_runs.hops({"this run": {"rows": rows}}))


if __name__ == "__main__":
    nodes.start(parse(), work)
