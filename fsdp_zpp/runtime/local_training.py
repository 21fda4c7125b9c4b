"""Local-update training of a model: which step is which, and when its fragments are exchanged between nodes.

[Note: Steps of nodes]
Nodes step on their own, but must agree which step an exchange follows. So a step is counted where every node must pass:
after a backward that synchronizes gradients, when the first optimizer steps or a gradient scaler skips that; further
optimizers do not count again. Steps of an optimizer that is not torch's can't be observed; if there is no other, each
such backward counts. What is due after a step is done before the next forward that records gradients:
by then all optimizers have stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from fsdp_zpp.collectives.agreement import check_agreement
from fsdp_zpp.collectives.mesh import ProcessMesh
from fsdp_zpp.collectives.replicas import replicas_are_equal
from fsdp_zpp.collectives.streams import SideStream

from .fragment import Fragment


class LocalTraining:
    """Counts the steps of the model under a root, and exchanges its fragments when they are due. Made collectively.

    Args:
        model: The model's name in errors.
        fragments: Its fragments, at least one, in an order that is the same on all ranks.
        ranks: All ranks.
        scope: That of the optimizer state: who holds the same weights when nodes agree.
        steps_are_announced: Whether an optimizer says when it steps.

    Raises:
        ValueError: If parts of the model, or ranks, differ in how or how far they have trained.
    """

    def __init__(
        self,
        model: str,
        fragments: Sequence[Fragment],
        ranks: ProcessMesh,
        scope: str,
        steps_are_announced: Callable[[], bool],
    ) -> None:
        self._fragments, self._ranks, self._scope = fragments, ranks, scope
        self._steps_are_announced = steps_are_announced
        self._config = fragments[0].config
        self._awaits_step = False
        made = [fragment.progress.made for fragment in fragments]
        check_agreement(ranks.group, f"the first forward of {model}", {"optimizer steps made, by unit": made})
        stream = SideStream()
        for fragment in fragments:
            fragment.outer.stream = stream

    def gradients_synchronized(self) -> None:
        """Handle a backward that has synchronized gradients."""
        self._awaits_step = True

    def step_ended(self) -> None:
        """Handle a step that an optimizer of the model has made, or that a gradient scaler has skipped."""
        if self._awaits_step:
            self._awaits_step = False
            for fragment in self._fragments:
                fragment.progress.made += 1

    # Not traced: when exchanges are due changes with every step.
    @torch.compiler.disable
    def before_forward(self, root: nn.Module, *inputs: Any) -> None:
        """Make the exchanges that are due; a hook before the root's forward."""
        if torch.is_grad_enabled() and not self._steps_are_announced():
            self.step_ended()
        for fragment in self._fragments:
            fragment.restore()
        if not torch.is_grad_enabled():
            return
        if not self._awaits_step:
            for fragment in self._fragments:
                fragment.start()
            self._restart_from_loaded()
        progress = self._fragments[0].progress
        while progress.exchanged < progress.made:
            self._exchange_after(progress.exchanged + 1)

    def _restart_from_loaded(self) -> None:
        """Adopt weights that were loaded without a state of local steps as the agreed ones, if all nodes hold the same.

        If they differ, each node's own were put back, after an evaluation of averaged weights, say.
        """
        reloaded = [fragment for fragment in self._fragments if fragment.was_reloaded]
        held = (shard for fragment in reloaded for shard in fragment.weights)
        if reloaded and replicas_are_equal(held, self._ranks, self._scope):
            for fragment in reloaded:
                fragment.restart()
        for fragment in reloaded:
            fragment.was_reloaded = False

    def _exchange_after(self, step: int) -> None:
        self._receive(step)
        due = self._config.due(step, len(self._fragments))
        if due:
            self._check_agreement(f"{due} of {len(self._fragments)} after step {step}")
        for index in due:
            self._fragments[index].send(step + self._config.overlap)
        self._receive(step)
        for fragment in self._fragments:
            fragment.progress.exchanged = step

    def _receive(self, step: int) -> None:
        for fragment in self._fragments:
            if fragment.progress.arrives is not None and fragment.progress.arrives <= step:
                fragment.receive(self._config.mix)

    def _check_agreement(self, fragments: str) -> None:
        # While something is on its way, the comparison would wait for it to arrive.
        if all(fragment.progress.arrives is None for fragment in self._fragments):
            check_agreement(self._ranks.inter, "an exchange of weights between nodes", {"units": fragments})

    def exchange_all(self) -> None:
        """Exchange all fragments now, after which all nodes hold the same weights. Collective.

        Raises:
            ValueError: If ranks have made different numbers of steps.
        """
        for fragment in self._fragments:
            fragment.start()
            if fragment.progress.arrives is not None:
                fragment.receive(self._config.mix)
        step = self._fragments[0].progress.made
        self._check_agreement(f"all {len(self._fragments)} after step {step}")
        for fragment in self._fragments:
            fragment.send(step)
        for fragment in self._fragments:
            fragment.receive(1.0)
            fragment.progress.exchanged = step

    @contextmanager
    def showing_agreed(self) -> Any:
        """Have the agreed weights in place of this node's own."""
        with ExitStack() as stack:
            for fragment in self._fragments:
                stack.enter_context(fragment.showing_agreed())
            yield
