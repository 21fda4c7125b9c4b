"""Lightning's Trainer over torch's two FSDPs: its strategies or ours, on the ranks of a pool of workers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import lightning.pytorch.strategies as stock
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from harness.offload import offload_policy
from harness.pool import device_type
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig

from fsdp_zpp import Strategy, fully_shard
from fsdp_zpp.integrations import lightning as own

STOCK = None
"""Stands for Lightning's own strategy and torch's own full sharding where a strategy could be."""
ACCELERATOR = device_type().replace("cuda", "gpu")


def shard(
    model: nn.Module, layers: Iterable[nn.Module], strategy: Strategy | None, mesh: Any, offload: bool = False
) -> nn.Module:
    arguments: dict[str, Any] = {"mesh": mesh} | ({"offload_policy": offload_policy()} if offload else {})
    for module in (*layers, model):
        if strategy is STOCK:
            torch_fsdp.fully_shard(module, **arguments)
        else:
            fully_shard(module, strategy=strategy, **arguments)
    return model


def make_strategy(
    fsdp: str, sharding: Strategy | None, *, full: bool, layer: type[nn.Module], offload: bool = False
) -> Any:
    """Return our strategy of Lightning's kind, or its own of FSDP2; with ``full``, checkpoints are files.

    ``fsdp1`` wraps each ``layer`` and is told to ``offload``.
    """
    source: Any = stock if sharding is STOCK else own
    if fsdp == "fsdp2":
        return source.ModelParallelStrategy(
            data_parallel_size=dist.get_world_size(),
            tensor_parallel_size=1,
            save_distributed_checkpoint=not full,
        )
    return source.FSDPStrategy(
        sharding_strategy=sharding,
        auto_wrap_policy={layer},
        state_dict_type="full" if full and device_type() == "cuda" else "sharded",
        cpu_offload=offload,
    )


def let_gather(fsdp: str, full: bool, strategy: Any) -> None:
    """Let FSDP1 save full state dicts, if asked to, on CPUs, too, where the strategy is refused otherwise."""
    if full and fsdp == "fsdp1":
        strategy._state_dict_type = "full"


def ranks() -> dict[str, int]:
    """Return the arguments with which Lightning takes the ranks of this process group for its own."""
    world = dist.get_world_size()
    per_node = min(world, torch.cuda.device_count()) if device_type() == "cuda" else world
    return {"devices": per_node, "num_nodes": world // per_node}  # more than one where ranks share GPUs


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """Restore variables afterwards that Lightning may clear and other tests of this process need.

    On a CPU, FSDP1 does not move what it gathers to the CPU: torch does not copy it then, and reuses or frees it.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, NODE_RANK=str(dist.get_rank() // ranks()["devices"])))
        if device_type() == "cpu":
            for module, config in ((torch_fsdp, FullStateDictConfig), (torch_fsdp.api, FullOptimStateDictConfig)):
                in_place = partial(_without_move, config)
                stack.enter_context(mock.patch.object(module, config.__name__, in_place))
        yield


def _without_move(config: Callable[..., Any], offload_to_cpu: bool, rank0_only: bool) -> Any:
    return config(offload_to_cpu=False, rank0_only=rank0_only)
