"""torchtitan's configurations of Llama 3 with a strategy, for ``--config``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.models.llama3 import config_registry as llama3, parallelize_llama as torchtitan_parallelize_llama
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from fsdp_zpp.config.strategy import Strategy

from .parallelism import StrategyParallelism
from .sharding import parallelize_llama
from .trainer import StrategyTrainer

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def with_strategy(config: Trainer.Config, strategy: Strategy | None) -> StrategyTrainer.Config:
    """Return a configuration for Llama 3, sharded by a strategy.

    It also sets what a strategy needs: ``training.disable_cuda_graphs``, ``parallelism.spmd_backend``, and the loss
    inside a ChunkedLossWrapper.

    Args:
        config: The configuration; it does not change, but the result shares its sections.
        strategy: The default of ``--parallelism.strategy``.

    Raises:
        ValueError: If the model has another ``parallelize_fn`` than torchtitan's Llama 3.
    """
    spec = config.model_spec
    if spec is None or spec.parallelize_fn is not torchtitan_parallelize_llama:
        raise ValueError(
            f"with_strategy takes a configuration of torchtitan's Llama 3, got model_spec={spec!r}; for another model, "
            "write a parallelize_fn that calls fsdp_zpp.fully_shard, and build a StrategyTrainer.Config"
        )
    parallelism = StrategyParallelism(
        **_values(config.parallelism) | {"strategy": strategy, "spmd_backend": "partial_dtensor"}
    )
    loss = config.loss
    if isinstance(loss, ChunkedLossWrapper.Config):
        logger.info("With a strategy, the loss is computed at once and not in %d chunks", loss.num_chunks)
        loss = loss.loss_fn
    changed = {
        "parallelism": parallelism,
        "loss": loss,
        "training": dataclasses.replace(config.training, disable_cuda_graphs=True),
        "model_spec": dataclasses.replace(spec, parallelize_fn=parallelize_llama),
    }
    return StrategyTrainer.Config(**_values(config) | changed)


def llama3_debugmodel() -> StrategyTrainer.Config:
    """Return the configuration of torchtitan's debug model."""
    return with_strategy(llama3.llama3_debugmodel(), Strategy.zeropp())


def llama3_8b() -> StrategyTrainer.Config:
    """Return the configuration of Llama 3 8B."""
    return with_strategy(llama3.llama3_8b(), Strategy.zeropp())


def llama3_70b() -> StrategyTrainer.Config:
    """Return the configuration of Llama 3 70B, without torchtitan's tensor parallelism."""
    config = llama3.llama3_70b()
    config.parallelism.tensor_parallel_degree = 1
    return with_strategy(config, Strategy.zeropp())


def _values(section: DataclassInstance) -> dict[str, Any]:
    return {each.name: getattr(section, each.name) for each in dataclasses.fields(section)}
