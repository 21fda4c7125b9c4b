"""A pair of frozen layers and a trainable one, and the ways to shard it, changed before or afterwards."""

from __future__ import annotations

from typing import Any

import torch
from harness import models
from harness.pool import device_type
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import Shard

from fsdp_zpp import Strategy, fully_shard as zeropp_shard


class Pair(nn.Module):
    """Two frozen layers and a trainable one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.first.requires_grad_(False)
        self.second.requires_grad_(False)
        self.to(models.device())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(torch.relu(self.first(x))))


def apart(pair: Pair, **arguments: Any) -> Pair:
    """Three units."""
    for layer in (pair.first, pair.second):
        fully_shard(layer, **arguments)
    fully_shard(pair, **arguments)
    return pair


def by_group(pair: Pair) -> Pair:
    """The frozen layers together, and the rest."""
    fully_shard([pair.first, pair.second])
    fully_shard(pair)
    return pair


def hybrid(pair: Pair) -> Pair:
    """Sharded inside of nodes, replicated over them."""
    return apart(pair, mesh=init_device_mesh(device_type(), (2, 2), mesh_dim_names=("replicate", "shard")))


def along_columns(pair: Pair) -> Pair:
    """Sharded along the other dimension."""
    return apart(pair, shard_placement_fn=lambda parameter: Shard(1))


def tied_before(pair: Pair) -> Pair:
    """Two layers that share a weight."""
    pair.second.weight = pair.first.weight
    fully_shard(pair)
    return pair


def tied_after(pair: Pair) -> Pair:
    """The same, tied after they were sharded."""
    pair = apart(pair)
    pair.second.weight = pair.first.weight
    return pair


def replaced(pair: Pair) -> Pair:
    """With another weight than it was sharded with."""
    pair = apart(pair)
    pair.second.weight = nn.Parameter(pair.second.weight.detach() * 2, requires_grad=False)
    return pair


def prefetching(pair: Pair) -> Pair:
    """With units that are told to gather those of the frozen layers ahead."""
    pair = apart(pair)
    pair.set_modules_to_forward_prefetch([pair.first, pair.second])
    pair.set_modules_to_backward_prefetch([pair.second, pair.first])
    return pair


def gathered_once(pair: Pair) -> Pair:
    """With a secondary shard of weights that are about to be taken."""
    strategy = Strategy("IGG", gpus_per_node=2)
    zeropp_shard(pair, strategy=strategy)
    pair.unshard()
    pair.reshard()
    return pair


def in_part(pair: Pair) -> Pair:
    """With one weight that FSDP ignores."""
    fully_shard(pair, ignored_params={pair.first.weight})
    return pair


def flat_once(module: nn.Module, **arguments: Any) -> FullyShardedDataParallel:
    """One unit of FullyShardedDataParallel."""
    return FullyShardedDataParallel(module, **{"use_orig_params": True, "device_id": models.device()} | arguments)


def flat(pair: Pair, **arguments: Any) -> FullyShardedDataParallel:
    """Three units."""
    pair.first, pair.second = (flat_once(layer, **arguments) for layer in (pair.first, pair.second))
    return flat_once(pair, **arguments)


def flat_hybrid(pair: Pair) -> FullyShardedDataParallel:
    """Sharded inside of nodes, replicated over them."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("replicate", "shard"))
    return flat(pair, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def flat_replicated(pair: Pair) -> FullyShardedDataParallel:
    """Not sharded at all."""
    return flat(pair, sharding_strategy=ShardingStrategy.NO_SHARD)


def flat_tied(pair: Pair, **arguments: Any) -> FullyShardedDataParallel:
    """One unit, two layers of which share a weight."""
    pair.second.weight = pair.first.weight
    return flat_once(pair, **arguments)


def flat_in_part(pair: Pair) -> FullyShardedDataParallel:
    """With one weight that FSDP ignores."""
    return flat_once(pair, ignored_states=[pair.first.weight])


WAYS = (by_group, hybrid, along_columns, tied_before, tied_after, replaced, prefetching, gathered_once, in_part)
FLAT_WAYS = (flat, flat_hybrid, flat_replicated, flat_tied, flat_in_part)
