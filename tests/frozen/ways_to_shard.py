"""A net with two frozen layers and a trainable one, and the ways to shard it, changed before or afterwards."""

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


class PartlyFrozen(nn.Module):
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


def apart(net: PartlyFrozen, **arguments: Any) -> PartlyFrozen:
    """Three units."""
    for layer in (net.first, net.second):
        fully_shard(layer, **arguments)
    fully_shard(net, **arguments)
    return net


def by_group(net: PartlyFrozen) -> PartlyFrozen:
    """The frozen layers together, and the rest."""
    fully_shard([net.first, net.second])
    fully_shard(net)
    return net


def hybrid(net: PartlyFrozen) -> PartlyFrozen:
    """Sharded inside of nodes, replicated over them."""
    return apart(net, mesh=init_device_mesh(device_type(), (2, 2), mesh_dim_names=("replicate", "shard")))


def along_columns(net: PartlyFrozen) -> PartlyFrozen:
    """Sharded along the other dimension."""
    return apart(net, shard_placement_fn=lambda parameter: Shard(1))


def tied_before(net: PartlyFrozen) -> PartlyFrozen:
    """Two layers that share a weight."""
    net.second.weight = net.first.weight
    fully_shard(net)
    return net


def tied_after(net: PartlyFrozen) -> PartlyFrozen:
    """The same, tied after they were sharded."""
    net = apart(net)
    net.second.weight = net.first.weight
    return net


def replaced(net: PartlyFrozen) -> PartlyFrozen:
    """With another weight than it was sharded with."""
    net = apart(net)
    net.second.weight = nn.Parameter(net.second.weight.detach() * 2, requires_grad=False)
    return net


def prefetching(net: PartlyFrozen) -> PartlyFrozen:
    """With units that are told to gather those of the frozen layers ahead."""
    net = apart(net)
    net.set_modules_to_forward_prefetch([net.first, net.second])
    net.set_modules_to_backward_prefetch([net.second, net.first])
    return net


def gathered_once(net: PartlyFrozen) -> PartlyFrozen:
    """With a secondary shard of weights that are about to be taken."""
    strategy = Strategy("IGG", gpus_per_node=2)
    zeropp_shard(net, strategy=strategy)
    net.unshard()
    net.reshard()
    return net


def in_part(net: PartlyFrozen) -> PartlyFrozen:
    """With one weight that FSDP ignores."""
    fully_shard(net, ignored_params={net.first.weight})
    return net


def flat_once(module: nn.Module, **arguments: Any) -> FullyShardedDataParallel:
    """One unit of FullyShardedDataParallel."""
    return FullyShardedDataParallel(module, **{"use_orig_params": True, "device_id": models.device()} | arguments)


def flat(net: PartlyFrozen, **arguments: Any) -> FullyShardedDataParallel:
    """Three units."""
    net.first, net.second = (flat_once(layer, **arguments) for layer in (net.first, net.second))
    return flat_once(net, **arguments)


def flat_hybrid(net: PartlyFrozen) -> FullyShardedDataParallel:
    """Sharded inside of nodes, replicated over them."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("replicate", "shard"))
    return flat(net, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def flat_replicated(net: PartlyFrozen) -> FullyShardedDataParallel:
    """Not sharded at all."""
    return flat(net, sharding_strategy=ShardingStrategy.NO_SHARD)


def flat_tied(net: PartlyFrozen, **arguments: Any) -> FullyShardedDataParallel:
    """One unit, two layers of which share a weight."""
    net.second.weight = net.first.weight
    return flat_once(net, **arguments)


def flat_in_part(net: PartlyFrozen) -> FullyShardedDataParallel:
    """With one weight that FSDP ignores."""
    return flat_once(net, ignored_states=[net.first.weight])


WAYS = (by_group, hybrid, along_columns, tied_before, tied_after, replaced, prefetching, gathered_once, in_part)
FLAT_WAYS = (flat, flat_hybrid, flat_replicated, flat_tied, flat_in_part)
