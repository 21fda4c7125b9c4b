"""Time and memory of ``gathered_weights``, beside one all-gather of as many bytes: what the link alone takes.

    torchrun --nproc-per-node 4 benchmarks/step/gathering.py
    torchrun --nproc-per-node 4 benchmarks/step/gathering.py --adapter fsdp1 --rank 0

The model is a random Llama of 6.7B parameters in bf16 (``--layers 32``). On CPUs, give ``--width 256 --layers 4``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_zpp import Strategy, fully_shard, gathered_weights
from fsdp_zpp.bench.job import is_rank_zero, joined
from fsdp_zpp.collectives.hops import all_gather_single


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
    slowest = torch.tensor(min(taken[1:]), device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def plain_gathers(nbytes: int, at_once: int, device: torch.device) -> None:
    """Gather as many bytes, a layer's at once, into one buffer: the link at its best."""
    world = dist.get_world_size()
    shard = torch.empty(at_once // 2 // world, device=device)
    full = torch.empty(shard.numel() * world, device=device)
    for _ in range(round(nbytes / full.nbytes)):
        all_gather_single()(full, shard)


def gather(model: nn.Module, arguments: argparse.Namespace) -> None:
    """Hand out all weights to a caller that needs no time."""
    for _ in gathered_weights(model, rank=arguments.rank):
        pass


def main() -> None:
    """Print the times and, on a GPU, the memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", choices=["fsdp1", "fsdp2"], default="fsdp2")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--gpus-per-node", type=int, default=None)
    parser.add_argument("--rank", type=int, default=None, help="the rank that gets the weights (default: all)")
    arguments = parser.parse_args()
    with joined() as device:
        model = sharded(arguments, device)
        layer = sum(parameter.numel() for parameter in Layer(arguments.width).parameters()) * 2
        nbytes = arguments.layers * layer + 2 * 32000 * arguments.width * 2
        largest = max(layer, 2 * 32000 * arguments.width * 2)
        link = seconds(lambda: plain_gathers(nbytes, layer, device), device)
        before = peak = 0
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        ours = seconds(lambda: gather(model, arguments), device)
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated() - before
        if is_rank_zero():
            print(f"{nbytes / 2**30:.2f} GiB of weights over {dist.get_world_size()} ranks, {arguments.adapter}")
            print(f"link: {link * 1e3:.1f} ms; gathered_weights: {ours * 1e3:.1f} ms, {ours / link:.2f} times as long")
            print(f"memory: {peak / 2**20:.0f} MiB above the shards; the largest unit has {largest / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
