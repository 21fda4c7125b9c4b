"""Steps and modes that models hear of, and progress of fragments, also as older versions have saved it."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdp_zpp import LocalSteps
from fsdp_zpp.runtime import step_ends
from fsdp_zpp.runtime.fragment import Fragment, FragmentState, Progress
from fsdp_zpp.runtime.lifecycle import LifecycleHooks
from fsdp_zpp.runtime.method_hooks import register_method_post_hook
from fsdp_zpp.runtime.optimizer_modes import register_mode_hook
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


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def test_a_model_may_be_freed_in_the_middle_of_a_step() -> None:
    models = [LifecycleHooks([]), LifecycleHooks([])]
    alive = weakref.WeakSet(models)
    handle = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: (models.clear(), gc.collect()))
    another = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: None)
    try:
        sgd().step()
    finally:
        handle.remove()
        another.remove()
    assert len(alive) == 0


def test_hooks_run_until_they_are_removed() -> None:
    calls: list[object] = []
    remove = register_method_post_hook(torch.optim.Optimizer, "zero_grad", lambda optimizer, *args: calls.append(args))
    optimizer = sgd()
    optimizer.zero_grad(False)
    remove()
    remove()
    optimizer.zero_grad()
    assert calls == [(False,)]


class Averaging(torch.optim.SGD):
    """Has the methods of schedule-free optimizers."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


def test_a_change_of_mode_is_heard_once() -> None:
    calls: list[object] = []
    optimizer = Averaging([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    hook = calls.append
    remove = register_mode_hook(hook)
    for _ in range(3):
        optimizer.train()
    assert len(calls) == 1
    optimizer.eval()
    assert len(calls) == 2
    optimizer.load_state_dict(optimizer.state_dict())  # perhaps saved in the other mode
    optimizer.eval()
    assert len(calls) == 3
    Averaging([torch.nn.Parameter(torch.zeros(1))], lr=0.1).eval()  # another one is in a mode of its own
    assert len(calls) == 4
    remove()
    optimizer.train()
    assert len(calls) == 4


def test_progress_that_was_saved_before_exchanges_were_counted_is_read() -> None:
    outer: Any = SimpleNamespace(names=frozenset(), label="unit")
    fragment = Fragment(LocalSteps(), outer, None, dict, dict, list, int)
    old: FragmentState = {
        "progress": {"made": 7, "exchanged": 6, "arrives": None},
        "exchanges": None,
        "weights": {},
        "changed": [],
        "sent": [],
    }
    fragment.load_state_dict(old)
    assert fragment.progress == Progress(made=7, exchanged=6, arrives=None, sent=0, apart=True)
