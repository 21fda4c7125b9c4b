"""Optimizers in the backward whose gradients are on their way to the CPU.

With offloaded parameters, a gradient is copied to the host's memory, and an optimizer there must wait for the copy. A
wait in the backward keeps the CPU from launching what comes next, so that GPU and CPU would take turns. So a unit's
optimizers step only when the backward is :data:`UNITS_BEHIND` units ahead: the GPU then has those units to compute
while the CPU waits for the copy and steps. What is left at the end of the backward steps there.

The delay is a number of units, not whether a copy has arrived, so that all ranks step in the same order: optimizers may
communicate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

UNITS_BEHIND = 2
"""Units that a backward is ahead of the optimizers' steps: one whose copy is on its way, and one that the GPU
computes."""


class ArrivingGradients:
    """The steps that wait for their gradients, in the order of the backward.

    Attributes:
        waiting: The events after the copies of units' gradients, and their steps.
    """

    def __init__(self) -> None:
        self.waiting: deque[tuple[torch.Event | torch.cuda.Event | None, Callable[[], None]]] = deque()

    def step_on_arrival(self, event: torch.Event | torch.cuda.Event | None, step: Callable[[], None]) -> None:
        """Have a unit's optimizers step when its gradients have arrived, and let those step that are due.

        Args:
            event: Recorded after the copy of the gradients; None if they are there already.
            step: Makes the step.
        """
        self.waiting.append((event, step))
        while len(self.waiting) > UNITS_BEHIND:
            self._step()

    def step_all(self) -> None:
        """Let all optimizers step that wait, at the end of a backward."""
        while self.waiting:
            self._step()

    def drop(self) -> None:
        """Forget steps that an exception has kept from being made."""
        self.waiting.clear()

    def _step(self) -> None:
        event, step = self.waiting.popleft()
        if event is not None:
            event.synchronize()
        step()
