"""The end of a model's step, of which several optimizers may make a part each, some of them in the backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fsdp_zpp.collectives._torch_autograd import running_backward


class StepCounter(Protocol):
    """Counts the steps of a model."""

    def gradients_synchronized(self) -> None:
        """Handle the synchronization of a step's gradients."""

    def step_ended(self) -> None:
        """Handle a step on these gradients; only the first call after their synchronization counts."""


class StepEnds:
    """Tells counters when the gradients of a model's step are synchronized, and when the step has ended.

    Optimizers in the backward step on each unit's gradients before the whole model's are synchronized. Such a step ends
    when they are; if no optimizer has stepped by then, with the first one that does after it.

    Args:
        counters: The counters.
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
        # Steps in a backward within this one, as of a reentrant checkpoint, have a larger number; those in an earlier
        # one, which an exception has ended, a smaller one.
        if self._stepped_in is not None and (backward is None or self._stepped_in >= backward):
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
