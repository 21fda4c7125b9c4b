"""The events that make the secondary shards of a model stale; see [Note: Staleness] in weight_gather.py."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from .activity import log_activity
from .strategy_unit import StrategyUnit


class ModelEvents:
    """Tells the units of a model when their weights change.

    torch's optimizers announce their steps. Other optimizers don't, so until a unit has been seen in a step,
    every backward that synchronizes gradients counts as one, for a step must follow it. Afterwards it doesn't:
    accumulating gradients while synchronizing them costs no gather between nodes.

    Args:
        units: The units by name.
        parameters: For each unit, its parameters as an optimizer may hold them.
    """

    def __init__(self, units: dict[str, StrategyUnit], parameters: dict[str, list[nn.Parameter]]) -> None:
        self._units = units
        self._parameters = parameters
        self._unit_of_parameter = {id(p): name for name, held in parameters.items() for p in held}
        self._announced: set[str] = set()
        events = weakref.ref(self)

        def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            model = events()
            if model is not None:
                model.optimizer_stepped(optimizer)

        # One hook a model, which goes with it, so that there is no list of models to keep.
        weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """The weights that ``optimizer`` holds have changed, on every rank: also on those that hold only padding."""
        held = (id(p) for group in optimizer.param_groups for p in group["params"])
        stepped = {self._unit_of_parameter[p] for p in held if p in self._unit_of_parameter}
        self._announced |= stepped
        for name in stepped:
            self._units[name].invalidate()

    def gradients_synchronized(self) -> None:
        """A backward has left gradients for a step to come."""
        for name, unit in self._units.items():
            trainable = any(parameter.requires_grad for parameter in self._parameters[name])
            if trainable and name not in self._announced:
                unit.invalidate()


def watch(model: str, units: dict[str, StrategyUnit], parameters: dict[str, list[nn.Parameter]]) -> ModelEvents:
    """Name the units of a model, log what is active, and start to watch for events.

    Args:
        model: The model's name in the log line.
        units: Its units by name.
        parameters: For each unit, its parameters as an optimizer may hold them.
    """
    groups = defaultdict(list)
    for name, unit in units.items():
        unit.rename(name)
        groups[unit.strategy, unit.mesh].append(unit)
    for (strategy, mesh), members in groups.items():
        log_activity(strategy, mesh, model, len(members))
    return ModelEvents(units, parameters)
