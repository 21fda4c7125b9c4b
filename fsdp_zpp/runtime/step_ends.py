"""The end of a model's step, of which several optimizers may make a part each, some of them in the backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fsdp_zpp.collectives._torch_autograd import running_backward


class StepCounter(Protocol):
    """What counts the steps of a model."""

    def gradients_synchronized(self) -> None:
        """Handle a backward that has synchronized gradients, on which a step is made."""

    def step_ended(self) -> None:
        """Handle a step on these gradients; of several optimizers, the first one to step ends it."""


class StepEnds:
    """Tells counters of the end of each step of a model once its gradients are synchronized.

    Optimizers in the backward step on gradients of units before those of the whole model are. Their step ends with the
    backward, or if all of them step at its end, with the first of them.

    Args:
        counters: What is told.
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
        if self._stepped_in is not None and backward in (None, self._stepped_in):
            self._end()
        self._synchronized_in, self._stepped_in = backward, None

    def optimizer_stepped(self) -> None:
        """Handle a step of one of the model's optimizers, made or skipped."""
        backward = running_backward()
        if backward is None or backward == self._synchronized_in:
            self._end()
        else:
            self._stepped_in = backward

    def _end(self) -> None:
        for counter in self._counters:
            counter.step_ended()
