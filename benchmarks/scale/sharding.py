"""Sharding of a model by either of torch's FSDPs, under a strategy of fsdp_zpp or one of torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard as torch_fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_zpp import Strategy, fully_shard


def shard(
    model: nn.Module,
    units: Sequence[nn.Module | list[nn.Module]],
    adapter: str,
    strategy: Strategy | str,
    dtype: torch.dtype | None = None,
    mesh: DeviceMesh | None = None,
) -> nn.Module:
    """Shard a model on the CPU.

    Args:
        model: Model, whose root is a unit, too.
        units: Modules of it, all of one class; lists of them under ``fully_shard``.
        adapter: ``"fsdp1"`` or ``"fsdp2"``.
        strategy: A strategy, or the name of one of torch's own.
        dtype: Dtype of computation and reductions; None leaves that of the parameters.
        mesh: Mesh for torch's own strategies under ``fully_shard``.
    """
    is_torchs = not isinstance(strategy, Strategy)
    if adapter == "fsdp1":
        return FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy[strategy] if is_torchs else strategy,
            auto_wrap_policy=ModuleWrapPolicy({type(units[0])}),
            mixed_precision=None if dtype is None else MixedPrecision(param_dtype=dtype, reduce_dtype=dtype),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    to_unit: Callable[..., Any] = partial(fully_shard, strategy=strategy, mp_policy=policy)
    if is_torchs:
        to_unit = partial(torch_fully_shard, mesh=mesh, mp_policy=policy)
    for module in (*units, model):
        to_unit(module)
    return model
