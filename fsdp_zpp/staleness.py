"""The events that units have to know of: new weights ([Note: Staleness] in weight_gather.py), dropped gradients, steps
made and skipped ([Note: The time of errors] in unit_errors.py)."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from .activity import log_activity
from .agreement import check_agreement, described
from .first_hops import FirstHopsAhead, Source
from .method_hooks import register_method_post_hook, register_step_hook
from .replicas import check_replicas
from .strategy_unit import StrategyUnit
from .unit_errors import UnitErrors
from .units import unit_of


class WatchedUnit(Protocol):
    """What the events are told to."""

    def invalidate(self, *, by_step: bool = False) -> None: ...

    def discard_gradients(self) -> None: ...

    @property
    def errors(self) -> UnitErrors | None: ...


class ModelEvents:
    """Tells the units of a model when their weights change, and when an optimizer has cleared their gradients.

    A backward that synchronizes gradients counts as a change, for a step of some optimizer will follow it, and not all
    optimizers say so: some are not torch's, some write through ``p.data`` or in the middle of their step. torch's
    announce their steps besides, which covers those that no backward precedes.

    A step changes all trainable units of the model, whichever parameters the optimizer holds: some users leave out
    those of which their rank has no element, and ranks must agree.

    Args:
        units: The units by name.
        parameters: For each unit, its parameters as an optimizer may hold them.
    """

    def __init__(self, units: Mapping[str, WatchedUnit], parameters: dict[str, list[nn.Parameter]]) -> None:
        self._units = units
        self._parameters = parameters
        self._heard: weakref.ref[GradScaler] | None = None  # the scaler that units were told of since a step
        self._identities = {id(p) for held in parameters.values() for p in held}
        events = weakref.ref(self)

        def stepped(optimizer: Optimizer) -> None:
            model = events()
            if model is not None:
                model.optimizer_stepped(optimizer)

        def cleared(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            model = events()
            if model is not None:
                model.gradients_cleared(optimizer)

        def loss_scaled(scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
            model = events()
            if model is not None and scaler.is_enabled():
                model.loss_scaled(scaler)

        def scaler_stepped(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            model = events()
            if model is not None and scaler.is_enabled():
                model.scaler_stepped(scaler, optimizer)

        # One hook each a model, which goes with it, so that there is no list of models to keep.
        weakref.finalize(self, register_step_hook(stepped))
        weakref.finalize(self, register_method_post_hook(Optimizer, "zero_grad", cleared))
        weakref.finalize(self, register_method_post_hook(GradScaler, "step", scaler_stepped))
        for kind in (GradScaler, ShardedGradScaler):
            weakref.finalize(self, register_method_post_hook(kind, "scale", loss_scaled))

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """``optimizer`` has made a step, if it is one of this model's."""
        if not self._is_of_this_model(optimizer):
            return
        self._heard = None
        self._weights_change()
        # Those that skip steps on the device, for a gradient scaler, are told by it whether to.
        self._step_made(optimizer, getattr(optimizer, "found_inf", None))

    def _step_made(self, optimizer: Optimizer, skipped: Tensor | None) -> None:
        if all(unit.errors is None for unit in self._units.values()):
            return
        units = list(self._units_of(optimizer))
        # A step without a backward is none of the training's: torch's state dicts make one to have optimizer states.
        if any(unit.errors is not None and unit.errors.unsettled for unit in units):
            for unit in units:
                if unit.errors is not None:
                    unit.errors.step_made(skipped)

    def scaler_stepped(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """``scaler`` has called the step of ``optimizer``, or skipped it, if it is one of this model's."""
        if not self._is_of_this_model(optimizer):
            return
        self._heard = None
        if not isinstance(optimizer, Optimizer) and not _found_inf(scaler, optimizer):
            self._step_made(optimizer, None)  # which would not have been heard
        for unit in self._units_of(optimizer):
            if unit.errors is not None:
                unit.errors.scaler_stepped(scaler)

    def loss_scaled(self, scaler: GradScaler) -> None:
        """``scaler`` has scaled a loss, of this or of another model."""
        # Units ask it for its scale by having it scale a 1, which is heard here, too.
        if self._heard is not None and self._heard() is scaler:
            return
        self._heard = weakref.ref(scaler)
        for unit in self._units.values():
            if unit.errors is not None:
                unit.errors.loss_scaled(scaler)

    def gradients_cleared(self, optimizer: Optimizer) -> None:
        """``optimizer`` has cleared its gradients, those of earlier micro-batches of this step too."""
        if self._is_of_this_model(optimizer):
            for unit in self._units_of(optimizer):
                unit.discard_gradients()

    def _units_of(self, optimizer: Optimizer) -> Iterator[WatchedUnit]:
        """The units of which ``optimizer`` holds a parameter: one in the backward clears one unit's gradients while
        others' still wait. A unit of which this rank has no element goes with any optimizer of its model.
        """
        in_optimizer = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, unit in self._units.items():
            parameters = self._parameters[name]
            # In this order a look at one parameter mostly does: to ask all of them takes long.
            if any(id(p) in in_optimizer and _local_numel(p) for p in parameters) or not any(
                map(_local_numel, parameters)
            ):
                yield unit

    def _is_of_this_model(self, optimizer: Optimizer) -> bool:
        return any(id(p) in self._identities for group in optimizer.param_groups for p in group["params"])

    def gradients_synchronized(self) -> None:
        """A backward has left gradients for a step to come."""
        self._weights_change()

    def _weights_change(self) -> None:
        for name, unit in self._units.items():
            if any(parameter.requires_grad for parameter in self._parameters[name]):
                unit.invalidate(by_step=True)


def _local_numel(parameter: nn.Parameter) -> int:
    """Elements that this rank holds."""
    return parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()


def _found_inf(scaler: GradScaler, optimizer: Any) -> bool:
    """Whether a scaler has skipped the step of an optimizer; it has waited for that itself."""
    return any(found.item() for found in scaler._found_inf_per_device(optimizer).values())


def gradients_cleared(model: nn.Module) -> None:
    """``model.zero_grad()`` has cleared the gradients of a model or a part of one."""
    for module in model.modules():
        unit = unit_of(module)
        if isinstance(unit, StrategyUnit):
            unit.discard_gradients()


def watch(
    model: str,
    units: dict[str, StrategyUnit],
    parameters: dict[str, list[nn.Parameter]],
    shards: dict[str, list[Tensor]],
    sources: dict[str, Source],
) -> ModelEvents:
    """Name the units of a model, log what is active, compare them between ranks, and start to watch for events.

    Args:
        model: The model's name in the log line.
        units: Its units by name.
        parameters: For each unit, its parameters as an optimizer may hold them.
        shards: For each unit, what this rank holds of it.
        sources: For each unit that has weights, where they are to be had from ahead of their gather.

    Raises:
        ValueError: If ranks have different units, or those that hold the same part of the model different values.
    """
    _check_agreement(model, units, shards)
    groups = defaultdict(list)
    for name, unit in units.items():
        unit.rename(name)
        groups[unit.strategy, unit.mesh].append(name)
    for (strategy, mesh), members in groups.items():
        errors = sum(_error_nbytes(units[name], parameters[name], shards[name]) for name in members)
        log_activity(strategy, mesh, model, len(members), errors)
        held = (shard for name in members for shard in shards[name])
        check_replicas(held, mesh, units[members[0]].levels.optimizer, model)
    kept = [(unit.gather, sources[name]) for name, unit in units.items() if unit.keeps_first_hop and name in sources]
    FirstHopsAhead((gather, source) for gather, source in kept if gather is not None)
    return ModelEvents(units, parameters)


def _check_agreement(model: str, units: Mapping[str, StrategyUnit], shards: Mapping[str, list[Tensor]]) -> None:
    """Raise on every rank if ranks have different units: in strategy, order, dtype or size."""
    for group in dict.fromkeys(unit.mesh.group for unit in units.values()):
        facts = {}
        for name, unit in units.items():
            if unit.mesh.group is group:
                strategy = replace(unit.strategy, gpus_per_node=unit.mesh.topology.gpus_per_node)
                facts[name] = f"{strategy}, {described(shards[name])}"
        check_agreement(group, f"the first forward of {model}", facts)


def _error_nbytes(unit: StrategyUnit, parameters: list[nn.Parameter], shards: list[Tensor]) -> int:
    """Bytes that error feedback will take for a unit."""
    if unit.reduce is None or not any(parameter.requires_grad for parameter in parameters):
        return 0
    return unit.reduce.error_nbytes(sum(shard.numel() for shard in shards))
