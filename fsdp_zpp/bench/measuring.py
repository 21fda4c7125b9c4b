"""Measurements of one contender, and how it fails: time, memory, bytes sent."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .result_file import Row
from .task import Task
from .timing import PeakMemory, free_running_steps, rates, timed_steps
from .training import Training

Make = Callable[[], Training]
Further = Callable[[Training, PeakMemory], Row]


@dataclass(frozen=True)
class Schedule:
    """Steps of a measurement.

    Attributes:
        warmup: Steps before those that are timed.
        steps: Steps that are timed.
        free_running: Whether they are timed together: work that a step leaves under way may then be hidden.
    """

    warmup: int = 3
    steps: int = 8
    free_running: bool = False


def figures(task: Task, training: Training, memory: PeakMemory, schedule: Schedule) -> Row:
    """Measure step time in ms, peak memory in GiB and bytes sent in MiB a step, with the rates that follow."""
    result: Row = {"build_peak_gib": memory.since_last(), "left_by_others_gib": memory.left_gib}
    tokens = task.tokens(dist.get_rank())
    losses = [training.step(tokens) for _ in range(schedule.warmup)]
    memory.since_last()
    before = training.sent()
    timed = free_running_steps if schedule.free_running else timed_steps
    times = timed(task, training, tokens, schedule.steps)
    after = training.sent()
    result |= rates(task, times, tokens) | {"peak_gib": memory.since_last()}
    if before is not None and after is not None:
        result["sent_mib_a_step"] = {hop: (after[hop] - before[hop]) / schedule.steps / 2**20 for hop in after}
    losses.append(training.step(tokens))
    result["loss"] = [losses[0].item(), losses[-1].item()]
    return result


def measure(task: Task, make: Make, schedule: Schedule, further: Further | None = None) -> Row:
    """Build a training with ``make`` and measure it, then what ``further`` adds. Collective."""
    memory = PeakMemory(task)
    began = time.perf_counter()
    training = make()
    try:
        dist.barrier()
        result = {"build_s": time.perf_counter() - began, **figures(task, training, memory, schedule)}
        return result if further is None else result | further(training, memory)
    finally:
        training.close()


def attempt(task: Task, name: str, make: Make, schedule: Schedule, further: Further | None = None) -> Row:
    """Return the row of :func:`measure`, or of its failure on any rank. Collective."""
    result: Row = {}
    failure: dict[str, Any] | None = None
    try:
        result = measure(task, make, schedule, further)
    except torch.OutOfMemoryError as error:
        failure = {"failed": "out of memory", "error": str(error).splitlines()[0]}
        traceback.clear_frames(error.__traceback__)
    except ModuleNotFoundError as error:
        failure = {"failed": f"not installed: {error.name}"}
    except Exception as error:
        traceback.print_exc()
        failure = {"failed": f"{type(error).__name__}: {error}".splitlines()[0].replace("|", "/")[:200]}
        traceback.clear_frames(error.__traceback__)
    gc.collect()
    if task.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    # Ranks hold the same share, so they fail alike; one that does not fail waits for the others, until the timeout.
    failures: list[dict[str, Any] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    return {"strategy": name, **next((one for one in failures if one), result)}
