"""Events of a model: forwards, backwards, steps and writes, and which weights they make stale."""

from __future__ import annotations

import functools
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fsdp_zpp.comm.agreement import agree_on_use, check_agreement, check_replicas, from_each_rank, shard_signature
from fsdp_zpp.comm.hops import running_backward
from fsdp_zpp.comm.weight_gather import SecondaryShardPrefetcher, WeightGather
from fsdp_zpp.local_steps.elastic import ElasticFragment, ElasticTraining
from fsdp_zpp.local_steps.fragment import OuterWatch
from fsdp_zpp.local_steps.local_training import LocalTraining, OptimizerMoments, note_optimizer

from .monitor import Groups, log_summaries
from .unit import ParameterUnit, StrategyUnit, units_of, warn_of_unmatched

# ---- weight changes
#
# Units whose weights a training step may have changed, and whose copies are stale after it.
#
# [Note: What a step changes]
# A step may write to whatever was ever trained and to whatever an optimizer was ever given: weight decay and momentum
# move parameters that are frozen by now, and adapters that are switched off while the optimizer steps. So no decision
# hangs on what requires a gradient at the moment of asking. Once a unit is found to change, it counts as changing for
# good, and this is checked where all ranks pass: at the end of every backward and at every step.
#
# Users may leave parameters of which their rank has no element out of their optimizers. So a unit of which some rank
# has none changes with every step: it is too small for that to matter, and ranks could not tell otherwise.
#
# A step after the backward changes all units that change at all, whichever of them its optimizer holds. A step in the
# backward, by one of many optimizers, changes only those that it holds: the backward still needs the others' weights,
# and if they were stale, it would send all of them between nodes again. When gradients are synchronized, all units that
# change are declared stale, on all ranks. So ranks can differ only on a unit of which some step and others hold
# nothing, and only until then, which matters if the backward uses the unit again.

IN_OPTIMIZER = "_fsdp_zpp_in_optimizer"
"""Attribute of parameters that were given to some optimizer."""

logger = logging.getLogger("fsdp_zpp")


class WeightChanges:
    """Declares weights stale that a step may have changed. See [Note: What a step changes]."""

    def __init__(self, units: Sequence[ParameterUnit], too_small: Collection[ParameterUnit] = ()) -> None:
        self._changing = [unit for unit in units if unit in too_small]
        self._others = [unit for unit in units if unit not in too_small]
        self._has_warned = False

    def look(self, ids: Collection[int] = ()) -> None:
        """Find the units that have begun to change, some by an optimizer of ``ids``, at a point that all ranks pass."""
        others: list[ParameterUnit] = []
        untrained: list[ParameterUnit] = []
        for unit in self._others:
            if unit.sharded.is_trained():
                self._changing.append(unit)
            elif any(id(p) in ids or getattr(p, IN_OPTIMIZER, False) for p in unit.sharded.parameters()):
                self._changing.append(unit)
                untrained.append(unit)
            else:
                others.append(unit)
        self._others = others
        self._warn_of([unit for unit in untrained if unit.keeps_weights])

    def step(self, ids: Collection[int] = ()) -> None:
        """Declare the weights of units that change stale, for a step made or to come; ``ids`` as of :meth:`look`."""
        self._invalidate(ids, by_step=True)

    def step_in_backward(self, ids: Set[int]) -> None:
        """Declare the units stale that an optimizer in the backward holds a part of; ``ids`` as of :meth:`look`."""
        self.look(ids)
        for unit in self._changing:
            if not ids.isdisjoint(map(id, unit.sharded.parameters())):
                unit.invalidate(by_step=True)

    def written(self, ids: Collection[int]) -> None:
        """Declare these weights stale after other writes of an optimizer, which may change them by more."""
        self._invalidate(ids, by_step=False)

    def _invalidate(self, ids: Collection[int], *, by_step: bool) -> None:
        self.look(ids)
        for unit in self._changing:
            unit.invalidate(by_step=by_step)

    def _warn_of(self, untrained: list[ParameterUnit]) -> None:
        if not untrained or self._has_warned:
            return
        self._has_warned = True
        if untrained[0].ranks.rank == 0:
            logger.info(
                "an optimizer was given parameters of %d frozen unit%s (%s%s), which are sent anew after each of its "
                "steps; to send them once, give it only parameters that require gradients",
                len(untrained),
                "" if len(untrained) == 1 else "s",
                ", ".join(unit.sharded.name for unit in untrained[:3]),
                ", ..." if len(untrained) > 3 else "",
            )


def too_small_units(units: Sequence[StrategyUnit]) -> set[ParameterUnit]:
    """Return the units of which some rank has no element; the same on all ranks. Collective, once a mesh."""
    flags = [(unit, unit.ranks, [not any(map(local_numel, unit.sharded.parameters()))]) for unit in units]
    return {unit for unit, on_any_rank in agree_on_use(flags) if any(on_any_rank())}


def local_numel(parameter: nn.Parameter) -> int:
    return parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()


# ---- step ends
#
# The end of a model's step, of which several optimizers may make a part each, some of them in the backward.


class StepCounter(Protocol):
    def gradients_synchronized(self) -> None: ...

    def step_ended(self) -> None:
        """Handle a step on these gradients; only the first call after their synchronization counts."""


class StepEnds:
    """Tells counters when the gradients of a model's step are synchronized, and when the step has ended.

    Optimizers in the backward step on each unit's gradients before the whole model's are synchronized. Such a step ends
    with the synchronization; otherwise the first optimizer that steps after it ends the step.
    """

    def __init__(self, counters: Sequence[StepCounter]) -> None:
        self._counters = counters
        self._synchronized_in: int | None = None
        self._stepped_in: int | None = None

    def gradients_synchronized(self) -> None:
        """Handle the synchronization of a step's gradients, at the end of a backward or at a user's request."""
        backward = running_backward()
        for counter in self._counters:
            counter.gradients_synchronized()
        # A step in a nested backward, as of a reentrant checkpoint, has a larger number. A step in an earlier backward
        # that failed has a smaller one.
        if self._stepped_in is not None and (backward is None or self._stepped_in >= backward):
            self._end()
        self._synchronized_in, self._stepped_in = backward, None

    def optimizer_stepped(self) -> None:
        backward = running_backward()
        if backward is None or backward == self._synchronized_in:
            self._end()
        else:
            self._stepped_in = backward

    def _end(self) -> None:
        for counter in self._counters:
            counter.step_ended()


# ---- method hooks
#
# Hooks that run after methods of torch's classes, and that may be removed at any time.

_STEP_HOOKS = "_fsdp_zpp_step_hooks"
_HOOKS = "_fsdp_zpp_hooks"

Hook = Callable[..., None]


def register_method_post_hook(owner: type, method: str, hook: Hook) -> Callable[[], None]:
    """Run ``hook(instance, *args, **kwargs)`` after each call of a class's method; return a function that removes it.

    It does not run for a subclass that overrides the method without calling it.
    """
    hooks: dict[int, Hook] | None = getattr(getattr(owner, method), _HOOKS, None)
    if hooks is None:
        hooks = _install(owner, method)
    hooks[id(hook)] = hook
    return _remover(hooks, hook)


def register_step_hook(hook: Hook) -> Callable[[], None]:
    """Run ``hook(optimizer)`` after each step of a torch optimizer; return a function that removes it at any time."""
    # torch iterates over its step hooks as it runs them, so removing one meanwhile raises; a garbage collection could
    # do that to the hook of a model that is gone. So torch gets one hook, for good, which runs all that are added here.
    if not hasattr(Optimizer, _STEP_HOOKS):
        register_optimizer_step_post_hook(lambda optimizer, args, kwargs: run_hooks(Optimizer, _STEP_HOOKS, optimizer))
    return add_hook(Optimizer, _STEP_HOOKS, hook)


def add_hook(owner: type, name: str, hook: Hook) -> Callable[[], None]:
    """Add a hook under ``name`` of a class; return a function that removes it at any time."""
    # Hooks are kept on torch's class, where torch's own hooks are, rather than in a global of this module.
    if not hasattr(owner, name):
        setattr(owner, name, {})
    hooks: dict[int, Hook] = getattr(owner, name)
    hooks[id(hook)] = hook
    return _remover(hooks, hook)


def run_hooks(owner: type, name: str, *args: object, **kwargs: object) -> None:
    hooks: dict[int, Hook] = getattr(owner, name, {})
    for hook in list(hooks.values()):  # a copy, since a hook may be removed meanwhile
        hook(*args, **kwargs)


def _remover(hooks: dict[int, Hook], hook: Hook) -> Callable[[], None]:
    def remove(key: int = id(hook)) -> None:  # by id, so that it keeps nothing alive
        hooks.pop(key, None)

    return remove


def _install(owner: type, method: str) -> dict[int, Hook]:
    """Wrap the method, once for all hooks, which are kept on the wrapper."""
    original = getattr(owner, method)
    hooks: dict[int, Hook] = {}

    @functools.wraps(original)
    def wrapped(self: object, *args: object, **kwargs: object) -> object:
        result: object = original(self, *args, **kwargs)
        for hook in list(hooks.values()):  # a copy, since a hook may be removed meanwhile
            hook(self, *args, **kwargs)
        return result

    setattr(wrapped, _HOOKS, hooks)
    setattr(owner, method, wrapped)
    return hooks


# ---- optimizer modes
#
# Optimizers whose ``train`` and ``eval`` write to the weights, as schedule-free ones do.
#
# They train other weights than they evaluate, and parameters hold one kind at a time. torch's own optimizers have no
# such methods. Trainer calls ``train`` before each micro-batch, so a call that repeats the last one changes nothing;
# every other one is an event, which all ranks see, like a step.

_MODE_HOOKS = "_fsdp_zpp_mode_hooks"
_MODE = "_fsdp_zpp_mode"


def register_mode_hook(hook: Hook) -> Callable[[], None]:
    """Run ``hook(optimizer)`` after a torch optimizer switches between ``train`` and ``eval``; return its remover."""
    return add_hook(Optimizer, _MODE_HOOKS, hook)


def watch_modes(optimizer: Optimizer) -> None:
    """Wrap ``train`` and ``eval`` of this optimizer's class, if it has them, so that they run the hooks."""
    for mode, hook in _CALLED.items():
        if callable(getattr(type(optimizer), mode, None)):
            register_method_post_hook(type(optimizer), mode, hook)


def _called(mode: str, optimizer: Optimizer, *args: object, **kwargs: object) -> None:
    if vars(optimizer).get(_MODE) != mode:
        setattr(optimizer, _MODE, mode)
        run_hooks(Optimizer, _MODE_HOOKS, optimizer)


def _forget(optimizer: Optimizer, *args: object, **kwargs: object) -> None:
    vars(optimizer).pop(_MODE, None)  # the loaded state may have been saved in the other mode


_CALLED: dict[str, Hook] = {mode: partial(_called, mode) for mode in ("train", "eval")}
register_method_post_hook(Optimizer, "load_state_dict", _forget)


# ---- mistakes
#
# Warnings about silent mistakes: an optimizer that trains nothing, or gradient sync in every micro-batch.
#
# [Note: Which backwards are micro-batches]
# A step may rightly follow several backwards that synchronize gradients: of several losses of one forward, of the other
# half of a GAN, whose gradients are cleared, or in a script that does so once. So a backward counts only if a forward
# of the whole model preceded it; clearing gradients restarts the count; and a warning comes only when two
# steps in a row have several, with no step of another model's optimizer between. A forward that activation
# checkpointing repeats is a layer's, not the model's.


class MistakeWatch:
    """Warns of each mistake once. See [Note: Which backwards are micro-batches]."""

    def __init__(self, root: nn.Module, name: str, units: Sequence[ParameterUnit]) -> None:
        self._name, self._units = name, units
        self._others_stepped = self._optimizer_is_known = False
        self._backwards = self._steps_in_a_row = 0
        self._has_run = True  # FSDP sets up its model in a forward, whose hooks have already run
        root.register_forward_pre_hook(self.before_forward, prepend=True)

    def before_forward(self, root: nn.Module, *inputs: object) -> None:
        if torch.is_grad_enabled():
            self._has_run = True  # which is not read here, so that no graph is specialized on it

    def gradients_synchronized(self) -> None:
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


# ---- lifecycle
#
# Events in a model's life that its units react to.
#
# Weights change ([Note: Staleness] in weight_gather.py), gradients are cleared, steps are made or skipped
# ([Note: The lifetime of errors] in error_feedback.py).


class LifecycleHooks:
    """Tells the units of a model when their weights change and when their gradients are cleared.

    A backward that synchronizes gradients, a step of an optimizer, and its ``train`` and ``eval`` change all units that
    any step changes; a step in the backward, those of its optimizer. See [Note: What a step changes].
    """

    def __init__(
        self,
        units: Sequence[ParameterUnit],
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

    def _units_with(self, ids: set[int]) -> Iterator[ParameterUnit]:
        """Yield the units with parameters of an optimizer, given by ``ids``; the same on all ranks."""
        # One of several optimizers, or one that steps within the backward, clears only its own gradients.
        for unit in self._units:
            parameters = unit.sharded.parameters()
            # A rank may hold no element of a unit. Its empty parameters count like any others, but if users leave them
            # out of all optimizers, nothing tells which one they belong to: any optimizer of the model clears the unit.
            if any(id(p) in ids for p in parameters) or not any(
                local_numel(p) or getattr(p, IN_OPTIMIZER, False) for p in parameters
            ):
                yield unit

    def _holds_any(self, ids: set[int]) -> bool:
        return any(id(p) in ids for unit in self._units for p in unit.sharded.parameters())

    def backward_ended(self, synchronized: bool) -> None:
        if synchronized:
            self.gradients_synchronized()
        else:
            self._changes.look()

    def gradients_synchronized(self) -> None:
        # A step follows, and not every optimizer announces it: some are not torch's, some write through p.data or in
        # the middle of their step. Announced steps cover the case that no backward precedes a step.
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
    # item() costs no wait of its own: to decide on that step, GradScaler.step has just waited for these values.
    return any(found_inf.item() for found_inf in scaler._found_inf_per_device(optimizer).values())


def weights_moved(module: nn.Module) -> None:
    """Handle a move or a cast of the weights of ``module``'s units; a cast may change their values."""
    for unit in units_of(module):
        if isinstance(unit, StrategyUnit):
            unit.invalidate()


def _optimizer_given(optimizer: Optimizer, *args: object, **kwargs: object) -> None:
    for parameter in optimizer.param_groups[-1]["params"]:
        setattr(parameter, IN_OPTIMIZER, True)
    note_optimizer(optimizer)
    watch_modes(optimizer)


# At import: a model is watched from its first forward on, and optimizers are constructed before that.
register_method_post_hook(Optimizer, "add_param_group", _optimizer_given)


# ---- model setup
#
# Set-up of a model under strategies: its units are compared between ranks and named, and its events watched.


def set_up_model(
    root: nn.Module, model: str, units: Sequence[StrategyUnit], others: Sequence[int] = ()
) -> LifecycleHooks:
    """Compare the units of a model between ranks, name them, log what is active, and watch for events. Collective.

    ``others`` are the numbers of values of the units below ``root`` that torch alone manages.

    Raises:
        ValueError: If ranks have different units, or if ranks that hold the same part of the model hold different
            values.
    """
    # First: the collectives below hang if ranks have different units.
    _check_agreement(model, units)
    groups: Groups = defaultdict(list)
    for unit in units:
        unit.rename(unit.sharded.name)
        groups[unit.strategy, unit.ranks].append(unit)
    for (_, ranks), members in groups.items():
        # Nodes that have trained on their own hold different weights.
        if not any(unit.fragment is not None and unit.fragment.progress.apart for unit in members):
            shards = (shard for unit in members for shard in unit.sharded.shards())
            check_replicas(shards, ranks, members[0].scopes.optimizer, model)
    _check_before_forwards(root, units)
    _prefetch_secondary_shards([unit.gather for unit in units if unit.can_prefetch])
    with_weights = [unit for unit in units if unit.sharded.parameters()]  # FSDP may have left all to inner units
    changes = WeightChanges(with_weights, too_small_units(with_weights))
    hooks = LifecycleHooks(units, _train_locally(root, model, units), changes, MistakeWatch(root, model, units))
    log_summaries(model, groups, others)  # after all that may raise
    if all(unit.ranks.rank == 0 for unit in units):
        warn_of_unmatched(root, model, (pattern for unit in units for pattern in unit.patterns))
    return hooks


@contextmanager
def repeated_if_failed(root: nn.Module, set_up: Callable[[nn.Module], None]) -> Iterator[None]:
    """Call ``set_up(root)`` before the next forward if the block, which sets up a model, raises."""

    def before_forward(root: nn.Module, inputs: object) -> None:
        handle.remove()
        set_up(root)

    try:
        yield
    except Exception:
        # After a first forward that failed, torch counts the model as initialized, and would train it unchecked.
        handle = root.register_forward_pre_hook(before_forward, prepend=True)
        raise


def _train_locally(root: nn.Module, model: str, units: Sequence[StrategyUnit]) -> LocalTraining | None:
    """Have nodes exchange the fragments of a model before forwards; return None if it has none. Collective."""
    # Frozen units with a fragment count, since they may be trained later.
    concerned = [unit for unit in units if unit.fragment is not None or unit.sharded.is_trained()]
    configurations = dict.fromkeys(unit.strategy.local_steps for unit in concerned)
    if len(configurations) > 1:
        arguments = " and ".join(f"local_steps={each!r}" for each in configurations)
        raise ValueError(
            f"{model}: its parts were given {arguments}, but steps are counted for the whole model; pass the same to "
            "all parts"
        )
    fragments = {unit.fragment: unit for unit in units if unit.fragment is not None}
    if not fragments:
        return None

    def steps_are_announced() -> bool:
        return any(getattr(p, IN_OPTIMIZER, False) for unit in units for p in unit.sharded.parameters())

    reductions = [unit.reductions for unit in fragments.values()]
    ranks = next(iter(fragments.values())).ranks
    outer = OuterWatch(
        model, ranks, lambda: dict.fromkeys(axis for unit in fragments.values() for axis in unit.sharded.other_axes())
    )
    moments = OptimizerMoments(model, fragments, ranks)
    how = reductions, ranks, steps_are_announced, outer, moments
    elastic = [fragment for fragment in fragments if isinstance(fragment, ElasticFragment)]
    if elastic:
        training: LocalTraining = ElasticTraining(
            model, elastic, *how, lambda: [p for unit in units for p in unit.sharded.parameters()]
        )
    else:
        training = LocalTraining(model, [*fragments], *how)
    root.register_forward_pre_hook(training.before_forward, prepend=True)
    # FSDP sets up its model in a forward, whose hooks have already run, or for a state dict that is to be loaded.
    if all(unit.loaded_state is None for unit in fragments.values()):
        training.before_forward(root)
    for unit in fragments.values():
        unit.local_training = training
    return training


def _check_before_forwards(root: nn.Module, units: Sequence[StrategyUnit]) -> None:
    """Under FSDP_ZPP_CHECK, raise on every rank before a forward that would reuse changed weights on any rank."""
    gathers = [unit.gather for unit in units if unit.gather is not None and unit.keeps_weights]
    gathers = [gather for gather in gathers if (of := gather.secondary.source) is not None and of.compares_contents()]

    def before_forward(root: nn.Module, inputs: object) -> None:
        outdated = {gather.label for gather in gathers if gather.secondary.is_outdated}
        # The smallest groups first, so that findings on units inside a node reach all ranks of the other units.
        for group in sorted({gather.group: None for gather in gathers if gather.group}, key=dist.get_world_size):
            outdated.update(*from_each_rank(outdated, group))
        for gather in gathers:
            if gather.label in outdated:
                gather.secondary.raise_written()

    if gathers:
        root.register_forward_pre_hook(torch.compiler.disable(before_forward), prepend=True)


def _prefetch_secondary_shards(gathers: Sequence[WeightGather | None]) -> None:
    """Have one prefetcher make the secondary shards of all units whose weights can be read before their gather."""
    readable = [gather for gather in gathers if gather is not None and gather.secondary.source is not None]
    prefetcher = SecondaryShardPrefetcher(gather.secondary for gather in readable)
    for gather in readable:
        gather.prefetcher = prefetcher


def _check_agreement(model: str, units: Sequence[StrategyUnit]) -> None:
    """Raise on every rank if ranks have different units: in strategy, order, dtype or size."""
    # A dict, not a set: ranks must go through the groups in the same order, and a set's order differs by process.
    for group in dict.fromkeys(unit.ranks.group for unit in units):
        facts = {}
        for unit in units:
            if unit.ranks.group is group:
                # A node size that was left to the launcher and the same one given explicitly are no difference.
                strategy = replace(unit.strategy, gpus_per_node=unit.ranks.topology.gpus_per_node)
                facts[unit.sharded.name] = (
                    f"{strategy}, {shard_signature(unit.sharded.shards())}{', packed' * unit.packed}"
                )
        check_agreement(group, f"the first forward of {model}", facts)
