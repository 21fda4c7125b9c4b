"""Walks through the code: the functions and files of this project that one call of a user's visits, in order.

    torchrun --nproc-per-node 4 benchmarks/scale/walks.py
    torchrun --nproc-per-node 4 benchmarks/scale/walks.py --show "fsdp2 gradient"

Counts calls of functions, the files that they are in, and changes of file from call to call, on rank 0 of two nodes of
two. Kernels are prepared as for a GPU and not launched. Prints a Markdown table, or a
walk itself, indented by depth.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import os
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import peft  # noqa: F401  (whose models a frozen base looks after, if it is imported)
import torch
import torch.distributed as dist
from contenders import WIDTH, Block, prepare_kernels_only
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

import fsdp_zpp
from fsdp_zpp import Int4, Int8, LocalSteps, Strategy, fully_shard, quantize_frozen_params

ROOT = f"{Path(fsdp_zpp.__file__).parents[1]}{os.sep}"
FOLDERS = f"{ROOT}fsdp_zpp{os.sep}", f"{ROOT}kernels{os.sep}"
STRATEGY = Strategy.zeropp(gpus_per_node=2)


class Visit(NamedTuple):
    """A call of one of the project's functions: its depth among such calls, its file, and its name."""

    depth: int
    file: str
    function: str


class Walk(list[Visit]):
    """Visits of one call, in order."""

    @property
    def files(self) -> int:
        """Return the number of different files."""
        return len({visit.file for visit in self})

    @property
    def file_changes(self) -> int:
        """Return the number of calls in another file than the call before."""
        return sum(before.file != after.file for before, after in pairwise(self))

    def __str__(self) -> str:
        return "\n".join(f"{'  ' * visit.depth}{visit.file}: {visit.function}" for visit in self)


def record(walk: Walk) -> None:
    """Record calls from now on, until :func:`stop`."""
    depth = 0
    generators: set[FrameType] = set()  # each resumption of one is an event of a call, too

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal depth
        code = frame.f_code
        # Comprehensions are functions up to Python 3.11 only.
        if event in ("call", "return") and code.co_filename.startswith(FOLDERS) and not code.co_name.startswith("<"):
            if event == "call" and frame not in generators:
                walk.append(Visit(depth, code.co_filename.removeprefix(ROOT), code.co_qualname))
            if code.co_flags & inspect.CO_GENERATOR:
                generators.add(frame)
            depth += 1 if event == "call" else -1

    sys.setprofile(profile)


def stop() -> None:
    """Record no more."""
    sys.setprofile(None)


def shard(adapter: str, block: nn.Module, strategy: Strategy = STRATEGY) -> Any:
    """Shard ``block`` under a strategy."""
    if adapter == "fsdp2":
        return fully_shard(block, strategy=strategy)
    return FullyShardedDataParallel(
        block, sharding_strategy=strategy, use_orig_params=True, device_id=torch.device("cpu")
    )


def model_after_steps(adapter: str, blocks: int) -> nn.Module:
    """Train a model of some blocks, each a unit, for a few steps, the last of which makes its weights stale."""
    model = shard(adapter, nn.Sequential(*(shard(adapter, Block()) for _ in range(blocks))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def loss_of(model: nn.Module) -> Tensor:
    """Return the loss of an input of ones."""
    loss: Tensor = model(torch.ones(1, WIDTH, requires_grad=True)).sum()
    return loss


def first_norm(model: nn.Module) -> nn.Module:
    """Return the module of ``model`` that computes first."""
    return next(module for module in model.modules() if isinstance(module, nn.RMSNorm))


def of_wrapping(adapter: str) -> Walk:
    """Walk through sharding one block after another one, whose process groups it shares."""
    shard(adapter, Block())
    record(walk := Walk())
    shard(adapter, Block())
    stop()
    return walk


def of_gather(adapter: str, blocks: int) -> Walk:
    """Walk from a forward after a step to the first computation, through the gather of its weights."""
    model = model_after_steps(adapter, blocks)
    first_norm(model).register_forward_pre_hook(lambda module, args: stop())
    record(walk := Walk())
    loss_of(model)
    return walk


def of_gradient(adapter: str) -> Walk:
    """Walk from the end of a block's own backward to that of the model's, through the hops of its gradients."""
    model = model_after_steps(adapter, 1)
    walk = Walk()

    def record_from_its_gradient(module: nn.Module, inputs: tuple[Tensor]) -> None:
        inputs[0].register_hook(lambda gradient: record(walk))

    first_norm(model).register_forward_pre_hook(record_from_its_gradient)
    loss_of(model).backward()
    stop()
    return walk


class Adapted(nn.Module):
    """Two frozen matrices, each with an adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False) for _ in range(2))
        self.adapters = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for base, adapter in zip(self.base, self.adapters, strict=True):
            x = base(x) + adapter(x)
        return x


def of_base_from_file(adapter: str) -> Walk:
    """Walk from the file of a frozen base to the codes that each rank keeps, the second time in a process."""
    walk = Walk()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{dist.get_rank()}.safetensors")
        save_file(Adapted().state_dict(), path)
        for start in (lambda: None, lambda: record(walk)):
            model = Adapted()
            start()
            quantize_frozen_params(model, Int8(), checkpoint=path, gpus_per_node=2, min_numel=1)
            stop()
    return walk


def of_first_forward(adapter: str) -> Walk:
    """Walk through the first forward of a model with a frozen base, in which its units are made ready."""
    model = Adapted()
    quantize_frozen_params(model, Int8(), gpus_per_node=2, min_numel=1)
    model = shard(adapter, model)
    record(walk := Walk())
    loss_of(model)
    stop()
    return walk


def of_exchange(adapter: str) -> Walk:
    """Walk through a forward in which nodes that train on their own exchange what they have changed."""
    strategy = Strategy.diloco(local_steps=LocalSteps(2, codec=Int4()), gpus_per_node=2)
    model = shard(adapter, Block(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    record(walk := Walk())
    loss_of(model)
    stop()
    return walk


WALKS: dict[str, Callable[[str], Walk]] = {
    "wrapping of a block": of_wrapping,
    "gather": lambda adapter: of_gather(adapter, 1),
    "gather that prefetches": lambda adapter: of_gather(adapter, 2),
    "gradient": of_gradient,
    "LoRA base from a file": of_base_from_file,
    "LoRA first forward": of_first_forward,
    "exchange of local steps": of_exchange,
}


def main() -> None:
    """Count all walks, or show one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [f"{adapter} {name}" for adapter in ("fsdp1", "fsdp2") for name in WALKS]
    parser.add_argument("--show", choices=names, metavar="WALK", help=f"one of {', '.join(names)}")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    gc.disable()
    prepare_kernels_only()
    torch.use_deterministic_algorithms(True)  # fills what kernels leave unwritten, so that ranks hold the same codes
    rows = ["| Walk | calls | files | file changes |", "|---|---|---|---|"]
    for name in names if arguments.show is None else [arguments.show]:
        adapter, _, kind = name.partition(" ")
        gc.collect()  # models of earlier walks, which would be visited whenever Python happens to collect them
        torch.manual_seed(0)  # nodes that train on their own begin with equal weights
        walk = WALKS[kind](adapter)
        rows.append(f"| {name} | {len(walk)} | {walk.files} | {walk.file_changes} |")
    if dist.get_rank() == 0:
        print("\n".join(rows) if arguments.show is None else walk)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
