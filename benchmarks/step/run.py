"""Step time, memory, utilization and bytes of strategies side by side, on the same model and data, in one run.

    python benchmarks/step/run.py --nodes 2 --gpus-per-node 2 --size 1.35B --strategies full_shard,hybrid_shard,zeropp
    python benchmarks/step/run.py --size 6.7B --lora 16 --micro-batch 1 --strategies fsdp2:hybrid_shard,mixzpp

emulates the nodes on one host (common/nodes.py). Under torchrun on real nodes, start it with ``--worker`` instead.
Strategies go under FullyShardedDataParallel, or with ``fsdp2:`` before the name under fully_shard; DeepSpeed and
Megatron-FSDP are measured where they are installed. A strategy that fails is reported as that. Prints a Markdown table
and writes the result (step.json) and a chart (step.png) to ``--out``, after each strategy what there is.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "common"))

import nodes
import result_files
import torch.distributed as dist
from chart import chart
from columns import summary
from contenders import is_known, names
from interleaved import interleaved
from manifest import manifest
from measuring import attempt
from models import SIZES, Task


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    nodes.add_layout(parser)
    parser.add_argument("--size", choices=SIZES, default="1.35B")
    parser.add_argument("--strategies", default="full_shard,hybrid_shard,zeropp", help=f"of {names()}")
    parser.add_argument(
        "--lora", type=int, default=0, metavar="RANK", help="adapters on q, k, v, o of a frozen base; 0 trains all"
    )
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences a GPU in a micro-batch")
    parser.add_argument(
        "--micro-batches", type=int, default=1, help="micro-batches a step, all but the last not synchronized"
    )
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations of each layer")
    parser.add_argument("--compile", action="store_true", help="torch.compile each layer, for all strategies")
    parser.add_argument("--generate", type=int, default=0, help="tokens to generate after training, on all ranks alike")
    parser.add_argument("--steps", type=int, default=8, help="timed steps, after --warmup others")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument(
        "--free-running",
        action="store_true",
        help="time all steps as one, not each: what one leaves on its way, others may hide",
    )
    parser.add_argument(
        "--interleave",
        action="store_true",
        help="build all, then take a step of each in turn: what differs by a few percent on a machine that drifts",
    )
    parser.add_argument("--profile", action="store_true", help="also trace rank 0: what communication is not hidden")
    parser.add_argument("--out", type=Path, default=Path("runs/step"), help="folder for step.json, step.png and traces")
    parser.add_argument(
        "--fast-network", action="store_true", help="nodes in name only: NVLink between them, which shows other costs"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is for trying it out")
    arguments = parser.parse_args()
    if arguments.interleave and (arguments.profile or arguments.generate):
        parser.error("--interleave times steps and nothing else: no --profile, no --generate")
    if arguments.interleave and arguments.free_running:
        parser.error("--interleave waits for each step: no --free-running")
    if arguments.interleave and arguments.compile:
        parser.error("--interleave has all strategies at once, with more graphs than torch compiles: no --compile")
    if arguments.interleave and arguments.steps < 2:
        parser.error("--interleave needs two --steps or more")
    unknown = [name for name in arguments.strategies.split(",") if not is_known(name)]
    if unknown:
        parser.error(f"unknown strategies {unknown}; known are {names()}")
    return arguments


def work(arguments: argparse.Namespace) -> None:
    """One rank: measure all strategies in turn; rank 0 writes after each."""
    task, names_given, rows = Task.of(arguments), arguments.strategies.split(","), []
    made_by = manifest(nodes.command())

    def write() -> None:
        result_files.write(arguments.out / "step.json", made_by, arguments, rows, environment=nodes.environment())
        chart(arguments, rows, made_by["machine"])

    if arguments.interleave:
        rows += interleaved(task, names_given, arguments.warmup, arguments.steps)
        if dist.get_rank() == 0:
            write()
    else:
        for name in names_given:
            rows.append(attempt(arguments, task, name))
            if dist.get_rank() == 0:
                print(json.dumps(rows[-1]), flush=True)
                write()
    if dist.get_rank() == 0:
        print(summary(rows))


if __name__ == "__main__":
    nodes.start(parse(), work)
