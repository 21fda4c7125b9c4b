"""Mistakes in a training script that raise nothing: they train nothing, or send in every micro-batch what a step needs.

[Note: Which backwards are micro-batches]
A step may rightly follow several backwards that synchronize gradients: of several losses of one forward, of the other
half of a GAN, whose gradients are cleared, or in a script that does so once. So a backward counts only if a forward of
the whole model preceded it; the count starts anew when gradients are cleared; and a warning comes only when two steps
in a row have several, with no step of another model's optimizer between. A forward that activation checkpointing
repeats is a layer's, not the model's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from .unit import Unit
from .weight_changes import IN_OPTIMIZER

logger = logging.getLogger("fsdp_zpp")


class MistakeWatch:
    """Warns of each mistake once. See [Note: Which backwards are micro-batches].

    Args:
        root: The model.
        name: Its name in warnings.
        units: Its units.
    """

    def __init__(self, root: nn.Module, name: str, units: Sequence[Unit]) -> None:
        self._name, self._units = name, units
        self._others_stepped = self._optimizer_is_known = False
        self._backwards = self._steps_in_a_row = 0
        self._has_run = True  # FSDP sets up its model in a forward, of which hooks have been run
        root.register_forward_pre_hook(self.before_forward, prepend=True)

    def before_forward(self, root: nn.Module, *inputs: object) -> None:
        """Handle a forward of the whole model."""
        if torch.is_grad_enabled():
            self._has_run = True  # which is not read here, so that no graph is specialized on it

    def gradients_synchronized(self) -> None:
        """Handle a backward that has synchronized gradients."""
        if self._others_stepped and not self._optimizer_is_known:
            self._check_optimizer()
        self._backwards += self._has_run
        self._has_run = False

    def step_ended(self) -> None:
        """Handle a step of the model, made or skipped; of several optimizers, the first one to step ends it."""
        self._optimizer_is_known = True
        if not self._backwards:
            return
        several = self._backwards > 1 and not self._others_stepped
        self._steps_in_a_row = self._steps_in_a_row + 1 if several else 0
        if self._steps_in_a_row == 2:
            self._warn(
                "%s: each of %d backwards before an optimizer step has synchronized gradients, and sends weights and "
                "gradients that one could send; let the last one alone do so, with set_requires_gradient_sync(False) "
                "or no_sync() in the others",
                self._backwards,
            )
        self._backwards, self._others_stepped = 0, False

    def other_stepped(self) -> None:
        """Handle a step of an optimizer that holds no parameter of this model."""
        self._others_stepped = True

    def gradients_cleared(self) -> None:
        """Handle gradients of the model that no step will use."""
        self._backwards = 0

    def _check_optimizer(self) -> None:
        self._optimizer_is_known = True  # or is said to be unknown, once
        is_given = any(getattr(p, IN_OPTIMIZER, False) for unit in self._units for p in unit.sharded.parameters())
        if not is_given and any(unit.sharded.is_trained() for unit in self._units):
            self._warn(
                "%s: optimizers step, but none of torch's was given a parameter that this model has by now, so nothing "
                "trains it; sharding replaces parameters: make the optimizer after it"
            )

    def _warn(self, message: str, *values: object) -> None:
        if self._units[0].ranks.rank == 0:
            logger.warning(message, self._name, *values)
