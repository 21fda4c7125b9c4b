"""Time and memory of ``gathered_weights``, beside one all-gather of as many bytes: what the link alone takes.

    python benchmarks/step/gathering.py --nodes 1 --gpus-per-node 4
    python benchmarks/step/gathering.py --nodes 2 --gpus-per-node 2 --adapter fsdp1 --rank 0

The model is a random Llama of 6.7B parameters in bf16 (``--layers 32``). On CPUs, give
``--device cpu --width 256 --layers 4``. Writes the result (gathering.json) to ``--out``.
"""

from __future__ import annotations

import argparse
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
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_zpp import Strategy, fully_shard, gathered_weights
from fsdp_zpp.bench.results import write
from fsdp_zpp.comm.hops import ALL_GATHER


class Layer(nn.Module):
    """The parameters of one layer of Llama."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = width * 11008 // 4096
        shapes = {"q": (width, width), "k": (width, width), "v": (width, width), "o": (width, width)}
        shapes |= {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
        for name, (rows, columns) in shapes.items():
            setattr(self, name, nn.Linear(columns, rows, bias=False))
        self.norms = nn.ParameterList(torch.ones(width) for _ in range(2))


def sharded(arguments: argparse.Namespace, device: torch.device) -> nn.Module:
    """Shard a model layer by layer under zeropp; each layer is made on the device when its turn comes."""
    torch.set_default_dtype(torch.bfloat16)
    strategy = Strategy.zeropp(gpus_per_node=arguments.gpus_per_node)
    model = nn.Module()
    with device:
        model.embedding = nn.Embedding(32000, arguments.width)
        model.head = nn.Linear(arguments.width, 32000, bias=False)
        model.layers = nn.ModuleList()
        for _ in range(arguments.layers):
            layer: nn.Module = Layer(arguments.width)
            if arguments.adapter == "fsdp2":
                fully_shard(layer, strategy=strategy)
            model.layers.append(layer)
    if arguments.adapter == "fsdp2":
        return fully_shard(model, strategy=strategy)
    policy = ModuleWrapPolicy({Layer})
    how = {"use_orig_params": True, "device_id": device, "auto_wrap_policy": policy}
    return FullyShardedDataParallel(model, sharding_strategy=strategy, **how)


def seconds(call: Callable[[], object], device: torch.device, times: int = 5) -> float:
    """Return the shortest time of a call, on the slowest rank; the first call is not counted."""
    taken = []
    for _ in range(times + 1):
        dist.barrier()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    slowest = torch.tensor(min(taken[1:]), dtype=torch.float64, device=device)  # not the default dtype, bf16
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def plain_gathers(nbytes: int, at_once: int, device: torch.device) -> None:
    """Gather as many bytes, a layer's at once, into one buffer: the link at its best."""
    world = dist.get_world_size()
    shard = torch.empty(at_once // 2 // world, device=device)
    full = torch.empty(shard.numel() * world, device=device)
    for _ in range(round(nbytes / full.nbytes)):
        getattr(dist, ALL_GATHER)(full, shard)


def gather(model: nn.Module, arguments: argparse.Namespace) -> None:
    """Hand out all weights to a caller that needs no time."""
    for _ in gathered_weights(model, rank=arguments.rank):
        pass


def measured(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return seconds and bytes. Collective."""
    model = sharded(arguments, device)
    layer = sum(parameter.numel() for parameter in Layer(arguments.width).parameters()) * 2
    ends = 2 * 32000 * arguments.width * 2  # the embedding and the head
    nbytes = arguments.layers * layer + ends
    figures: dict[str, Any] = {"nbytes": nbytes, "largest_unit": max(layer, ends)}
    figures["link_s"] = seconds(lambda: plain_gathers(nbytes, layer, device), device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    figures["gathered_weights_s"] = seconds(lambda: gather(model, arguments), device)
    if on_gpu:
        figures["above_shards"] = torch.cuda.max_memory_allocated() - before
    return figures


def work(arguments: argparse.Namespace) -> None:
    """Measure as one rank; rank 0 prints the figures and writes the result."""
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    figures = measured(arguments, device)
    if dist.get_rank() == 0:
        made_by, variables = manifest(nodes.command()), nodes.environment()
        write(arguments.out / "gathering.json", made_by, arguments, [figures], environment=variables)
        link, ours = figures["link_s"], figures["gathered_weights_s"]
        print(f"{figures['nbytes'] / 2**30:.2f} GiB of weights over {dist.get_world_size()} ranks, {arguments.adapter}")
        print(f"link: {link * 1e3:.1f} ms; gathered_weights: {ours * 1e3:.1f} ms, {ours / link:.2f} times as long")
        if "above_shards" in figures:
            above, largest = figures["above_shards"] / 2**20, figures["largest_unit"] / 2**20
            print(f"memory: {above:.0f} MiB above the shards; the largest unit has {largest:.0f} MiB")


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    nodes.add_layout(parser)
    nodes.add_throttle(parser)
    parser.add_argument("--adapter", choices=["fsdp1", "fsdp2"], default="fsdp2")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rank", type=int, default=None, help="the rank that gets the weights (default: all)")
    parser.add_argument("--out", type=Path, default=Path("runs/gathering"), help="folder for gathering.json")
    return parser.parse_args()


if __name__ == "__main__":
    nodes.start(parse(), work)
