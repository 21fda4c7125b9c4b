"""A Trainer's callbacks may write to models that they hold, as TRL's ``SyncRefModelCallback`` averages a reference.

A script can't call ``invalidate`` after them. But all ranks run the same callbacks, so the models that one of them
holds count as written to at the end of each step.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import Trainer, TrainerCallback

from fsdp_zpp.runtime.api import invalidate
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
