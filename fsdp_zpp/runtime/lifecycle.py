"""Events in a model's life that its units react to.

Weights change ([Note: Staleness] in secondary_shard.py), gradients are cleared, steps are made or skipped
([Note: The lifetime of errors] in error_state.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim.optimizer import Optimizer

from fsdp_zpp.collectives._torch_autograd import running_backward

from .local_training import LocalTraining
from .made_optimizers import note_optimizer
from .method_hooks import Hook, register_method_post_hook, register_step_hook
from .mistakes import MistakeWatch
from .optimizer_modes import register_mode_hook, watch_modes
from .step_ends import StepEnds
from .unit import StrategyUnit, Unit, units_of
from .weight_changes import IN_OPTIMIZER, WeightChanges, local_numel


class LifecycleHooks:
    """Tells the units of a model when their weights change and when their gradients are cleared.

    Weights change with a backward that synchronizes gradients, with a step of an optimizer, and with its ``train`` and
    ``eval``, if it has them (optimizer_modes.py). Each changes all units that any step changes, except a step in the
    backward, which changes those that its optimizer holds; see [Note: What a step changes] in weight_changes.py.

    Args:
        units: The units of the model.
        local_training: Counts the steps of a model whose nodes train on their own.
        changes: Declares weights stale; None makes one for units of which every rank has elements.
        mistakes: Warns of what trains nothing.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        local_training: LocalTraining | None = None,
        changes: WeightChanges | None = None,
        mistakes: MistakeWatch | None = None,
    ) -> None:
        self._units = units
        self._changes = WeightChanges(units) if changes is None else changes
        self._mistakes = mistakes
        self._local_training = local_training
        self._steps = StepEnds([each for each in (mistakes, local_training) if each is not None])
        self._last_scaler: weakref.ref[GradScaler] | None = None  # of which units were told since the last step
        # Each model has hooks of its own, which go when it goes, so no global list of models is needed.
        weakref.finalize(self, register_step_hook(_weak(self.optimizer_stepped)))
        weakref.finalize(self, register_mode_hook(_weak(self.optimizer_switched)))
        weakref.finalize(self, register_method_post_hook(Optimizer, "zero_grad", _weak(self.gradients_cleared)))
        weakref.finalize(self, register_method_post_hook(nn.Module, "zero_grad", _weak(self.module_cleared)))
        weakref.finalize(self, register_method_post_hook(GradScaler, "step", _weak(self.scaler_stepped)))
        # ShardedGradScaler inherits step, but overrides scale without calling GradScaler's.
        for kind in (GradScaler, ShardedGradScaler):
            weakref.finalize(self, register_method_post_hook(kind, "scale", _weak(self.loss_scaled)))

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Handle a step of ``optimizer``, which may be another model's."""
        ids = _parameter_ids(optimizer)
        if not self._holds_any(ids):
            if self._mistakes is not None:
                self._mistakes.other_stepped()
            return
        self._last_scaler = None  # with a step units forget the scaler, so they must be told of it again
        if running_backward() is None:
            self._changes.step(ids)
        else:
            self._changes.step_in_backward(ids)
        self._step_ended(optimizer)
        # A fused optimizer skips a step on the device: GradScaler sets found_inf on it for as long as step() runs.
        self._step_made(ids, getattr(optimizer, "found_inf", None))

    def optimizer_switched(self, optimizer: Optimizer) -> None:
        """Handle a change of ``optimizer``, which may be another model's, between training and evaluation."""
        ids = _parameter_ids(optimizer)
        if self._holds_any(ids):
            self._changes.written(ids)

    def _step_ended(self, optimizer: object) -> None:
        if self._local_training is not None:
            self._local_training.moments.saw(optimizer)
        self._steps.optimizer_stepped()

    def _step_made(self, ids: set[int], skipped: Tensor | None) -> None:
        if all(unit.errors is None for unit in self._units):
            return
        units = list(self._units_with(ids))
        # A step without a backward is not part of training: torch's state dicts make one to initialize optimizer state.
        if any(unit.errors is not None and unit.errors.has_uncommitted for unit in units):
            for unit in units:
                if unit.errors is not None:
                    unit.errors.step_made(skipped)

    def scaler_stepped(self, scaler: GradScaler, optimizer: Optimizer, *args: object, **kwargs: object) -> None:
        """Handle ``scaler.step(optimizer)``, which has made a step or skipped it; it may be another model's."""
        if not scaler.is_enabled():
            return
        ids = _parameter_ids(optimizer)
        if not self._holds_any(ids):
            return
        self._last_scaler = None
        self._step_ended(optimizer)
        if not isinstance(optimizer, Optimizer) and not _found_inf(scaler, optimizer):
            self._step_made(ids, None)  # an optimizer that is not torch's runs no step hook
        for unit in self._units_with(ids):
            if unit.errors is not None:
                unit.errors.scaler_stepped(scaler)

    def loss_scaled(self, scaler: GradScaler, *args: object, **kwargs: object) -> None:
        """Handle ``scaler.scale(loss)``, the loss of this or of another model."""
        # Units read the scale by having the scaler scale a 1, which calls this again.
        if not scaler.is_enabled() or (self._last_scaler is not None and self._last_scaler() is scaler):
            return
        self._last_scaler = weakref.ref(scaler)
        for unit in self._units:
            if unit.errors is not None:
                unit.errors.loss_scaled(scaler)

    def gradients_cleared(self, optimizer: Optimizer, *args: object, **kwargs: object) -> None:
        """Handle ``optimizer.zero_grad()``; it also drops what earlier micro-batches of the step have accumulated."""
        ids = _parameter_ids(optimizer)
        if self._holds_any(ids):
            if self._mistakes is not None:
                self._mistakes.gradients_cleared()
            for unit in self._units_with(ids):
                unit.drop_gradients()

    def module_cleared(self, module: nn.Module, set_to_none: bool = True) -> None:
        """Handle ``module.zero_grad()`` of the model or of a part of it, wrapped or not."""
        cleared = {id(part) for part in (*module.parameters(), *module.modules())}
        for unit in self._units:
            parameters = unit.sharded.parameters()
            # While a unit is unsharded, its modules show other tensors than the optimizer holds, so zero_grad has not
            # reached the gradients that the optimizer will read.
            owned = zip(parameters, unit.sharded.parameter_owners(), strict=False)  # owners may be empty
            hidden = [parameter for parameter, owners in owned if any(id(owner) in cleared for owner in owners)]
            for parameter in hidden:
                _clear_gradient(parameter, set_to_none)
            if hidden or any(id(parameter) in cleared for parameter in parameters):
                unit.drop_gradients()
                if self._mistakes is not None:
                    self._mistakes.gradients_cleared()

    def _units_with(self, ids: set[int]) -> Iterator[Unit]:
        """Yield the units of which an optimizer with parameters of these ``ids`` holds one; the same on all ranks."""
        # Not all: one of several optimizers, or one that steps within the backward, clears its own gradients alone.
        for unit in self._units:
            parameters = unit.sharded.parameters()
            # A rank may hold no element of a unit. Its empty parameters count like any others, but if users leave them
            # out of all optimizers, nothing tells which one they belong to: any optimizer of the model clears the unit.
            if any(id(p) in ids for p in parameters) or not any(
                local_numel(p) or getattr(p, IN_OPTIMIZER, False) for p in parameters
            ):
                yield unit

    def _holds_any(self, ids: set[int]) -> bool:
        """Return whether an optimizer with these parameters is one of this model's."""
        return any(id(p) in ids for unit in self._units for p in unit.sharded.parameters())

    def backward_ended(self, synchronized: bool) -> None:
        """Handle the end of a backward, which may have synchronized gradients."""
        if synchronized:
            self.gradients_synchronized()
        else:
            self._changes.look()

    def gradients_synchronized(self) -> None:
        """Handle a backward that has synchronized gradients, for a step to come."""
        # A step follows, and not every optimizer announces it: some are not torch's, some write through p.data or in
        # the middle of their step. Those that do announce it cover steps that no backward precedes.
        self._changes.step()
        self._steps.gradients_synchronized()


def _weak(method: Callable[..., None]) -> Hook:
    """Return a bound method as a hook that does not keep its object alive."""
    # Hooks are kept on torch's classes: a strong reference would keep a model's units alive there, and the finalizers
    # that remove the hooks would never run.
    reference = weakref.WeakMethod(method)

    def hook(*args: object, **kwargs: object) -> None:
        bound = reference()
        if bound is not None:
            bound(*args, **kwargs)

    return hook


def _parameter_ids(optimizer: Optimizer) -> set[int]:
    """Return the ids of an optimizer's parameters."""
    ids: set[int] = set()
    for group in optimizer.param_groups:
        ids.update(map(id, group["params"]))  # in C, since this runs twice a step
    return ids


@torch.no_grad()
def _clear_gradient(parameter: nn.Parameter, set_to_none: bool) -> None:
    if set_to_none:
        parameter.grad = None
    elif parameter.grad is not None:
        parameter.grad.zero_()


def _found_inf(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Return whether a scaler has skipped the step of an optimizer."""
    # item() costs no wait of its own: to decide on that step, GradScaler.step has just waited for these values.
    return any(found_inf.item() for found_inf in scaler._found_inf_per_device(optimizer).values())


def weights_moved(module: nn.Module) -> None:
    """Handle a move or a cast of the weights of ``module``'s units; a cast may change their values."""
    for unit in units_of(module):
        if isinstance(unit, StrategyUnit):
            unit.invalidate()


def _optimizer_given(optimizer: Optimizer, *args: object, **kwargs: object) -> None:
    """Mark the parameters of the group that was just added to an optimizer, which is its last."""
    for parameter in optimizer.param_groups[-1]["params"]:
        setattr(parameter, IN_OPTIMIZER, True)
    note_optimizer(optimizer)
    watch_modes(optimizer)


# At import: a model is watched from its first forward on, and optimizers are constructed before that.
register_method_post_hook(Optimizer, "add_param_group", _optimizer_given)
