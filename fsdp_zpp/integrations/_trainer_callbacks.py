"""Callbacks of a Trainer: one that announces what others write, and one that logs what the model communicates.

A Trainer's callbacks may write to models that they hold, as TRL's ``SyncRefModelCallback`` averages a reference.

A script can't call ``invalidate`` after them. But all ranks run the same callbacks, so the models that one of them
holds count as written to at the end of each step.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback

from fsdp_zpp.runtime.api import invalidate
from fsdp_zpp.runtime.monitor import Monitor, monitor
from fsdp_zpp.runtime.unit import named_units

from .accelerate import reshard


class AnnouncesWrites(TrainerCallback):
    """Declares the weights of models that other callbacks hold stale.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_optimizer_step(self, *arguments: object, **others: object) -> None:
        """Reshard the models, so that the callbacks write to their shards."""
        for model in self._held():
            reshard(model)

    def on_step_begin(self, *arguments: object, **others: object) -> None:
        """Declare the weights stale, since callbacks may have written to them at the end of the last step."""
        self.announce()

    def announce(self) -> None:
        """Declare the weights stale."""
        for model in self._held():
            invalidate(model)

    def _held(self) -> Iterator[nn.Module]:
        for callback in self._trainer.callback_handler.callbacks:
            for value in vars(callback).values():
                # The trained model's own weights are stale after each step anyway.
                if isinstance(value, nn.Module) and value is not self._trainer.model and named_units(value):
                    yield value


class MonitorCallback(TrainerCallback):
    """Logs what :func:`fsdp_zpp.monitor` says of a trainer's model, by names that begin with ``fsdp_zpp/``.

    Args:
        trainer: The trainer, which has a strategy.

    Examples:
        >>> trainer = use_strategy(Trainer(model, arguments, ...), Strategy.zeropp())
        >>> trainer.add_callback(MonitorCallback(trainer))
    """

    def __init__(self, trainer: Trainer) -> None:
        self._handler = trainer.callback_handler
        self._monitor: Monitor | None = None
        self._figures: dict[str, float] = {}

    def on_train_begin(self, *arguments: object, **others: Any) -> None:
        """Begin to measure, now that the model is sharded."""
        # First, so that those who report to TensorBoard and the like find the figures in the logs.
        self._handler.callbacks.remove(self)
        self._handler.callbacks.insert(0, self)
        self._close()  # for a training that has failed does not end
        self._monitor = monitor(others["model"])

    def on_step_end(self, *arguments: object, **others: object) -> None:
        """End a step of the optimizer."""
        if self._monitor is not None:
            self._figures = self._monitor.step()

    def on_log(self, *arguments: object, **others: Any) -> None:
        """Add the figures of the latest step to those of the training."""
        logs: MutableMapping[str, float] = others["logs"]
        if "loss" in logs:
            logs.update({f"fsdp_zpp/{name}": figure for name, figure in self._figures.items()})

    def on_train_end(self, *arguments: object, **others: object) -> None:
        """End the measurement."""
        self._close()

    def _close(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
