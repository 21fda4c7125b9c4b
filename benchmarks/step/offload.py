"""Steps with CPU offload: the optimizer after the backward and in it.

    python benchmarks/step/offload.py --nodes 2 --gpus-per-node 1
    python benchmarks/step/offload.py --nodes 2 --gpus-per-node 1 --gpus 1

Prints median seconds of a step under ``fully_shard`` with ``--strategy``: on the GPU, offloaded, and offloaded with
optimizers that step in the backward. Weights after all steps must be the same for the latter two. Writes the result
(offload.json) to ``--out``.
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
import torch
import torch.distributed as dist
from manifest import manifest
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdp_zpp import Strategy, fully_shard
from fsdp_zpp.bench.results import write

LEARNING_RATE = 1e-4


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    nodes.add_layout(parser)
    nodes.add_throttle(parser)
    parser.add_argument("--strategy", default="zeropp", help="name of a preset")
    parser.add_argument("--layers", type=int, default=8, help="number of blocks")
    parser.add_argument("--width", type=int, default=2048, help="width of a block, of 8 width**2 parameters")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens on a GPU")
    parser.add_argument("--steps", type=int, default=8, help="timed steps, after two")
    parser.add_argument("--out", type=Path, default=Path("runs/offload"), help="folder for offload.json")
    return parser.parse_args()


def make_model(arguments: argparse.Namespace, offload: bool) -> nn.Module:
    """Return a sharded stack of MLPs, the same at each call."""
    torch.manual_seed(0)
    width, device = arguments.width, arguments.device
    blocks = [
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for _ in range(arguments.layers)
    ]
    model = nn.Sequential(*blocks).to(device)
    options: dict[str, Any] = {"strategy": Strategy.from_dict(arguments.strategy)}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device == "cuda")
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def step_in_backward(model: nn.Module) -> None:
    """Give each parameter an optimizer that steps in the backward."""
    optimizers = {p: torch.optim.AdamW([p], lr=LEARNING_RATE, fused=True) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)


def timed(arguments: argparse.Namespace, kind: str) -> tuple[float, list[Tensor]]:
    """Return the median seconds of a step of the slowest rank, and this rank's shards at the end. Collective."""
    model = make_model(arguments, offload=kind != "on the GPU")
    optimizer = None
    if kind == "offloaded, in the backward":
        step_in_backward(model)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    torch.manual_seed(dist.get_rank())
    tokens = torch.randn(arguments.tokens, arguments.width, device=arguments.device)

    def step() -> None:
        model(tokens).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    seconds = slowest(step, arguments.steps, arguments.device)
    return seconds, [parameter.to_local().detach().cpu().clone() for parameter in model.parameters()]


def slowest(work: Callable[[], object], times: int, device: str) -> float:
    """Return the median seconds of ``work`` on the slowest rank, after two that warm up. Collective."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    seconds = torch.empty(times, dtype=torch.float64, device=device)
    for repetition in range(-2, times):
        dist.barrier()
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        if repetition >= 0:
            seconds[repetition] = time.perf_counter() - start
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return statistics.median(seconds.tolist())


def work(arguments: argparse.Namespace) -> None:
    """Measure as one rank; rank 0 prints the figures and writes the result."""
    figures: dict[str, Any] = {"threads": torch.get_num_threads()}
    weights = {}
    for kind in ("on the GPU", "offloaded", "offloaded, in the backward"):
        figures[kind], weights[kind] = timed(arguments, kind)
    pairs = zip(weights["offloaded"], weights["offloaded, in the backward"], strict=True)
    figures["same_weights"] = all(torch.equal(*pair) for pair in pairs)
    if dist.get_rank() == 0:
        made_by, variables = manifest(nodes.command()), nodes.environment()
        write(arguments.out / "offload.json", made_by, arguments, [figures], environment=variables)
        for name, figure in figures.items():
            print(f"{name}: {figure}")
    assert figures["same_weights"], "optimizers in the backward have stepped on other gradients"


if __name__ == "__main__":
    nodes.start(parse(), work)
