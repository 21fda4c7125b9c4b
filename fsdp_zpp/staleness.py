"""The events that units have to know of: new weights ([Note: Staleness] in weight_gather.py), dropped gradients, steps
made and skipped ([Note: The time of errors] in unit_errors.py)."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from .activity import log_activity
from .agreement import check_agreement, described
from .first_hops import FirstHopsAhead
from .managed_unit import ManagedUnit
from .method_hooks import register_method_post_hook, register_step_hook
from .replicas import check_replicas
from .strategy_unit import StrategyUnit
from .unit_errors import UnitErrors
from .units import unit_of

_IN_OPTIMIZER = "_fsdp_zpp_in_optimizer"


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
        units: The units of the model.
    """

    def __init__(self, units: Sequence[ManagedUnit[WatchedUnit]]) -> None:
        self._units = units
        self._heard: weakref.ref[GradScaler] | None = None  # the scaler that units were told of since a step
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

        def module_cleared(module: nn.Module, set_to_none: bool = True) -> None:
            model = events()
            if model is not None:
                model.module_cleared(module, set_to_none)

        # One hook each a model, which goes with it, so that there is no list of models to keep.
        weakref.finalize(self, register_step_hook(stepped))
        weakref.finalize(self, register_method_post_hook(Optimizer, "zero_grad", cleared))
        weakref.finalize(self, register_method_post_hook(nn.Module, "zero_grad", module_cleared))
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
        if all(managed.unit.errors is None for managed in self._units):
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
        for managed in self._units:
            if managed.unit.errors is not None:
                managed.unit.errors.loss_scaled(scaler)

    def gradients_cleared(self, optimizer: Optimizer) -> None:
        """``optimizer`` has cleared its gradients, those of earlier micro-batches of this step too."""
        if self._is_of_this_model(optimizer):
            for unit in self._units_of(optimizer):
                unit.discard_gradients()

    def module_cleared(self, module: nn.Module, set_to_none: bool) -> None:
        """``module.zero_grad()`` has cleared the gradients of the model or of a part of it, wrapped or not."""
        cleared = {id(part) for part in (*module.parameters(), *module.modules())}
        for managed in self._units:
            parameters = managed.parameters()
            # While a unit is unsharded, its modules show other tensors than those whose gradients an optimizer reads.
            hidden = [
                parameter
                for parameter, owners in zip(parameters, managed.owners(), strict=False)
                if any(id(owner) in cleared for owner in owners)
            ]
            for parameter in hidden:
                _clear_gradient(parameter, set_to_none)
            if hidden or any(id(parameter) in cleared for parameter in parameters):
                managed.unit.discard_gradients()

    def _units_of(self, optimizer: Optimizer) -> Iterator[WatchedUnit]:
        """The units of which ``optimizer`` holds a parameter; the same on all ranks.

        An optimizer in the backward, or one of several, clears only its own units' gradients; those of others stay. A
        rank may hold no element of a unit; its empty parameters count like any others. If no optimizer has them, as
        users sometimes leave them out, nothing tells which one they belong to, and any optimizer of the model clears
        the unit.
        """
        in_optimizer = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for managed in self._units:
            parameters = managed.parameters()
            if any(id(p) in in_optimizer for p in parameters) or not any(
                _local_numel(p) or getattr(p, _IN_OPTIMIZER, False) for p in parameters
            ):
                yield managed.unit

    def _is_of_this_model(self, optimizer: Optimizer) -> bool:
        in_optimizer = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return any(id(p) in in_optimizer for managed in self._units for p in managed.parameters())

    def gradients_synchronized(self) -> None:
        """A backward has left gradients for a step to come."""
        self._weights_change()

    def _weights_change(self) -> None:
        for managed in self._units:
            if managed.is_trained:
                managed.unit.invalidate(by_step=True)


@torch.no_grad()
def _clear_gradient(parameter: nn.Parameter, set_to_none: bool) -> None:
    if set_to_none:
        parameter.grad = None
    elif parameter.grad is not None:
        parameter.grad.zero_()


def _local_numel(parameter: nn.Parameter) -> int:
    """Elements that this rank holds."""
    return parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()


def _found_inf(scaler: GradScaler, optimizer: Any) -> bool:
    """Whether a scaler has skipped the step of an optimizer; it has waited for that itself."""
    return any(found.item() for found in scaler._found_inf_per_device(optimizer).values())


def weights_moved(module: nn.Module) -> None:
    """Handle a move or cast of the weights of ``module``'s unit, which may also change their values."""
    unit = unit_of(module)
    if isinstance(unit, StrategyUnit):
        unit.invalidate()


def watch(model: str, units: Sequence[ManagedUnit[StrategyUnit]]) -> ModelEvents:
    """Name the units of a model, log what is active, compare them between ranks, and start to watch for events.

    Args:
        model: The model's name in the log line.
        units: Its units.

    Raises:
        ValueError: If ranks have different units, or those that hold the same part of the model different values.
    """
    _check_agreement(model, units)
    groups = defaultdict(list)
    for managed in units:
        managed.unit.rename(managed.name)
        groups[managed.unit.strategy, managed.unit.mesh].append(managed)
    for (strategy, mesh), members in groups.items():
        log_activity(strategy, mesh, model, len(members), sum(map(_error_nbytes, members)))
        held = (shard for managed in members for shard in managed.shards())
        check_replicas(held, mesh, members[0].unit.levels.optimizer, model)
    kept = ((managed.unit.gather, managed.source) for managed in units if managed.unit.keeps_first_hop)
    FirstHopsAhead((gather, source) for gather, source in kept if gather is not None and source is not None)
    return ModelEvents(units)


def _check_agreement(model: str, units: Sequence[ManagedUnit[StrategyUnit]]) -> None:
    """Raise on every rank if ranks have different units: in strategy, order, dtype or size."""
    for group in dict.fromkeys(managed.unit.mesh.group for managed in units):
        facts = {}
        for managed in units:
            unit = managed.unit
            if unit.mesh.group is group:
                strategy = replace(unit.strategy, gpus_per_node=unit.mesh.topology.gpus_per_node)
                facts[managed.name] = f"{strategy}, {described(managed.shards())}"
        check_agreement(group, f"the first forward of {model}", facts)


def _error_nbytes(managed: ManagedUnit[StrategyUnit]) -> int:
    """Bytes that error feedback will take for a unit."""
    reduce = managed.unit.reduce
    if reduce is None or not managed.is_trained:
        return 0
    return reduce.error_nbytes(sum(shard.numel() for shard in managed.shards()))


def _tag_parameters(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
    """Mark the parameters that were just added to an optimizer."""
    for parameter in optimizer.param_groups[-1]["params"]:
        setattr(parameter, _IN_OPTIMIZER, True)


# At import, since optimizers are constructed before a model's first forward, when its events are first watched.
register_method_post_hook(Optimizer, "add_param_group", _tag_parameters)
