"""Models of torchtitan, sharded by their own functions, in which ``fully_shard`` is fsdp_zpp's with a strategy.

torchtitan's functions, and those that users write like them, import torch's ``fully_shard`` by name. While they run,
every module that has that name has ours in its place, so that no model needs a copy of what torchtitan does with it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torchtitan.config import ParallelismConfig
from torchtitan.protocols.model_spec import ParallelizeFunction
from torchtitan.tools.logging import logger

from fsdp_zpp.adapters.fsdp2 import fully_shard
from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.runtime.unit import unit_of


def parallelize(
    strategy: Strategy,
    parallelize_fn: ParallelizeFunction,
    model: nn.Module,
    *,
    parallelism: ParallelismConfig,
    **arguments: Any,
) -> nn.Module:
    """Parallelize a model, or a stage of a pipeline, with its own function, and shard it by a strategy.

    Args:
        strategy: The strategy.
        parallelize_fn: The function of the model's ``ModelSpec``.
        model: The model.
        parallelism: torchtitan's parallelism section.
        **arguments: What else torchtitan passes to such a function.

    Raises:
        ValueError: If the function does not call ``fully_shard``, or the strategy can't shard with its arguments.
        NotImplementedError: If the strategy can't be combined with another parallelism.
    """
    always = parallelism.fsdp_reshard_after_forward == "always"
    with _in_place_of_torchs(_sharding_by(strategy, reshards_always=always)):
        sharded: nn.Module = parallelize_fn(model, parallelism=parallelism, **arguments)
    if all(unit_of(module) is None for module in sharded.modules()):
        raise ValueError(
            f"the parallelize_fn of this {type(model).__name__} did not call fully_shard of torch.distributed.fsdp, "
            "in whose place a strategy's shards; call it, or pass --parallelism.strategy None"
        )
    logger.info("Sharded the model by %s", strategy)
    return sharded


def _sharding_by(strategy: Strategy, *, reshards_always: bool) -> Any:
    """Return a function that takes the arguments of torch's ``fully_shard`` and shards by a strategy.

    torchtitan's default is to reshard after the forward. That is torch's default, too, and as such it is left to the
    strategy, whose parameter scope may keep the parameters.
    """

    @functools.wraps(torch_fully_shard)  # which also has its state under its name
    def fully_shard_by_strategy(module: Any, *, reshard_after_forward: Any = None, **arguments: Any) -> Any:
        if reshard_after_forward is True and not reshards_always:
            reshard_after_forward = None
        return fully_shard(module, strategy=strategy, reshard_after_forward=reshard_after_forward, **arguments)

    return fully_shard_by_strategy


@contextmanager
def _in_place_of_torchs(replacement: Any) -> Iterator[None]:
    """Return a context in which whoever has imported torch's ``fully_shard``, or does it there, has another one."""
    holders = [
        module
        for name, module in list(sys.modules.items())
        # What some packages put there is no module.
        if getattr(module, "__dict__", {}).get("fully_shard") is torch_fully_shard and not name.startswith("fsdp_zpp.")
    ]
    for module in holders:
        vars(module)["fully_shard"] = replacement
    try:
        yield
    finally:
        for module in holders:
            vars(module)["fully_shard"] = torch_fully_shard
