"""torchtitan's configurations with a strategy, for ``--config``: any of its models', by the names that they have there.

torchtitan looks a configuration up as an attribute of this module, and lists ``dir()`` of it if there is none.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan import models
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from fsdp_zpp.config.strategy import Strategy

from .parallelism import StrategyParallelism
from .trainer import StrategyTrainer

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def with_strategy(config: Trainer.Config, strategy: Strategy | None) -> StrategyTrainer.Config:
    """Return a configuration of any model of torchtitan, sharded by a strategy.

    It also sets what a strategy needs: ``training.disable_cuda_graphs``, and the loss inside a ChunkedLossWrapper.

    Args:
        config: The configuration; it does not change, but the result shares its sections.
        strategy: The default of ``--parallelism.strategy``.

    Raises:
        TypeError: If it is a configuration of another trainer than torchtitan's ``Trainer``.
    """
    if type(config) is not Trainer.Config:
        raise TypeError(
            f"with_strategy takes a configuration of torchtitan's Trainer, got a {type(config).__qualname__}; for "
            "another trainer, write a class Own(StrategyTrainer, ThatTrainer), whose Config is that trainer's with "
            "parallelism: StrategyParallelism"
        )
    loss = config.loss
    if isinstance(loss, ChunkedLossWrapper.Config):
        logger.info("With a strategy, the loss is computed at once and not in %d chunks", loss.num_chunks)
        loss = loss.loss_fn
    changed = {
        "parallelism": StrategyParallelism(**_values(config.parallelism) | {"strategy": strategy}),
        "loss": loss,
        "training": dataclasses.replace(config.training, disable_cuda_graphs=True),
    }
    return StrategyTrainer.Config(**_values(config) | changed)


def __getattr__(name: str) -> Callable[[], StrategyTrainer.Config]:
    """Return the function that makes torchtitan's configuration of this name, with ZeRO++ as the default strategy."""
    missing = []
    for module in () if name.startswith("_") else _REGISTRIES:
        try:
            own = _configurations(module).get(name)
        except ImportError as error:  # of what this model alone needs
            missing.append(f"{module} ({error})")
            continue
        if own is not None:
            return partial(_with_default, own)
    if missing:
        logger.warning("Did not look for the configuration %s in %s", name, ", ".join(missing))
    raise AttributeError(f"none of torchtitan's models has a configuration {name!r}")


def __dir__() -> list[str]:
    names = ["with_strategy"]
    for module in _REGISTRIES:
        with suppress(ImportError):
            names += _configurations(module)
    return names


_REGISTRIES = [
    f"{models.__name__}.{path.parent.name}.{path.stem}"
    for path in sorted(Path(models.__path__[0]).glob("*/config_registry.py"))
]
"""Modules in which torchtitan's models have their configurations."""


def _configurations(registry: str) -> dict[str, Callable[[], Trainer.Config]]:
    """Return the configurations of a model by name: the functions of its registry that take nothing."""
    module = importlib.import_module(registry)
    return {
        name: function
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == registry and not name.startswith("_") and not inspect.signature(function).parameters
    }


def _with_default(own: Callable[[], Trainer.Config]) -> StrategyTrainer.Config:
    return with_strategy(own(), Strategy.zeropp())


def _values(section: DataclassInstance) -> dict[str, Any]:
    return {each.name: getattr(section, each.name) for each in dataclasses.fields(section)}
