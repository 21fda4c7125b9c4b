"""Speed of each hop's collective by itself, between emulated nodes and inside them, by the bytes that a rank sends.

    python benchmarks/step/hops.py --nodes 2 --gpus-per-node 2 --mib 1,6.5,26
    NCCL_P2P_NET_CHUNKSIZE=131072 python benchmarks/step/hops.py

Weights are gathered, gradients go to all, which NCCL makes of sends and receives that it cuts smaller. Where the second
is slower between nodes, a larger ``NCCL_P2P_NET_CHUNKSIZE`` may help; nodes.py sets it, unless it is set. Prints a
Markdown table of median milliseconds, and GB/s that a rank sends, and writes the result (hops.json) to ``--out``. Under
torchrun on real nodes, start it with ``--worker`` instead.
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
import tables
import torch
import torch.distributed as dist
from manifest import manifest

from fsdp_zpp.bench.results import write
from fsdp_zpp.comm.hops import Hop, Kind, Level, Traffic, hop_over
from fsdp_zpp.comm.mesh import process_mesh

WARMUP = 3
IN_A_ROW = 10
"""Collectives timed together: ranks do not leave a barrier at once, which should count for little."""
KINDS: dict[Kind, str] = {"gather": "all-gather", "reduce": "all-to-all"}
LEVELS: dict[Level, str] = {"inter": "between nodes", "intra": "inside a node"}


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    nodes.add_layout(parser)
    nodes.add_throttle(parser)
    parser.add_argument("--mib", default="1,6.5,26", help="MiB that a rank sends to others, several by commas")
    parser.add_argument("--repetitions", type=int, default=10, help=f"of {IN_A_ROW} collectives in a row")
    parser.add_argument("--out", type=Path, default=Path("runs/hops"), help="folder for hops.json")
    return parser.parse_args()


def milliseconds(collective: Callable[[], Any], device: str, repetitions: int) -> float:
    """Return the median time of a collective among several in a row, on the slowest rank. Collective."""
    times = torch.empty(repetitions, dtype=torch.float64, device=device)
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    for repetition in range(-WARMUP, repetitions):
        dist.barrier()
        synchronize()
        start = time.perf_counter()
        for _ in range(IN_A_ROW):
            collective()
        synchronize()
        if repetition >= 0:
            times[repetition] = (time.perf_counter() - start) * 1e3 / IN_A_ROW
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return statistics.median(times.tolist())


def timed(hop: Hop, mib: float, device: str, repetitions: int) -> dict[str, float]:
    """Time a hop in which every rank sends ``mib`` MiB, and return its GB/s with it. Collective."""
    sent = int(mib * 2**20)
    rows, send = (1, hop.all_gather) if hop.kind == "gather" else (hop.size, hop.all_to_all)
    payload = torch.zeros((rows, sent // (hop.size - 1)), dtype=torch.uint8, device=device)
    ms = milliseconds(lambda: send(payload, "hop"), device, repetitions)
    return {"mib": mib, "ms": ms, "gb_per_s": sent / ms / 1e6}


def work(arguments: argparse.Namespace) -> None:
    """Measure all hops in turn as one rank; rank 0 prints the table and writes the result."""
    assert dist.group.WORLD is not None
    mesh = process_mesh(dist.group.WORLD, arguments.gpus_per_node)
    rows: list[dict[str, Any]] = []
    for level, where in LEVELS.items():
        for kind, name in KINDS.items():
            hop = hop_over(getattr(mesh, level), kind, level, Traffic())
            for mib in map(float, arguments.mib.split(",")) if hop is not None else ():
                figures = timed(hop, mib, arguments.device, arguments.repetitions)
                rows.append({"hop": where, "collective": name, **figures})
    if dist.get_rank() == 0:
        made_by, variables = manifest(nodes.command()), nodes.environment()
        write(arguments.out / "hops.json", made_by, arguments, rows, environment=variables)
        for where in LEVELS.values():
            print(where, tables.hops({"this run": {"rows": rows}}, where), "", sep="\n")


if __name__ == "__main__":
    nodes.start(parse(), work)
