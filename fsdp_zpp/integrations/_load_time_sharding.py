"""Models that transformers shards while it loads them, ``from_pretrained(distributed_config=...)``, by a strategy."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed import DistributedConfig, fsdp, mixin

from fsdp_zpp.adapters.fsdp2 import fully_shard
from fsdp_zpp.config.strategy import Strategy

from ._requirement import require

_EXPERTS = "efsdp"
"""Dimension of transformers' meshes along which the copies of an expert lie."""


class ShardingConfig(DistributedConfig):
    """A ``DistributedConfig`` by which ``from_pretrained`` shards with strategies.

    Attributes:
        strategy: The strategy of all but the experts.
        experts: The strategy of experts, over the ranks that hold the same ones.
    """

    strategy: Strategy
    experts: Strategy


def with_strategy(
    config: DistributedConfig, strategy: Strategy, *, experts: Strategy | None = None
) -> DistributedConfig:
    """Make ``from_pretrained(distributed_config=...)`` shard its model by ``strategy``.

    transformers decides what is a unit (``fsdp_plan``) and makes the meshes, tensor and expert parallelism among them.
    Pass the loaded model to Trainer as it is, without ``use_strategy``.

    Args:
        config: The sizes; ``fsdp_size`` or ``dp_replicate_size`` must be above 1. It is not changed.
        strategy: Where each model state lives and how each hop is encoded. Its ``gpus_per_node`` counts data-parallel
            ranks. With ``dp_replicate_size``, the ranks of a replica are a node.
        experts: The strategy of experts that ``ep_size`` distributes. Default: ``strategy``, on the same nodes.

    Returns:
        The configuration for ``from_pretrained``.

    Raises:
        ImportError: If transformers is too old.
        TypeError: If an argument has another type.
        ValueError: If the configuration can't be combined with a strategy; the error says what to do instead.
    """
    require("transformers", "5.24", purpose="to shard by a strategy while a model is loaded")
    if not isinstance(config, DistributedConfig):
        raise TypeError(f"with_strategy takes a DistributedConfig of transformers, got {config!r}")
    for each in (strategy, strategy if experts is None else experts):
        if not isinstance(each, Strategy):
            raise TypeError(f"strategy must be a Strategy such as Strategy.zeropp(), got {each!r}")
        if frozen := [part.frozen for part in each.all_strategies if part.frozen is not None]:
            raise ValueError(
                f"frozen={frozen[0]} quantizes weights when a model is sharded, but from_pretrained loads them "
                "after that: load the model without distributed_config, and call use_strategy(trainer, strategy)"
            )
    if isinstance(config, ShardingConfig):
        raise ValueError(f"this configuration has a strategy already, {config.strategy}")
    if config.dp_size == 1:
        raise ValueError(
            "a strategy shards over data-parallel ranks, and this DistributedConfig has one: set fsdp_size to their "
            "number"
        )
    if experts is not None and config.ep_size == 1:
        raise ValueError("experts= is the strategy of experts that ep_size distributes, and ep_size is 1: leave it out")
    sharding = ShardingConfig(**config.to_dict())
    sharding.strategy = strategy
    sharding.experts = _on_same_nodes(strategy, config) if experts is None else experts
    return sharding


def _on_same_nodes(strategy: Strategy, config: DistributedConfig) -> Strategy:
    """Return ``strategy`` for experts, whose copies are ``ep_size`` ranks apart, where others are ``tp_size`` apart."""
    sizes: Any = config  # none of which is None any more, as their types allow
    if strategy.gpus_per_node is None or sizes.ep_size == 1:
        return strategy
    ranks, apart = strategy.gpus_per_node * sizes.tp_size, sizes.ep_size
    if ranks % apart and apart % ranks:
        raise ValueError(
            f"gpus_per_node={strategy.gpus_per_node} makes nodes of {ranks} ranks, and the copies of an expert are "
            f"ep_size={apart} ranks apart, so that nodes would have different numbers of them: choose sizes of which "
            "one divides the other, or give experts= a strategy of its own"
        )
    return replace(strategy, gpus_per_node=min(max(ranks // apart, 1), sizes.efsdp_size * sizes.dp_replicate_size))


@contextmanager
def _sharding_by(config: ShardingConfig) -> Iterator[None]:
    """Return a context in which transformers shards by the strategies of ``config``.

    Raises:
        RuntimeError: At its end, if transformers has called nothing of this.
    """
    torch_fully_shard, called = fsdp.fully_shard, False

    def by_strategy(module: Any, *, mesh: DeviceMesh, **arguments: Any) -> Any:
        nonlocal called
        called = True
        strategy = config.experts if _EXPERTS in (mesh.mesh_dim_names or ()) else config.strategy
        if any(part.parameters == "N" for part in strategy.all_strategies):
            arguments.pop("reshard_after_forward", None)  # which transformers gives each unit; N keeps all of them
        return fully_shard(module, strategy=strategy, mesh=mesh, **arguments)

    fsdp.fully_shard = by_strategy  # type: ignore[assignment]  # without the overloads that transformers does not use
    try:
        yield
    finally:
        fsdp.fully_shard = torch_fully_shard
    if not called:
        raise RuntimeError("this transformers does not shard with transformers.distributed.fsdp.fully_shard")


def install() -> None:
    """Prepare transformers for configurations that have a strategy."""
    apply = mixin.apply_fully_sharded_data_parallelism

    @functools.wraps(apply)
    def apply_fully_sharded_data_parallelism(model: nn.Module, *arguments: Any, **options: Any) -> nn.Module:
        config = getattr(model.config, "distributed_config", None)
        if not isinstance(config, ShardingConfig):
            return apply(model, *arguments, **options)
        with _sharding_by(config):
            return apply(model, *arguments, **options)

    mixin.apply_fully_sharded_data_parallelism = apply_fully_sharded_data_parallelism


install()
