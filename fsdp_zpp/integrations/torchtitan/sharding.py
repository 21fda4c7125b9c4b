"""Models of torchtitan, sharded by their own functions, in which ``fully_shard`` is fsdp_zpp's with a strategy."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchtitan.config import ParallelismConfig
from torchtitan.protocols.model_spec import ParallelizeFunction
from torchtitan.tools.logging import logger

from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.integrations._in_place_of_torchs import in_place_of_torchs, sharding_by
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
    with in_place_of_torchs(sharding_by(strategy, reshards_always=always)):
        sharded: nn.Module = parallelize_fn(model, parallelism=parallelism, **arguments)
    if all(unit_of(module) is None for module in sharded.modules()):
        raise ValueError(
            f"the parallelize_fn of this {type(model).__name__} did not call fully_shard of torch.distributed.fsdp, "
            "in whose place a strategy's shards; call it, or pass --parallelism.strategy None"
        )
    logger.info("Sharded the model by %s", strategy)
    return sharded
