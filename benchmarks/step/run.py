"""Step time, memory, utilization and bytes of strategies side by side, on the same model and data, in one run.

    python benchmarks/step/run.py --nodes 2 --gpus-per-node 2 --size 1.35B --strategies full_shard,hybrid_shard,zeropp
    python benchmarks/step/run.py --size 6.7B --lora 16 --micro-batch 1 --strategies fsdp2:hybrid_shard,mixzpp

emulates the nodes on one host (common/nodes.py). Under torchrun on real nodes, start it with ``--worker`` instead.
Strategies go under FullyShardedDataParallel, or with ``fsdp2:`` before the name under fully_shard; DeepSpeed and
Megatron-FSDP are measured where they are installed. A strategy that fails has a row that says so. Prints a Markdown
table and writes the result (step.json) to ``--out``, after each strategy.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "common"))

import nodes
import torch.distributed as dist
from contenders import is_known, names, training_under
from generation import generation
from host_time import analyse
from host_traces import host_figures
from interleaved import free_running_steps, interleaved
from manifest import manifest
from models import add_model, task_of
from overlap import traced
from tables import summary

from fsdp_zpp.bench.contenders import Training
from fsdp_zpp.bench.results import Task, write
from fsdp_zpp.bench.run import PeakMemory, Schedule, attempt, timed_steps


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    nodes.add_layout(parser)
    nodes.add_throttle(parser)
    add_model(parser)
    add = parser.add_argument
    add("--strategies", default="full_shard,hybrid_shard,zeropp", help=f"of {names()}")
    add("--lora", type=int, default=0, metavar="RANK", help="adapters on q, k, v, o of a frozen base; 0 trains all")
    add("--checkpointing", action="store_true", help="recompute activations of each layer")
    add("--compile", action="store_true", help="torch.compile each layer, for all strategies")
    add("--generate", type=int, default=0, help="tokens to generate after training, on all ranks alike")
    add("--free-running", action="store_true", help="time all steps together: work that a step leaves may be hidden")
    add("--interleave", action="store_true", help="build all, then take a step of each in turn: finer than drift")
    add("--profile", action="store_true", help="also trace rank 0: communication that is not hidden")
    add("--host-time", action="store_true", help="also measure and trace rank 0's CPU (host_time.py reads the traces)")
    add("--out", type=Path, default=Path("runs/step"), help="folder for step.json and traces")
    add("--fast-network", action="store_true", help="nodes in name only: NVLink between them, which shows other costs")
    arguments = parser.parse_args()
    if arguments.interleave:
        # It times steps alone, waits for each, and has all strategies at once, with more graphs than torch compiles.
        excluded = [
            name for name in ("profile", "host_time", "generate", "free_running", "compile") if getattr(arguments, name)
        ]
        if excluded:
            parser.error(f"--interleave excludes {', '.join(excluded)}")
        if arguments.steps < 2:
            parser.error("--interleave needs two --steps or more")
    unknown = [name for name in arguments.strategies.split(",") if not is_known(name)]
    if unknown:
        parser.error(f"unknown strategies {unknown}; known are {names()}")
    return arguments


def further(
    arguments: argparse.Namespace, task: Task, name: str, training: Training, memory: PeakMemory
) -> dict[str, Any]:
    """Measure what a run may ask for beside steps: communication that is not hidden, the CPU's part, generation."""
    figures: dict[str, Any] = {}
    if arguments.profile:
        trace = arguments.out / f"{name.replace(':', '-')}.trace.json.gz"
        figures |= traced(training, task.tokens(dist.get_rank()), trace)
    if arguments.host_time:
        trace = arguments.out / f"{name.replace(':', '-')}.host.trace.json.gz"
        figures |= host_figures(task, training, task.tokens(dist.get_rank()), arguments.steps, trace)
    if arguments.generate:
        figures |= generation(task, training, memory, arguments.generate)
    return figures


def work(arguments: argparse.Namespace) -> None:
    """Measure all strategies in turn as one rank; rank 0 writes after each."""
    task, strategies, rows = task_of(arguments), arguments.strategies.split(","), []
    schedule = Schedule(
        arguments.warmup, arguments.steps, free_running_steps if arguments.free_running else timed_steps
    )
    made_by, is_writer = manifest(nodes.command()), dist.get_rank() == 0

    def save() -> None:
        write(arguments.out / "step.json", made_by, arguments, rows, environment=nodes.environment())

    if arguments.interleave:
        rows += interleaved(task, strategies, arguments.warmup, arguments.steps)
    for name in () if arguments.interleave else strategies:
        make, more = partial(training_under, task, name), partial(further, arguments, task, name)
        rows.append(attempt(task, name, make, schedule, more))
        if is_writer:
            print(json.dumps(rows[-1]), flush=True)
            save()
    if is_writer:
        save()
        print(summary(rows))
        if arguments.host_time:
            try:
                analyse(arguments.out)
            except Exception:  # the traces are there to be read again
                traceback.print_exc()


if __name__ == "__main__":
    nodes.start(parse(), work)
