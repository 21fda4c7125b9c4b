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
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fsdp_zpp._torch_compat import replace_function
from fsdp_zpp.comm.agreement import all_reduce_flags, check_agreement, check_replicas, from_each_rank, shard_signature
from fsdp_zpp.comm.hops import running_backward
from fsdp_zpp.comm.weight_gather import SecondaryShardPrefetcher
from fsdp_zpp.local_steps.elastic import ElasticFragment, ElasticTraining
from fsdp_zpp.local_steps.local_training import IN_OPTIMIZER, LocalTraining, OptimizerMoments, note_optimizer

from .log_line import Groups, log_summaries
from .unit import ParameterUnit, StrategyUnit, units_of, warn_of_unmatched

# ---- step tracker
#
# [Note: What a step changes]
# A step may write to every parameter that ever required a gradient or was ever given to an optimizer: weight decay and
# momentum move parameters that are frozen by now, and adapters that are off during the step. So a unit that was found
# to change once counts as changing from then on, whatever requires a gradient later. Trackers look for such units at
# the end of every backward and in every step, since all ranks pass there.
#
# Users may leave a parameter out of the optimizer on a rank that has no element of it. Such a rank can't tell that a
# step changes the unit. So a unit that is empty on some rank counts as changed by every step; such units are small.
#
# A step after the backward makes all changing units stale, even those that its optimizer does not hold. A step in the
# backward, by one of many optimizers, makes only its optimizer's units stale: the backward still needs other weights,
# and would send stale ones between nodes again. When gradients are synchronized, all changing units become stale on all
# ranks. Until then, a unit can be stale on the ranks that step it and fresh on ranks that hold no element of it. This
# matters only if the backward uses the unit again.
#
# [Note: The end of a step]
# Several optimizers may each make a part of a step. An optimizer within the backward updates each unit before the whole
# model's gradients are synchronized; such a step ends with the synchronization. Otherwise a step ends with the first
# optimizer that steps after the synchronization.
#
# [Note: Which backwards are micro-batches]
# Several backwards before one step may each rightly synchronize gradients: a forward may have several losses, and the
# other half of a GAN has backwards of its own, whose gradients are cleared. So a backward counts only after a forward
# of the whole model (activation checkpointing repeats single layers), and clearing gradients restarts the count. A
# single step may also have several counted backwards by design. So the warning waits for two such steps in a row,
# without a step of another model's optimizer in between.

logger = logging.getLogger("fsdp_zpp")


class StepTracker:
    """Tells the units of a model about backwards, steps and cleared gradients, and warns of each mistake once.

    It warns only if it is given ``model``, the name of ``root``. Each unit in ``too_small`` is empty on some rank.
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
        # Do not wait for the step: some optimizers are not torch's and announce none, some write through p.data or in
        # the middle of their step. If a step has no backward before it, only optimizer_stepped makes weights stale.
        self._make_stale()
        if self._others_stepped and not self._optimizer_is_known:
            self._check_optimizer()
        self._backwards += self._has_run
        self._has_run = False
        if self._local_training is not None:
            self._local_training.gradients_synchronized()
        backward = running_backward()
        # Later backwards have larger numbers. A step may have been made in a nested backward, such as a reentrant
        # checkpoint's, which belongs to this one; or in an earlier backward that failed, which does not.
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
        """Handle an optimizer's switch between training and evaluation; it may change weights more than a step does."""
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
        """Handle ``optimizer.zero_grad()``: drop the gradients that earlier micro-batches have accumulated, too."""
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
        """Yield the units of an optimizer, by the ``ids`` of its parameters; the same units on all ranks."""
        # One of several optimizers, or one that steps within the backward, clears only its own gradients.
        for unit in self._units:
            parameters = unit.sharded.parameters()
            # A unit may be empty on this rank. Users may leave its empty parameters out of all optimizers; nothing
            # then tells which optimizer has the unit on other ranks, so any optimizer of the model counts.
            if any(id(p) in ids for p in parameters) or not any(
                local_numel(p) or getattr(p, IN_OPTIMIZER, False) for p in parameters
            ):
                yield unit

    def _holds_any(self, ids: set[int]) -> bool:
        return any(id(p) in ids for unit in self._units for p in unit.sharded.parameters())

    # ---- weights that are stale

    def _find_changing(self, ids: Collection[int] = ()) -> None:
        """Find units that have begun to change, or hold parameters with these ``ids``. All ranks call it."""
        others: list[ParameterUnit] = []
        for unit in self._others:
            changes = unit.sharded.is_trained() or any(
                id(p) in ids or getattr(p, IN_OPTIMIZER, False) for p in unit.sharded.parameters()
            )
            (self._changing if changes else others).append(unit)
        self._others = others

    def _make_stale(self, ids: Collection[int] = (), *, by_step: bool = True) -> None:
        """Declare the weights of all changing units stale; a step may write to them earlier or later."""
        self._find_changing(ids)
        for unit in self._changing:
            unit.invalidate(by_step=by_step)

    def _make_stale_in_backward(self, ids: set[int]) -> None:
        """Declare those units stale that have parameters of an optimizer stepping within the backward."""
        self._find_changing(ids)
        for unit in self._changing:
            if not ids.isdisjoint(map(id, unit.sharded.parameters())):
                unit.invalidate(by_step=True)

    # ---- mistakes

    def _check_optimizer(self) -> None:
        self._optimizer_is_known = True  # if it is not, the warning below says so once
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
    """Return the units that are empty on some rank; the same units on all ranks. One collective for each mesh."""
    flags = [(unit, unit.ranks, [not any(map(local_numel, unit.sharded.parameters()))]) for unit in units]
    return {unit for unit, on_any_rank in all_reduce_flags(flags) if any(on_any_rank())}


def local_numel(parameter: nn.Parameter) -> int:
    return parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()


def _parameter_ids(optimizer: Optimizer) -> set[int]:
    # A loop in C, since this runs twice a step.
    return set(map(id, chain.from_iterable(map(itemgetter("params"), optimizer.param_groups))))


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

_MODE = "_fsdp_zpp_mode"


def _tell(event: str, *args: object, **kwargs: object) -> None:
    for tracker in list(_trackers):  # a copy, since a model may be freed meanwhile
        getattr(tracker, event)(*args, **kwargs)


@functools.cache
def _listen() -> None:
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: _tell("optimizer_stepped", optimizer))
    replace_function(Optimizer, "zero_grad", partial(_calling, partial(_tell, "gradients_cleared")))
    replace_function(nn.Module, "zero_grad", partial(_calling, partial(_tell, "module_cleared")))
    replace_function(GradScaler, "step", partial(_calling, partial(_tell, "scaler_stepped")))


def _calling(hook: Callable[..., object], original: Any) -> Callable[..., object]:
    """Return a method that calls ``original``, then ``hook(instance, *args, **kwargs)``.

    A subclass that overrides the method without calling it does not call the hook either.
    """

    def wrapped(self: object, *args: object, **kwargs: object) -> object:
        result: object = original(self, *args, **kwargs)
        hook(self, *args, **kwargs)
        return result

    return wrapped


# Schedule-free optimizers have other weights for training than for evaluation, and parameters hold one kind at a time:
# the optimizer's ``train`` and ``eval`` write to the parameters. torch's own optimizers have no such methods. Trainer
# calls ``train`` before each micro-batch, so a call that repeats the last mode is ignored. All ranks see a change of
# mode, as they see a step.


def _mode_called(mode: str, optimizer: Optimizer, *args: object, **kwargs: object) -> None:
    if vars(optimizer).get(_MODE) != mode:
        setattr(optimizer, _MODE, mode)
        _tell("optimizer_switched", optimizer)


_MODES = {mode: partial(_calling, partial(_mode_called, mode)) for mode in ("train", "eval")}


def _optimizer_given(optimizer: Optimizer, *args: object, **kwargs: object) -> None:
    for parameter in optimizer.param_groups[-1]["params"]:
        setattr(parameter, IN_OPTIMIZER, True)
    note_optimizer(optimizer)
    for mode, make in _MODES.items():
        if callable(getattr(type(optimizer), mode, None)):
            replace_function(type(optimizer), mode, make)


# Added at import: a model is watched from its first forward on, and optimizers are constructed before that.
replace_function(Optimizer, "add_param_group", partial(_calling, _optimizer_given))
# The loaded state may have been saved in the other mode.
_forget_mode = partial(_calling, lambda optimizer, *args, **kwargs: optimizer.__dict__.pop(_MODE, None))
replace_function(Optimizer, "load_state_dict", _forget_mode)


# ---- set-up of a model under strategies


def set_up_model(root: nn.Module, model: str, units: Sequence[StrategyUnit], others: Sequence[int] = ()) -> StepTracker:
    """Compare the units of a model between ranks, name them, log what is active, and watch for events. Collective.

    ``others`` has the number of elements of each unit below ``root`` that torch alone manages.

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
    # A frozen unit that has a fragment may be trained later.
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

    def parameters() -> Iterable[nn.Parameter]:
        return (p for unit in units for p in unit.sharded.parameters())

    def model_parallel_groups() -> Iterable[dist.ProcessGroup]:
        return dict.fromkeys(axis for unit in fragments.values() for axis in unit.sharded.model_parallel_groups())

    reductions = [unit.reductions for unit in fragments.values()]
    ranks = next(iter(fragments.values())).ranks
    how = reductions, ranks, parameters, model_parallel_groups, OptimizerMoments(model, fragments, ranks)
    elastic = [fragment for fragment in fragments if isinstance(fragment, ElasticFragment)]
    training = ElasticTraining(model, elastic, *how) if elastic else LocalTraining(model, [*fragments], *how)
    root.register_forward_pre_hook(training.before_forward, prepend=True)
    # The forward that sets up a model has run its pre-hooks already. Loaded codec state waits for the next forward.
    if all(unit.loaded_state is None for unit in fragments.values()):
        training.before_forward(root)
    for unit in fragments.values():
        unit.local_training = training
    return training


def _check_before_forwards(root: nn.Module, units: Sequence[StrategyUnit]) -> None:
    """Under FSDP_ZPP_CHECK, raise on every rank before a forward if any rank would reuse outdated weights in it."""
    gathers = [unit.gather for unit in units if unit.gather is not None and unit.keeps_weights]
    gathers = [gather for gather in gathers if (of := gather.secondary.source) is not None and of.compares_contents()]

    def before_forward(root: nn.Module, inputs: object) -> None:
        outdated = {gather.label for gather in gathers if gather.secondary.is_outdated}
        # Small groups first: the larger ones then pass on what the ranks of a node have found.
        for group in sorted({gather.group: None for gather in gathers if gather.group}, key=dist.get_world_size):
            outdated.update(*from_each_rank(outdated, group))
        for gather in gathers:
            if gather.label in outdated:
                gather.secondary.raise_written()

    if gathers:
        root.register_forward_pre_hook(torch.compiler.disable(before_forward), prepend=True)


def _prefetch_secondary_shards(units: Sequence[StrategyUnit]) -> None:
    """Give one prefetcher of secondary shards to all units whose weights can be read before their gather."""
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
