"""Events of a model: forwards, backwards, steps and writes, and which weights they make stale."""

from __future__ import annotations

import functools
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fsdp_zpp.comm.agreement import all_reduce_flags, check_agreement, check_replicas, from_each_rank, shard_signature
from fsdp_zpp.comm.hops import running_backward
from fsdp_zpp.comm.weight_gather import SecondaryShardPrefetcher
from fsdp_zpp.local_steps.elastic import ElasticFragment, ElasticTraining
from fsdp_zpp.local_steps.local_training import LocalTraining, OptimizerMoments, note_optimizer

from .log_line import Groups, log_summaries
from .unit import ParameterUnit, StrategyUnit, units_of, warn_of_unmatched

# ---- step tracker
#
# [Note: What a step changes]
# A step may write to whatever was ever trained and to whatever an optimizer was ever given: weight decay and momentum
# move parameters that are frozen by now, and adapters that are switched off while the optimizer steps. So no decision
# hangs on what requires a gradient at the moment of asking. Once a unit is found to change, it counts as changing for
# good, and this is checked where all ranks pass: at the end of every backward and at every step.
#
# Users may leave parameters of which their rank has no element out of their optimizers. So a unit of which some rank
# holds no element counts as changed by every step: it is too small for that to matter, and that rank could not tell.
#
# A step after the backward changes all units that change at all, whichever of them its optimizer holds. A step in the
# backward, by one of many optimizers, changes only those that it holds: the backward still needs the others' weights,
# and if they were stale, it would send all of them between nodes again. When gradients are synchronized, all units that
# change are declared stale, on all ranks. Until then, ranks can differ on a unit that some ranks step and others hold
# nothing of. This matters only if the backward uses the unit again.
#
# [Note: The end of a step]
# Several optimizers may make a part of a step each. Optimizers in the backward step on each unit's gradients before the
# whole model's are synchronized; such a step ends with the synchronization. Otherwise a step ends with the first
# optimizer that steps after the synchronization.
#
# [Note: Which backwards are micro-batches]
# A step may rightly follow several backwards that synchronize gradients: one forward may have several losses, the other
# half of a GAN has its own, whose gradients are cleared, and a script may do so just once. So a backward counts only if
# a forward of the whole model preceded it; clearing gradients restarts the count; and a warning comes only when two
# steps in a row have several, with no step of another model's optimizer between. A forward that activation
# checkpointing repeats is a layer's, not the model's.

IN_OPTIMIZER = "_fsdp_zpp_in_optimizer"
"""Attribute of parameters that were given to some optimizer."""

logger = logging.getLogger("fsdp_zpp")


class StepTracker:
    """Hears of backwards, steps and cleared gradients, tells the units of a model, and warns of mistakes once each.

    Without a ``root``, whose name is ``model``, it warns of nothing. Units in ``too_small`` are those of which some
    rank holds no part.
    """

    def __init__(
        self,
        units: Sequence[ParameterUnit],
        root: nn.Module | None = None,
        model: str = "",
        local_training: LocalTraining | None = None,
        too_small: Collection[ParameterUnit] = (),
    ) -> None:
        self._units, self._model, self._local_training = units, model, local_training
        # See [Note: What a step changes].
        self._changing = [unit for unit in units if unit in too_small]
        # A unit whose parameters FSDP has left to inner units never changes.
        self._others = [unit for unit in units if unit not in too_small and unit.sharded.parameters()]
        # See [Note: The end of a step].
        self._synchronized_in: int | None = None
        self._stepped_in: int | None = None
        # See [Note: Which backwards are micro-batches].
        self._others_stepped = self._optimizer_is_known = False
        self._backwards = self._steps_in_a_row = 0
        self._has_run = True  # FSDP sets up its model in a forward, whose hooks have already run
        if root is not None:
            root.register_forward_pre_hook(self._before_forward, prepend=True)
        _listen()
        _trackers.add(self)

    # ---- events of the model

    def _before_forward(self, root: nn.Module, *inputs: object) -> None:
        if torch.is_grad_enabled():
            self._has_run = True  # only written here: a compiled graph would be specialized on a value that it reads

    def backward_ended(self, synchronized: bool) -> None:
        if synchronized:
            self.gradients_synchronized()
        else:
            self._find_changing()

    def gradients_synchronized(self) -> None:
        """Handle the synchronization of a step's gradients, at the end of a backward or at a user's request."""
        # A step follows, and not every optimizer announces it: some are not torch's, some write through p.data or in
        # the middle of their step. Announced steps cover the case that no backward precedes a step.
        self._make_stale()
        if self._others_stepped and not self._optimizer_is_known:
            self._check_optimizer()
        self._backwards += self._has_run
        self._has_run = False
        if self._local_training is not None:
            self._local_training.gradients_synchronized()
        backward = running_backward()
        # A step in a nested backward, as of a reentrant checkpoint, has a larger number. A step in an earlier backward
        # that failed has a smaller one.
        if self._stepped_in is not None and (backward is None or self._stepped_in >= backward):
            self._end_step()
        self._synchronized_in, self._stepped_in = backward, None

    # ---- events of all optimizers, scalers and modules, which may be another model's

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        ids = _parameter_ids(optimizer)
        if not self._holds_any(ids):
            self._others_stepped = True
            return
        if running_backward() is None:
            self._make_stale(ids)
        else:
            self._make_stale_in_backward(ids)
        self._step_ended(optimizer)
        self._step_made(ids)

    def optimizer_switched(self, optimizer: Optimizer) -> None:
        """Handle an optimizer's switch between training and evaluation; it may change weights more than a step."""
        ids = _parameter_ids(optimizer)
        if self._holds_any(ids):
            self._make_stale(ids, by_step=False)

    def scaler_stepped(self, scaler: GradScaler, optimizer: Optimizer, *args: object, **kwargs: object) -> None:
        """Handle ``scaler.step(optimizer)``, which has made a step or skipped it.

        Raises:
            RuntimeError: If a unit of the optimizer has error feedback; see [Note: The lifetime of errors] in
                error_feedback.py.
        """
        if not scaler.is_enabled():
            return
        ids = _parameter_ids(optimizer)
        if not self._holds_any(ids):
            return
        for unit in self._units_with(ids):
            if unit.errors is not None:
                raise RuntimeError(
                    f"a GradScaler has stepped the optimizer of {unit.sharded.name}, which has error feedback: errors "
                    "of scaled gradients can't be added to gradients of another scale; train in bf16 without a scaler, "
                    "or leave out error_feedback"
                )
        self._step_ended(optimizer)

    def gradients_cleared(self, optimizer: Optimizer, *args: object, **kwargs: object) -> None:
        """Handle ``optimizer.zero_grad()``; it also drops what earlier micro-batches of the step have accumulated."""
        ids = _parameter_ids(optimizer)
        if self._holds_any(ids):
            self._backwards = 0
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
                self._backwards = 0

    # ---- the end of a step

    def _step_ended(self, optimizer: object) -> None:
        """Handle a step, made or skipped; only the first after a synchronization ends the model's step."""
        if self._local_training is not None:
            self._local_training.moments.saw(optimizer)
        backward = running_backward()
        if backward is None or backward == self._synchronized_in:
            self._end_step()
        else:
            self._stepped_in = backward

    def _end_step(self) -> None:
        self._optimizer_is_known = True
        if self._backwards:
            several = self._backwards > 1 and not self._others_stepped
            self._steps_in_a_row = self._steps_in_a_row + 1 if several else 0
            if self._steps_in_a_row == 2:
                self._warn(
                    "%s: each of %d backwards before an optimizer step has synchronized gradients, and sends weights "
                    "and gradients that one could send; let the last one alone do so, with "
                    "set_requires_gradient_sync(False) or no_sync() in the others",
                    self._backwards,
                )
            self._backwards, self._others_stepped = 0, False
        if self._local_training is not None:
            self._local_training.step_ended()

    def _step_made(self, ids: set[int]) -> None:
        if all(unit.errors is None for unit in self._units):
            return
        states = [unit.errors for unit in self._units_with(ids) if unit.errors is not None]
        # A step without a backward is not part of training: torch's state dicts make one to initialize optimizer state.
        if any(errors.was_used for errors in states):
            for errors in states:
                errors.step_made()

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

    # ---- weights that are stale

    def _find_changing(self, ids: Collection[int] = ()) -> None:
        """Find units that have begun to change, or hold ``ids`` of an optimizer, at a point that all ranks pass."""
        others: list[ParameterUnit] = []
        for unit in self._others:
            changes = unit.sharded.is_trained() or any(
                id(p) in ids or getattr(p, IN_OPTIMIZER, False) for p in unit.sharded.parameters()
            )
            (self._changing if changes else others).append(unit)
        self._others = others

    def _make_stale(self, ids: Collection[int] = (), *, by_step: bool = True) -> None:
        """Declare stale the weights of all units that change, for a write made or to come."""
        self._find_changing(ids)
        for unit in self._changing:
            unit.invalidate(by_step=by_step)

    def _make_stale_in_backward(self, ids: set[int]) -> None:
        """Declare the units stale that an optimizer in the backward holds a part of."""
        self._find_changing(ids)
        for unit in self._changing:
            if not ids.isdisjoint(map(id, unit.sharded.parameters())):
                unit.invalidate(by_step=True)

    # ---- mistakes

    def _check_optimizer(self) -> None:
        self._optimizer_is_known = True  # or the warning below says, once, that it is not
        is_given = any(getattr(p, IN_OPTIMIZER, False) for unit in self._units for p in unit.sharded.parameters())
        if not is_given and any(unit.sharded.is_trained() for unit in self._units):
            self._warn(
                "%s: optimizers step, but none of torch's was given a parameter that this model has by now, so nothing "
                "trains it; sharding replaces parameters: make the optimizer after it"
            )

    def _warn(self, message: str, *values: object) -> None:
        if self._model and self._units[0].ranks.rank == 0:
            logger.warning(message, self._model, *values)


def too_small_units(units: Sequence[StrategyUnit]) -> set[ParameterUnit]:
    """Return the units of which some rank has no element; the same on all ranks. Collective, once a mesh."""
    flags = [(unit, unit.ranks, [not any(map(local_numel, unit.sharded.parameters()))]) for unit in units]
    return {unit for unit, on_any_rank in all_reduce_flags(flags) if any(on_any_rank())}


def local_numel(parameter: nn.Parameter) -> int:
    return parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()


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


def weights_moved(module: nn.Module) -> None:
    """Handle a move or a cast of the weights of ``module``'s units; a cast may change their values."""
    for unit in units_of(module):
        if isinstance(unit, StrategyUnit):
            unit.invalidate()


# ---- hooks after methods of torch's classes, which tell all trackers

_trackers: weakref.WeakSet[StepTracker] = weakref.WeakSet()

_HOOK = "_fsdp_zpp_hook"
_MODE = "_fsdp_zpp_mode"


def _tell(event: str, *args: object, **kwargs: object) -> None:
    for tracker in list(_trackers):  # a copy, since a model may be freed meanwhile
        getattr(tracker, event)(*args, **kwargs)


@functools.cache
def _listen() -> None:
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: _tell("optimizer_stepped", optimizer))
    _call_after(Optimizer, "zero_grad", partial(_tell, "gradients_cleared"))
    _call_after(nn.Module, "zero_grad", partial(_tell, "module_cleared"))
    _call_after(GradScaler, "step", partial(_tell, "scaler_stepped"))


def _call_after(owner: type, method: str, hook: Callable[..., None]) -> None:
    """Have ``hook(instance, *args, **kwargs)`` called after each call of a class's method, once.

    It is not called for a subclass that overrides the method without calling it.
    """
    original = getattr(owner, method)
    if getattr(original, _HOOK, None) is hook:
        return

    @functools.wraps(original)
    def wrapped(self: object, *args: object, **kwargs: object) -> object:
        result: object = original(self, *args, **kwargs)
        hook(self, *args, **kwargs)
        return result

    setattr(wrapped, _HOOK, hook)
    setattr(owner, method, wrapped)


# Schedule-free optimizers train other weights than they evaluate, and parameters hold one kind at a time: their
# ``train`` and ``eval`` write to them. torch's own optimizers have no such methods. Trainer calls ``train`` before each
# micro-batch, so a call that repeats the last mode is ignored; a change of mode is an event, which all ranks see, like
# a step.


def _mode_called(mode: str, optimizer: Optimizer, *args: object, **kwargs: object) -> None:
    if vars(optimizer).get(_MODE) != mode:
        setattr(optimizer, _MODE, mode)
        _tell("optimizer_switched", optimizer)


_MODES = {mode: partial(_mode_called, mode) for mode in ("train", "eval")}


def _state_loaded(optimizer: Optimizer, *args: object, **kwargs: object) -> None:
    vars(optimizer).pop(_MODE, None)  # the loaded state may have been saved in the other mode


def _optimizer_given(optimizer: Optimizer, *args: object, **kwargs: object) -> None:
    for parameter in optimizer.param_groups[-1]["params"]:
        setattr(parameter, IN_OPTIMIZER, True)
    note_optimizer(optimizer)
    for mode, hook in _MODES.items():
        if callable(getattr(type(optimizer), mode, None)):
            _call_after(type(optimizer), mode, hook)


# At import: a model is watched from its first forward on, and optimizers are constructed before that.
_call_after(Optimizer, "add_param_group", _optimizer_given)
_call_after(Optimizer, "load_state_dict", _state_loaded)


# ---- set-up of a model under strategies


def set_up_model(root: nn.Module, model: str, units: Sequence[StrategyUnit], others: Sequence[int] = ()) -> StepTracker:
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
    _prefetch_secondary_shards(units)
    with_weights = [unit for unit in units if unit.sharded.parameters()]  # FSDP may have left all to inner units
    too_small = too_small_units(with_weights)
    tracker = StepTracker(units, root, model, _train_locally(root, model, units), too_small)
    log_summaries(model, groups, others)  # after all that may raise
    if all(unit.ranks.rank == 0 for unit in units):
        warn_of_unmatched(root, model, (pattern for unit in units for pattern in unit.patterns))
    return tracker


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

    def model_parallel_groups() -> Iterable[dist.ProcessGroup]:
        return dict.fromkeys(axis for unit in fragments.values() for axis in unit.sharded.model_parallel_groups())

    reductions = [unit.reductions for unit in fragments.values()]
    ranks = next(iter(fragments.values())).ranks
    how = reductions, ranks, steps_are_announced, model_parallel_groups, OptimizerMoments(model, fragments, ranks)
    elastic = [fragment for fragment in fragments if isinstance(fragment, ElasticFragment)]
    if elastic:
        training: LocalTraining = ElasticTraining(
            model, elastic, *how, lambda: [p for unit in units for p in unit.sharded.parameters()]
        )
    else:
        training = LocalTraining(model, [*fragments], *how)
    root.register_forward_pre_hook(training.before_forward, prepend=True)
    # FSDP sets up its model in a forward, after its pre-hooks have run, or in order to load a state dict.
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


def _prefetch_secondary_shards(units: Sequence[StrategyUnit]) -> None:
    """Have one prefetcher make the secondary shards of all units whose weights can be read before their gather."""
    gathers = [unit.gather for unit in units if unit.gather is not None and unit.can_prefetch]
    readable = [gather for gather in gathers if gather.secondary.source is not None]
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
                # A node size may be given on one rank and left to the launcher on another, if both are the same.
                strategy = replace(unit.strategy, gpus_per_node=unit.ranks.topology.gpus_per_node)
                facts[unit.sharded.name] = (
                    f"{strategy}, {shard_signature(unit.sharded.shards())}{', packed' * unit.packed}"
                )
        check_agreement(group, f"the first forward of {model}", facts)
