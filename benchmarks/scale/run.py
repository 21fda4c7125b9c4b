"""CPU time, collectives and process groups of a step as the world grows, up to a thousand ranks and more, on one CPU.

    python benchmarks/scale/run.py --worlds 16,64,256,1024

One rank runs in torch's fake process group, whose collectives send nothing, so its time is the CPU's part of a step on
every rank. A unit has the same number of values on every world, and they divide evenly, so the work on tensors is the
same. Codecs (on GPUs, kernel launches; here, the PyTorch reference) and collectives (here, copies that the fake group
makes for every rank) are timed apart: the rest is Python's and torch's own time around them. Calls of functions are
counted, too, which a busy machine does not change. Each case has a process of its own. Prints Markdown tables and
writes the result (scale.json) to ``--out``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "common"))

from case import STRATEGIES, measure
from manifest import manifest
from report import by_world

from fsdp_zpp.bench.results import write


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="16,64,256,1024", help="numbers of ranks that divide 1024")
    parser.add_argument("--adapters", default="fsdp1,fsdp2")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--steps", type=int, default=20, help="timed steps, after --warmup others and the first")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/scale"), help="folder for scale.json")
    return parser.parse_args()


def main() -> None:
    """Measure, print tables and write the result."""
    arguments = parse()
    made_by = manifest()
    counts = (arguments.gpus_per_node, arguments.blocks, arguments.steps, arguments.warmup)
    cases = [
        (int(world), adapter, strategy, *counts)
        for adapter in arguments.adapters.split(",")
        for strategy in arguments.strategies.split(",")
        for world in arguments.worlds.split(",")
    ]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        rows = list(pool.map(measure, *zip(*cases, strict=True)))
    write(arguments.out / "scale.json", made_by, arguments, rows)
    for name, table in by_world(rows, arguments.blocks).items():
        print(name, table, "", sep="\n")


if __name__ == "__main__":
    main()
