"""Training with local steps: when weights are exchanged."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_zpp.comm.agreement import (
    PLACE,
    agree_on_use,
    check_agreement,
    on_any_rank,
    ordered_sum,
    replicas_are_equal,
)
from fsdp_zpp.comm.gradient_reduce import StepReductions, set_synchronous
from fsdp_zpp.comm.hops import SideStream
from fsdp_zpp.comm.mesh import ProcessMesh, collective_device
from fsdp_zpp.strategy.local_steps import TARGET_GAIN

from .fragment import Fragment, ParameterState
from .outer_step import MOST_GAIN, MOST_IN_A_ROW, Products

# ---- made optimizers
#
# Optimizers of this process, from their construction on, by the parameters that they were given.
#
# A node that joins takes over states before its own optimizers have stepped.

_MADE = "_fsdp_zpp_made"


def note_optimizer(optimizer: Optimizer) -> None:
    """Remember ``optimizer`` for as long as it exists; a part of its construction."""
    _made().setdefault(id(optimizer), optimizer)


def optimizers_of(parameters: Iterable[nn.Parameter]) -> list[Optimizer]:
    """Return the optimizers that hold any of ``parameters``, in the order of their construction."""
    ids = {id(parameter) for parameter in parameters}
    return [
        each for each in _made().values() if any(id(p) in ids for group in each.param_groups for p in group["params"])
    ]


def _made() -> weakref.WeakValueDictionary[int, Optimizer]:
    # It is kept on torch's class, where torch's own hooks are, rather than in a global of this module. Its order, that
    # of construction, is the same in all processes that run the same program. Python's dictionary forgets the dead even
    # while the interpreter shuts down, when a callback of ours would find the globals of its module gone.
    if _MADE not in vars(Optimizer):
        setattr(Optimizer, _MADE, weakref.WeakValueDictionary())
    made: weakref.WeakValueDictionary[int, Optimizer] = vars(Optimizer)[_MADE]
    return made


# ---- optimizer state
#
# An optimizer's state of this rank, in checkpoints of nodes that train on their own.
#
# torch's checkpoints keep one copy of what replicas hold. Nodes that train on their own are no replicas, so each rank
# saves its own.


class OptimizerState:
    """An optimizer's state on this rank, which is restored with a fragment of its model."""

    def __init__(self, optimizer: Optimizer, fragment: Fragment) -> None:
        self._optimizer, self._fragment = optimizer, fragment

    def state_dict(self) -> dict[str, list[ParameterState]]:
        """Return the state by parameter, in the optimizer's order."""
        if id(self._optimizer) in self._fragment.pending:
            return {"state": self._fragment.pending[id(self._optimizer)][0]}
        states = (self._optimizer.state.get(parameter, {}) for parameter in self._parameters())
        return {"state": [{name: _saved(value) for name, value in state.items()} for state in states]}

    def load_state_dict(self, state: dict[str, list[ParameterState]]) -> None:
        """Continue with a saved state from the next forward on."""
        self.check(state["state"])
        # It is kept on the fragment, from which another OptimizerState can save it again before the next forward.
        self._fragment.pending[id(self._optimizer)] = (state["state"], self.restore)

    def check(self, saved_states: list[ParameterState]) -> None:
        parameters = len(list(self._parameters()))
        if parameters != len(saved_states):
            raise ValueError(
                f"the saved optimizer state has {len(saved_states)} parameters, but this optimizer has {parameters}"
            )

    def reset(self) -> None:
        """Drop the loaded state, so that the one of torch's own checkpoint stays."""
        self._fragment.pending.pop(id(self._optimizer), None)

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self._optimizer.param_groups:
            yield from group["params"]

    @torch.no_grad()
    def restore(self, saved_states: list[ParameterState]) -> None:
        states = iter(saved_states)
        for group in self._optimizer.param_groups:
            for parameter, saved in zip(group["params"], states, strict=False):
                state = self._optimizer.state[parameter]
                present = dict(state)
                state.clear()
                for name, value in saved.items():
                    state[name] = _restored(value, present.get(name), parameter, group)


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _saved(value: object) -> object:
    return _local(value).detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _restored(saved: object, present: object, parameter: nn.Parameter, group: Mapping[str, Any]) -> object:
    """Return ``saved``, of a parameter in an optimizer's ``group``, in the form that it uses, such as a DTensor."""
    if not isinstance(saved, Tensor):
        return saved
    if isinstance(present, Tensor):
        local = _local(present)
        if local.shape == saved.shape and local.dtype == saved.dtype:
            local.copy_(saved)
            return present
    if isinstance(parameter, DTensor) and saved.shape == parameter.to_local().shape:
        shard = saved.to(parameter.device)
        return DTensor.from_local(
            shard, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
        )
    # torch counts steps of fused and capturable optimizers on the device, those of others on the CPU.
    counts_on_device = group.get("fused") or group.get("capturable")
    return saved.to(parameter.device) if saved.ndim or counts_on_device else saved


# ---- local training
#
# Local-update training of a model: it counts steps, and exchanges fragments between nodes when they are due.
#
# [Note: Steps of nodes]
# Nodes step on their own, but must agree which step an exchange follows. So a step is counted where every node must
# pass: after a backward that synchronizes gradients, when the first optimizer steps or a gradient scaler skips that;
# further optimizers do not count again. Steps of an optimizer that is not torch's can't be observed; if there is no
# other, each such backward counts. Exchanges that are due after a step are made before the next forward that records
# gradients: by then all optimizers have stepped.
#
# [Note: Phases of local steps]
# The number of steps made decides whether the next one is synchronous. It is decided before that step's first forward,
# for all units at once, after the exchanges of the step before. In synchronous steps nodes stay equal bit for bit, as
# without local steps, so that nothing is exchanged; fragments that are due warm up the momentum. After the last of
# these steps, the weights become the agreed ones; the momentum lacks the changes since a fragment was due last.
#
# A checkpoint also says whether nodes are apart, since it may be loaded into another schedule.
#
# [Note: One place to meet]
# Nodes may be at different places of a training: one exchanges before a forward, while another has left its loop and is
# in ``exchange_weights``, or is about to leave the synchronous steps. So everything that nodes do together here begins
# with a message of one kind, over one group, that names the place: the comparison of [Note: Agreement] in agreement.py.
# Hops between nodes use other communicators, so it does not wait for an exchange on its way.
#
# In synchronous steps nodes stay together as ranks do without local steps, since each backward reduces over all of
# them. But a node may skip the step after a backward, and so stay in these steps for longer. Once nodes have made as
# many backwards as there are synchronous steps, some may have left these. So the others compare before
# each forward until they leave, too.

logger = logging.getLogger("fsdp_zpp")

EXCHANGE = "an exchange of weights between nodes"  # in errors; see [Note: One place to meet]


def before_forward_of(step: int) -> str:
    return f"before the forward of step {step + 1}"


class LocalTraining:
    """Counts the steps of the model under a root, and exchanges its fragments when they are due. Made collectively.

    ``fragments`` are in an order that is the same on all ranks; they may be frozen and unfrozen. Raises a ValueError if
    ranks differ in the number of steps made.
    """

    def __init__(
        self,
        model: str,
        fragments: Sequence[Fragment],
        reductions: Sequence[StepReductions],
        ranks: ProcessMesh,
        steps_are_announced: Callable[[], bool],
        other_axes: Callable[[], Iterable[dist.ProcessGroup]],
    ) -> None:
        self._other_axes = other_axes
        self.model, self._all, self._reductions, self._ranks = model, fragments, reductions, ranks
        self._trained = [fragment for fragment in fragments if fragment.was_trained]
        self._steps_are_announced = steps_are_announced
        self._config = fragments[0].config
        self._awaits_step = self._shows_agreed = self._has_warned = False
        self._met_after = 0
        steps = [fragment.progress.made for fragment in fragments]
        check_agreement(ranks.group, f"the first forward of {model}", {"optimizer steps made, by unit": steps})
        stream = SideStream()
        for fragment in fragments:
            fragment.outer.stream = stream

    def gradients_synchronized(self) -> None:
        for fragment in self._all if self._awaits_step else ():
            fragment.progress.unstepped += 1
        self._awaits_step = True
        self._note_trained()

    def _note_trained(self) -> None:
        for fragment in self._all:
            fragment.note_trained()

    def step_ended(self) -> None:
        """Count a step, made or skipped; raise a RuntimeError if no forward of the root preceded it."""
        if not self._awaits_step:
            return
        self._awaits_step = False
        self._note_trained()
        for fragment in self._all:
            fragment.progress.made += 1
        progress = self._all[0].progress
        if progress.made > progress.exchanged + 1:
            raise RuntimeError(
                f"{self.model} has made two optimizer steps without a forward of its outermost module between them; "
                "nodes exchange weights (local_steps) before that forward, so call the outermost module itself, not a "
                "method of it or a module inside it"
            )

    # The step decides whether exchanges are due, so this is not traced.
    @torch.compiler.disable
    def before_forward(self, root: nn.Module, *inputs: object) -> None:
        """Make the exchanges that are due; a hook before the root's forward."""
        if self._shows_agreed or not torch.is_grad_enabled():
            for fragment in self._all:
                fragment.restore()
            return
        if not self._steps_are_announced():
            self.step_ended()
        self._prepare()
        self._catch_up()

    def _catch_up(self) -> None:
        """Make the exchanges of all steps that were made, and enter the phase of the next one."""
        progress = self._all[0].progress
        if progress.apart and progress.made < self._config.start:
            raise ValueError(
                f"{self.model}: nodes have trained on their own for {progress.made} steps in the loaded state, but "
                f"start={self._config.start} has them make the next step together: continue with a start of "
                f"{progress.made} or less, or from weights alone that were saved under agreed_weights"
            )
        while progress.exchanged < progress.made:
            self._exchange_after(progress.exchanged + 1)
        self._enter_phase()

    def _prepare(self) -> None:
        """Restore loaded states, and start the exchanges of all parameters that were trained so far."""
        for fragment in self._all:
            fragment.restore()
        furthest = max((fragment.progress for fragment in self._all), key=lambda progress: progress.made)
        for fragment in self._all:  # a saved state lacks fragments that were frozen then
            fragment.progress.made, fragment.progress.exchanged = furthest.made, furthest.exchanged
            fragment.progress.apart, fragment.progress.unstepped = furthest.apart, furthest.unstepped
        for fragment in self._all:
            # Until the first step is made, weights may be set without any event.
            fragment.start(anew=furthest.made == 0 and not self._awaits_step)
        # Index over all fragments that were ever trained, so that freezing one does not move the others' schedule.
        self._trained = [fragment for fragment in self._all if fragment.was_trained]
        self._restart_from_loaded()

    def _restart_from_loaded(self) -> None:
        """Adopt weights loaded without a state of local steps as the agreed ones, if all nodes hold the same."""
        reloaded = [fragment for fragment in self._trained if fragment.was_reloaded]
        for fragment in reloaded:
            fragment.was_reloaded = False
        if not reloaded:
            return
        if not self._all[0].progress.apart:
            # Nodes hold the same weights, whether these are new ones or their own, put back.
            for fragment in reloaded:
                fragment.adopt()
            return
        # Compare nodes, as under the scope I, also under N.
        shards = [shard for fragment in reloaded for shard in fragment.weights]
        differs = any(not fragment.holds_agreed for fragment in reloaded)
        # If nodes differ, each node's own weights were put back, after an evaluation of averaged weights, say. If they
        # are the agreed ones already, exchanges go on.
        met = self._on_any_rank(differs, "at the first use of weights that were loaded")
        if met and replicas_are_equal(shards, self._ranks, "I"):
            for fragment in reloaded:
                fragment.restart()

    def _exchange_after(self, step: int) -> None:
        if self._all[0].progress.apart:
            self._exchange_due(step)
        elif step <= self._config.start:
            for index in self._config.due(step, len(self._trained)):
                self._trained[index].warm_up()
        for fragment in self._all:
            fragment.progress.exchanged = step

    def _exchange_due(self, step: int) -> None:
        self._receive(step)
        due = self._config.due(step, len(self._trained))
        if due:
            self._on_any_rank(False, before_forward_of(step), units=f"{due} of {len(self._trained)} after step {step}")
            self._agree_on_exchange([self._trained[index] for index in due])
        for index in due:
            fragment = self._trained[index]
            if fragment.progress.arrives is not None:  # it is due early, since another unit has joined the schedule
                fragment.receive(self._config.mix)
            fragment.send(step + self._config.overlap)
        self._receive(step)

    def _receive(self, step: int) -> None:
        for fragment in self._trained:
            if fragment.progress.arrives is not None and fragment.progress.arrives <= step:
                fragment.receive(self._config.mix)

    def _on_any_rank(self, here: bool, place: str, **facts: object) -> bool:
        """Return whether ``here`` is true on any rank, if all are at one place. See [Note: One place to meet]."""
        return on_any_rank(here, self._ranks.group, EXCHANGE, {PLACE: place, "model": self.model, **facts})

    def _agree_on_exchange(self, fragments: Sequence[Fragment]) -> None:
        """Have all nodes exchange the parameters that any has trained, and fit their outer steps. Collective."""
        flags = [(fragment, self._ranks, fragment.changed) for fragment in fragments]
        for fragment, on_any in agree_on_use(flags):
            fragment.changed = on_any()
        if fragments:
            self._fit(fragments, self._products(fragments))

    @property
    def _groups(self) -> list[dist.ProcessGroup]:
        return [group for group in (self._ranks.group, *self._other_axes()) if group is not None]

    def _products(self, fragments: Sequence[Fragment]) -> list[Products]:
        """Return the products that fit the next outer steps of fragments, at least one, summed over ranks. Collective.

        Each rank knows those of its own chunks. They are summed when a fragment is due again and ranks compare: the
        host waits there anyway, and all ranks conclude the same from the same bits.
        """
        groups = self._groups
        device = collective_device(groups[0]) if groups else torch.device("cpu")
        sums = ordered_sum(torch.cat([fragment.outer.products.to(device) for fragment in fragments]), groups)
        return list(zip(sums[::2], sums[1::2], strict=True))

    def _fit(self, fragments: Sequence[Fragment], products: Sequence[Products]) -> None:
        """Choose the momentum of the next outer steps of fragments by their last ones; warn once if these overshoot."""
        gains = [fragment.outer.fit(of) for fragment, of in zip(fragments, products, strict=True)]
        gain = max((each for each in gains if each is not None), default=None)
        if gain is None or self._has_warned:
            return
        self._has_warned = True
        config = self._config
        remedy = f"outer_lr={config.outer_lr}"
        if config.outer_momentum not in ("auto", 0):
            remedy = f"outer_momentum={config.outer_momentum} or {remedy}"
            remedy += ", or pass outer_momentum='auto'" * (config.outer_lr < TARGET_GAIN)  # which else is refused
        if all(dist.get_rank(group) == 0 for group in self._groups):
            logger.warning(
                "%s: outer steps overshoot: in %d exchanges in a row they were more than %g times the nodes' mean "
                "change (now %.2f times); lower %s",
                self.model,
                MOST_IN_A_ROW,
                MOST_GAIN,
                gain,
                remedy,
            )

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Return the ranks that compare their next exchange. See [Note: One place to meet]."""
        return self._ranks.group

    def exchanged_by_all(self) -> str:
        """Return the text of :meth:`exchange_all` for errors, which must be the same on all ranks."""
        self._check_not_shown()
        units = sum(fragment.was_trained for fragment in self._all)
        return f"all {units} after step {max(fragment.progress.made for fragment in self._all)}"

    def exchange_all(self) -> None:
        """Exchange all fragments, so that nodes hold the same; ranks compared :meth:`exchanged_by_all`. Collective."""
        self._prepare()
        if not self._all[0].progress.apart:
            return
        step = self._all[0].progress.made
        for fragment in self._trained:
            fragment.note_trained()
        for fragment in self._trained:
            if fragment.progress.arrives is not None:
                fragment.receive(self._config.mix)
        self._agree_on_exchange(self._trained)
        for fragment in self._trained:
            fragment.send(step)
        for fragment in self._trained:
            fragment.receive(1.0)
        for fragment in self._all:
            fragment.progress.exchanged = step

    def _enter_phase(self) -> None:
        progress = self._all[0].progress
        synchronous = progress.made < self._config.start
        if synchronous:
            self._look_for_others()
        begins = f"{before_forward_of(progress.made)}, where {'synchronous' if synchronous else 'local'} steps begin"
        step = f"{self.model}, step {progress.made + 1}"
        set_synchronous(self._reductions, synchronous, partial(self._on_any_rank, place=begins), step)
        if not synchronous and not progress.apart:
            for fragment in self._all:
                if progress.made:
                    fragment.adopt()
                fragment.progress.apart = True

    def _look_for_others(self) -> None:
        """Raise if other nodes have left the synchronous steps at the beginning. Collective once they may have."""
        progress = self._all[0].progress
        passed = progress.made + progress.unstepped + self._awaits_step  # the same on all nodes in these steps
        if progress.made < self._config.start <= passed != self._met_after:
            self._met_after = passed
            self._on_any_rank(False, before_forward_of(progress.made))

    @contextmanager
    def showing_agreed(self) -> Iterator[None]:
        """Return a context with the agreed weights in place of this node's own."""
        self._check_not_shown()
        self._prepare()
        self._shows_agreed = True
        shown = self._trained if self._all[0].progress.apart else []  # else all nodes hold the same weights
        try:
            with ExitStack() as stack:
                for fragment in shown:
                    stack.enter_context(fragment.showing_agreed())
                yield
        finally:
            self._shows_agreed = False

    def _check_not_shown(self) -> None:
        if self._shows_agreed:
            raise RuntimeError(f"{self.model} shows its agreed weights: leave agreed_weights() first")
