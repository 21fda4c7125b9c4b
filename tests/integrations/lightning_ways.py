"""Lightning's two frameworks over torch's two FSDPs: their strategies or ours, on the ranks of a pool of workers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import lightning.fabric.strategies as fabric_strategies
import lightning.pytorch.strategies as trainer_strategies
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from harness.offload import offload_policy
from harness.pool import device_type
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig

from fsdp_zpp import Strategy, fully_shard
from fsdp_zpp.integrations.lightning import fabric as our_fabric, pytorch as our_trainer
from fsdp_zpp.integrations.lightning.wrapping import wrapped_on_cpu

STOCK = None
"""Stands for Lightning's own strategy and torch's own full sharding where a strategy could be."""
ACCELERATOR = device_type().replace("cuda", "gpu")


@dataclass(frozen=True)
class Way:
    """``trainer`` or ``fabric``, and ``fsdp1`` or ``fsdp2``."""

    framework: str
    fsdp: str

    def __str__(self) -> str:
        return f"{self.framework}-{self.fsdp}"


WAYS = [Way(framework, fsdp) for framework in ("trainer", "fabric") for fsdp in ("fsdp1", "fsdp2")]
TRAINER_FSDP1, TRAINER_FSDP2, FABRIC_FSDP1, FABRIC_FSDP2 = WAYS


def shard(
    model: nn.Module,
    layers: Iterable[nn.Module],
    strategy: Strategy | None,
    mesh: DeviceMesh | None,
    offload: bool = False,
) -> nn.Module:
    """Shard each layer and the rest by ``fully_shard``."""
    arguments: dict[str, Any] = {"mesh": mesh} | ({"offload_policy": offload_policy()} if offload else {})
    for module in (*layers, model):
        if strategy is STOCK:
            torch_fsdp.fully_shard(module, **arguments)
        else:
            fully_shard(module, strategy=strategy, **arguments)
    return model


class StockTrainerFsdp(trainer_strategies.FSDPStrategy):
    """Lightning's own, but for CPUs, where Lightning refuses that very class, and FSDP wants to be told the device."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        with wrapped_on_cpu(model, self, self.kwargs) as wrapped:
            return super()._setup_model(wrapped)


class StockFabricFsdp(fabric_strategies.FSDPStrategy):
    """Likewise."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        with wrapped_on_cpu(module, self, self._fsdp_kwargs) as wrapped:
            return super().setup_module(wrapped)


def make_strategy(
    way: Way,
    strategy: Strategy | None,
    *,
    full: bool,
    layer: type[nn.Module],
    parallelize: Callable[[nn.Module, DeviceMesh], nn.Module],
    offload: bool = False,
) -> Any:
    """Return the strategy of Lightning, or ours in its place.

    Args:
        way: For what.
        strategy: A strategy, or STOCK.
        full: Whether checkpoints are files, with everything gathered.
        layer: What FSDP1 wraps.
        parallelize: Shards by FSDP2, for Fabric; the Trainer has its module do that.
        offload: Whether FSDP1 offloads parameters; FSDP2 is told where it shards.
    """
    stock, stock_fsdp, integration = {
        "trainer": (trainer_strategies, StockTrainerFsdp, our_trainer),
        "fabric": (fabric_strategies, StockFabricFsdp, our_fabric),
    }[way.framework]
    if way.fsdp == "fsdp2":
        kind: Any = (stock if strategy is STOCK else integration).ModelParallelStrategy
        return kind(
            **({"parallelize_fn": parallelize} if way.framework == "fabric" else {}),
            data_parallel_size=dist.get_world_size(),
            tensor_parallel_size=1,
            save_distributed_checkpoint=not full,
        )
    return (stock_fsdp if strategy is STOCK else integration.FSDPStrategy)(
        sharding_strategy="FULL_SHARD" if strategy is STOCK else strategy,
        auto_wrap_policy={layer},
        state_dict_type="full" if full and device_type() == "cuda" else "sharded",
        cpu_offload=offload,
    )


def let_gather(way: Way, full: bool, strategy: Any) -> None:
    """Let FSDP1 save full state dicts, if asked to, on CPUs, too, where the strategy is refused otherwise."""
    if full and way.fsdp == "fsdp1":
        strategy._state_dict_type = "full"


def ranks() -> dict[str, int]:
    """Return the arguments with which Lightning takes the ranks of this process group for its own."""
    world = dist.get_world_size()
    per_node = min(world, torch.cuda.device_count()) if device_type() == "cuda" else world
    return {"devices": per_node, "num_nodes": world // per_node}  # more than one where ranks share GPUs


def node_rank() -> str:
    """Return the number of the node that this rank is on, as :func:`ranks` lays them out."""
    return str(dist.get_rank() // ranks()["devices"])


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """Restore variables afterwards that Lightning may clear and other tests of this process need.

    On a CPU, FSDP1 does not move what it gathers to the CPU: torch does not copy it then, and reuses or frees it.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, NODE_RANK=node_rank()))
        if device_type() == "cpu":
            for module, config in ((torch_fsdp, FullStateDictConfig), (torch_fsdp.api, FullOptimStateDictConfig)):
                in_place = partial(_without_move, config)
                stack.enter_context(mock.patch.object(module, config.__name__, in_place))
        yield


def _without_move(config: Callable[..., Any], offload_to_cpu: bool, rank0_only: bool) -> Any:
    return config(offload_to_cpu=False, rank0_only=rank0_only)
