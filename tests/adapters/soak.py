"""A long training to which everything happens that may happen between steps, and what it leaves in its process."""

from __future__ import annotations

from harness.adapter import Adapter
from leftovers import left_behind
from soak_events import OFTEN, SELDOM
from soak_training import Training

from fsdp_zpp import Strategy


def soak(adapter: Adapter, strategy: Strategy, steps: int, every: int, seed: int = 0) -> list[dict[str, int]]:
    """In a worker: what is left behind after each ``every`` of ``steps`` steps, with an event before each of them."""
    training = Training(adapter, strategy, seed)
    each_event_once(training)
    found = []
    for step in range(1, steps + 1):
        seldom = step % 50 == 0
        training.random.choice(SELDOM if seldom else OFTEN)(training)
        training.step(micro_batches=training.random.choice([1, 1, 2]))
        if step % every == 0:
            found.append(left_behind(training))
    return found


def rounds(adapter: Adapter, strategy: Strategy, n: int) -> list[dict[str, int]]:
    """In a worker: what is left behind after each of ``n`` rounds through all events."""
    training = Training(adapter, strategy, 0)
    found = []
    for _ in range(n):
        each_event_once(training)
        found.append(left_behind(training))
    return found


def each_event_once(training: Training) -> None:
    """With a step after each."""
    for event in (*OFTEN, *SELDOM):
        event(training)
        training.step()
