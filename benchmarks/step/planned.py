"""Predictions of the planner beside measurements: the order of step times, and memory by model state.

    python benchmarks/step/planned.py --nodes 2 --gpus-per-node 2 --size 1.35B --levels GGG,IGG,IIG,III,NNG

emulates the nodes on one host (common/nodes.py), measures their bandwidths, and then every strategy's step as run.py
does. Memory is the largest that is allocated at three moments of a step (after a forward, with the gradients of all but
the last micro-batch, and with all gradients), since activations and the units in flight are no model states. Prints
a Markdown table and writes the result (planned.json) to ``--out``. Needs GPUs.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "common"))

import nodes
import tables
import torch
import torch.distributed as dist
from manifest import manifest
from models import add_model, task_of

from fsdp_zpp.bench.contenders import TorchFSDP, contender, network
from fsdp_zpp.bench.results import write
from fsdp_zpp.bench.run import rates, timed_steps
from fsdp_zpp.planner.cluster import measure_bandwidth
from fsdp_zpp.planner.model_size import ModelSize, module_size
from fsdp_zpp.planner.plan import plan
from fsdp_zpp.planner.report import Plan
from fsdp_zpp.strategy.strategy import LEGAL_LEVELS

GIB = 2**30


def parse() -> argparse.Namespace:
    """Parse the command line; the options of run.py mean the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    nodes.add_layout(parser)
    add_model(parser)
    parser.set_defaults(micro_batch=1, micro_batches=2, sequence=512, steps=5, warmup=2)
    parser.add_argument("--levels", default="GGG,IGG,IIG,III,NNG")
    parser.add_argument("--out", type=Path, default=Path("runs/planned"), help="folder for planned.json")
    arguments = parser.parse_args()
    unknown = set(arguments.levels.split(",")) - set(LEGAL_LEVELS)
    if unknown:
        parser.error(f"unknown levels {sorted(unknown)}; legal are {', '.join(LEGAL_LEVELS)}")
    return arguments


def measure(arguments: argparse.Namespace, levels: str) -> dict[str, Any]:
    """Return step time in ms and the memory of model states in GiB, of the slowest and the fullest rank. Collective."""
    gc.collect()
    torch.cuda.empty_cache()
    empty = torch.cuda.memory_allocated()
    task = task_of(arguments)
    training, tokens = TorchFSDP(task, contender(levels, fsdp2=False)), task.tokens(dist.get_rank())
    for _ in range(arguments.warmup):
        training.step(tokens)
    step_ms = rates(task, timed_steps(task, training, tokens, arguments.steps), tokens)["step_ms"]
    allocated = []
    for index, micro_batch in enumerate(tokens):
        with training.accumulating(index < len(tokens) - 1):
            training.model(micro_batch, labels=micro_batch).loss.backward()
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated() - empty)
    training.optimizer.step()
    training.optimizer.zero_grad()
    # The first forward gathers the weights that are kept; FSDP keeps the root's from a forward to a backward, and that
    # is no state.
    with torch.no_grad():
        training.model(tokens[0])
    allocated.append(torch.cuda.memory_allocated() - empty)
    figures = torch.tensor([step_ms, max(allocated) / GIB], device="cuda", dtype=torch.float64)
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    return {"levels": levels, "step_ms": figures[0].item(), "states_gib": figures[1].item()}


def predict(arguments: argparse.Namespace, size: ModelSize) -> Plan:
    """Plan for this model on this machine, by its measured bandwidths. Collective."""
    bandwidth = measure_bandwidth(dist.group.WORLD, arguments.gpus_per_node)
    return plan(
        size,
        nodes=arguments.nodes,
        gpus_per_node=arguments.gpus_per_node,
        inter_gbps=bandwidth.inter_gbps,
        intra_gbps=bandwidth.intra_gbps,
        micro_batches=arguments.micro_batches,
    )


def with_plan(row: dict[str, Any], predicted: Plan) -> dict[str, Any]:
    """Return a row with the predictions for its levels beside its measurements."""
    option = predicted[row["levels"]]
    states = option.memory.parameters + option.memory.shard + option.memory.optimizer + option.memory.gradients
    return row | {
        "planned_communication_ms": option.time.communication * 1e3,
        "planned_states_gib": states / GIB,
    }


def work(arguments: argparse.Namespace) -> None:
    """Predict, and measure all strategies in turn as one rank; rank 0 writes."""
    predicted = predict(arguments, module_size(network(task_of(arguments))))
    rows = []
    for levels in arguments.levels.split(","):
        rows.append(with_plan(measure(arguments, levels), predicted))
        if dist.get_rank() == 0:
            print(json.dumps(rows[-1]), flush=True)
    if dist.get_rank() == 0:
        cluster = predicted.cluster
        bandwidth = {"inter_gbps_a_node": cluster.inter_gbps, "intra_gbps_a_gpu": cluster.intra_gbps}
        others = {"environment": nodes.environment(), "bandwidth": bandwidth}
        write(arguments.out / "planned.json", manifest(nodes.command()), arguments, rows, **others)
        print(bandwidth, tables.planned(rows), sep="\n\n")


if __name__ == "__main__":
    nodes.start(parse(), work)
