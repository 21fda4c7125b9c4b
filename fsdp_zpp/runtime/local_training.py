"""Local-update training of a model: it counts steps, and exchanges fragments between nodes when they are due.

[Note: Steps of nodes]
Nodes step on their own, but must agree which step an exchange follows. So a step is counted where every node must pass:
after a backward that synchronizes gradients, when the first optimizer steps or a gradient scaler skips that; further
optimizers do not count again. Steps of an optimizer that is not torch's can't be observed; if there is no other, each
such backward counts. Exchanges that are due after a step are made before the next forward that records gradients: by
then all optimizers have stepped.

[Note: Phases of local steps]
The number of steps made decides whether the next one is synchronous. It is decided before that step's first forward,
for all units at once, after the exchanges of the step before. In synchronous steps nodes stay equal bit for bit, as
without local steps, so that nothing is exchanged:

- In synchronous steps at the beginning, fragments that are due warm up the momentum. After the last of these steps, the
  weights become the agreed ones; the momentum lacks the changes since a fragment was due last.
- Before the first synchronous step at the end, nodes exchange all fragments and become equal. Agreed weights and
  momentum are dropped.

A checkpoint also says whether nodes are apart, since it may be loaded into another schedule.

[Note: One place to meet]
Nodes may be at different places of a training: one exchanges before a forward, while another has left its loop and is
in ``exchange_weights``, or is about to leave the synchronous steps. So everything that nodes do together here begins
with a message of one kind, over one group, that names the place: the comparison of [Note: Agreement] in agreement.py.
Hops between nodes use other communicators, so it does not wait for an exchange on its way.

In synchronous steps nodes stay together as ranks do without local steps, since each backward reduces over all of them.
But a node may skip the step after a backward, and so stay in these steps for longer. Once nodes have made as many
backwards as there are synchronous steps at the beginning, some may have left these. So the others compare before each
forward until they leave, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from fsdp_zpp.collectives.agreement import PLACE, agree_on_use, check_agreement, on_any_rank
from fsdp_zpp.collectives.mesh import ProcessMesh
from fsdp_zpp.collectives.replicas import replicas_are_equal
from fsdp_zpp.collectives.streams import SideStream

from .fragment import Fragment
from .moments import OptimizerMoments
from .outer_watch import OuterWatch
from .step_reductions import StepReductions, set_synchronous

EXCHANGE = "an exchange of weights between nodes"
"""The name in errors of what nodes do together. See [Note: One place to meet]."""


class LocalTraining:
    """Counts the steps of the model under a root, and exchanges its fragments when they are due. Made collectively.

    Args:
        model: The model's name in errors.
        fragments: Its fragments, at least one, in an order that is the same on all ranks; which of them are trained may
            change.
        reductions: The gradient reductions of all fragments' units.
        ranks: All ranks.
        steps_are_announced: Whether an optimizer says when it steps.
        outer: Fits the fragments' outer steps.
        moments: Averages the optimizers' moments.

    Attributes:
        model: As given.
        outer: As given.
        moments: As given.

    Raises:
        ValueError: If ranks differ in how far they have trained.
    """

    def __init__(
        self,
        model: str,
        fragments: Sequence[Fragment],
        reductions: Sequence[StepReductions],
        ranks: ProcessMesh,
        steps_are_announced: Callable[[], bool],
        outer: OuterWatch,
        moments: OptimizerMoments,
    ) -> None:
        self.outer, self.moments = outer, moments
        self.model, self._all, self._reductions, self._ranks = model, fragments, reductions, ranks
        self._trained = [fragment for fragment in fragments if fragment.was_trained]
        self._steps_are_announced = steps_are_announced
        self._config = fragments[0].config
        self._awaits_step = self._shows_agreed = self._has_checked_moments = False
        self._met_after = 0
        steps = [fragment.progress.made for fragment in fragments]
        check_agreement(ranks.group, f"the first forward of {model}", {"optimizer steps made, by unit": steps})
        stream = SideStream()
        for fragment in fragments:
            fragment.outer.stream = stream

    def gradients_synchronized(self) -> None:
        """Handle a backward that has synchronized gradients."""
        for fragment in self._all if self._awaits_step else ():
            fragment.progress.unstepped += 1
        self._awaits_step = True
        self._note_trained()

    @property
    def _is_over(self) -> bool:
        """Return whether nodes exchange nothing any more."""
        progress = self._all[0].progress
        return not progress.apart and self._config.has_stopped(progress.made)

    def _note_trained(self) -> None:
        for fragment in self._all if not self._is_over else ():
            fragment.note_trained()

    def step_ended(self) -> None:
        """Handle a step that an optimizer of the model has made, or that a gradient scaler has skipped.

        Raises:
            RuntimeError: If there was no forward of the root since the last step, before which nodes would have
                exchanged what was due.
        """
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

    # Not traced: when exchanges are due changes with every step.
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
        if progress.apart and self._config.is_synchronous(progress.made):
            self._rejoin()
        while progress.exchanged < progress.made:
            self._exchange_after(progress.exchanged + 1)
        self._enter_phase()

    def _prepare(self) -> None:
        """Restore what was loaded, and start the exchanges of all parameters that were trained so far."""
        for fragment in self._all:
            fragment.restore()
        furthest = max((fragment.progress for fragment in self._all), key=lambda progress: progress.made)
        for fragment in self._all:  # a saved state lacks fragments that were frozen then
            fragment.progress.made, fragment.progress.exchanged = furthest.made, furthest.exchanged
            fragment.progress.apart, fragment.progress.unstepped = furthest.apart, furthest.unstepped
        for fragment in self._all if not self._is_over else ():
            # Until the first step is made, weights may be set in ways that nothing tells of.
            fragment.start(anew=furthest.made == 0 and not self._awaits_step)
        # By places that don't change when one of them is frozen, so that the others are due when they were.
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
            # Nodes hold the same weights whether these are new ones or their own, put back; nothing tells them apart.
            for fragment in reloaded:
                fragment.adopt()
            return
        # As under the scope I, under N, too: what is compared are nodes.
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
            self._on_any_rank(False, self._before(step), units=f"{due} of {len(self._trained)} after step {step}")
            self._check_moments()
            self._agree_on_exchange([self._trained[index] for index in due])
            self._average_moments([self._trained[index] for index in due])
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

    @staticmethod
    def _before(step: int) -> str:
        """Return the place where nodes exchange what is due after a step."""
        return f"before the forward of step {step + 1}"

    def _on_any_rank(self, here: bool, place: str, **facts: object) -> bool:
        """Return whether ``here`` is true on any rank, if all are at one place. See [Note: One place to meet].

        Raises:
            ValueError: If ranks differ in the place, or in facts.
        """
        return on_any_rank(here, self._ranks.group, EXCHANGE, {PLACE: place, "model": self.model, **facts})

    def _agree_on_exchange(self, fragments: Sequence[Fragment]) -> None:
        """Let all nodes exchange what any of them has trained, by outer steps that fit the last ones. Collective."""
        flags = [(fragment, self._ranks, fragment.changed) for fragment in fragments]
        for fragment, on_any in agree_on_use(flags):
            fragment.changed = on_any()
        if fragments:
            self.outer.fit(fragments, self._trained)

    def _average_moments(self, fragments: Sequence[Fragment]) -> None:
        """Average the moments of those fragments whose next exchange includes them. Collective."""
        # Before the weights are sent, since hops over the same ranks take turns, and this one is waited for.
        every = self._config.moments_every
        due = [each for each in fragments if every is not None and (each.progress.sent + 1) % every == 0]
        if due and due[0].progress.made:
            self.moments.average(due)

    def _check_moments(self) -> None:
        """Raise in the first exchange what an average of moments at the stop would. Collective."""
        if self._config.stop is not None and not self._has_checked_moments:
            self.moments.check(self._trained)
            self._has_checked_moments = True

    def average_moments_exactly(self) -> None:
        """Average the moments of all fragments now, in fp32, after which all nodes hold the same. Collective.

        Raises:
            ValueError: As :meth:`OptimizerMoments.average` does.
        """
        self._prepare()
        if self._trained and self._trained[0].progress.made:
            self.moments.average(self._trained, codec=None)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Return the ranks that compare what they are about to do. See [Note: One place to meet]."""
        return self._ranks.group

    def exchanged_by_all(self) -> str:
        """Return the text for errors on what :meth:`exchange_all` exchanges, which must be the same on all ranks.

        Raises:
            RuntimeError: If the agreed weights are shown.
        """
        self._check_not_shown()
        units = sum(fragment.was_trained for fragment in self._all)
        return f"all {units} after step {max(fragment.progress.made for fragment in self._all)}"

    def exchange_all(self) -> None:
        """Exchange all fragments now, after which all nodes hold the same weights. Collective.

        Ranks have compared :meth:`exchanged_by_all`.
        """
        self._prepare()
        if not self._all[0].progress.apart:
            return
        for fragment in self._trained:
            fragment.note_trained()
        self._exchange_all(self._all[0].progress.made)

    def _exchange_all(self, step: int, *, with_moments: bool = True) -> None:
        for fragment in self._trained:
            if fragment.progress.arrives is not None:
                fragment.receive(self._config.mix)
        self._agree_on_exchange(self._trained)
        if with_moments:
            self._average_moments(self._trained)
        for fragment in self._trained:
            fragment.send(step)
        for fragment in self._trained:
            fragment.receive(1.0)
        for fragment in self._all:
            fragment.progress.exchanged = step

    def _rejoin(self) -> None:
        """Make all nodes hold the same weights and optimizer moments. Collective."""
        step = self._all[0].progress.made
        units = f"all {len(self._trained)} after step {step}"
        self._on_any_rank(False, f"{self._before(step)}, where local steps end", units=units)
        self.average_moments_exactly()  # first, since it may fail
        self._exchange_all(step, with_moments=False)
        for fragment in self._all:
            fragment.progress.apart = False
            if self._config.has_stopped(step):
                fragment.retire()

    def _enter_phase(self) -> None:
        """Let the next step be synchronous or not, as its number says."""
        progress = self._all[0].progress
        synchronous = self._config.is_synchronous(progress.made)
        if synchronous:
            self._look_for_others()
        begins = f"{self._before(progress.made)}, where {'synchronous' if synchronous else 'local'} steps begin"
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
            self._on_any_rank(False, self._before(progress.made))

    @contextmanager
    def showing_agreed(self) -> Iterator[None]:
        """Return a context with the agreed weights in place of this node's own.

        Raises:
            RuntimeError: If they are shown already.
        """
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
