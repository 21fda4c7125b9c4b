"""A step in the backward ends with it; others end with the first optimizer that steps."""

from __future__ import annotations

from unittest import mock

import pytest

from fsdp_zpp.runtime import step_ends
from fsdp_zpp.runtime.step_ends import StepEnds

SYNCHRONIZED = "synchronized"
EVENTS: dict[str, tuple[list[tuple[str, int | None]], int]] = {
    "after the backward": ([(SYNCHRONIZED, 4), ("step", None)], 1),
    "two optimizers": ([(SYNCHRONIZED, 4), ("step", None), ("step", None)], 1),
    "in the backward": ([("step", 4), ("step", 4), (SYNCHRONIZED, 4)], 1),
    "in the backward, some at its end": ([("step", 4), (SYNCHRONIZED, 4), ("step", 4)], 1),
    "all at the end of the backward": ([(SYNCHRONIZED, 4), ("step", 4), ("step", 4)], 1),
    "two backwards": ([("step", 4), (SYNCHRONIZED, 4), ("step", 5), (SYNCHRONIZED, 5)], 2),
    "in a backward within it": ([("step", 5), (SYNCHRONIZED, 4)], 1),
    "at a user's request": ([("step", 4), ("step", 5), (SYNCHRONIZED, None)], 1),
    "in a backward that failed": ([("step", 4), (SYNCHRONIZED, 5)], 0),
    "in one that failed, then after another": ([("step", 4), (SYNCHRONIZED, 5), ("step", None)], 1),
    "without gradients": ([("step", None)], 0),
}


class Counter:
    """Counts steps as those of a model do: the first end after a synchronization."""

    def __init__(self) -> None:
        self.steps, self.waits = 0, False

    def gradients_synchronized(self) -> None:
        self.waits = True

    def step_ended(self) -> None:
        self.steps, self.waits = self.steps + self.waits, False


@pytest.mark.parametrize(("events", "expected"), EVENTS.values(), ids=EVENTS)
def test_each_step_ends_once(events: list[tuple[str, int | None]], expected: int) -> None:
    counter = Counter()
    ends = StepEnds([counter])
    for event, backward in events:
        with mock.patch.object(step_ends, "running_backward", lambda backward=backward: backward):
            ends.gradients_synchronized() if event == SYNCHRONIZED else ends.optimizer_stepped()
    assert counter.steps == expected
