"""Strategies side by side in time: all are built, then each takes a step in turn, round after round.

A machine drifts from one second to the next by more than strategies differ in, but hardly within a round. So each
strategy's time is divided by the first one's of the same round, and the median of these ratios is the result.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from contenders import training_under

from fsdp_zpp.bench.contenders import Training
from fsdp_zpp.bench.results import Task
from fsdp_zpp.bench.run import MeasuredStep, rates, step_times, synchronize, timed_steps


def interleaved(task: Task, names: list[str], warmup: int, rounds: int) -> list[dict[str, Any]]:
    """Time strategies in turn. All of them must fit into memory together, so its peak has no meaning. Collective.

    Args:
        task: Task that is trained.
        names: Strategies; a name may come twice, which shows how much two equal ones differ.
        warmup: Untimed steps of each.
        rounds: Timed steps of each, two or more.

    Returns:
        A row for each, with the median and the quartiles of its time over the first one's, round by round.
    """
    trainings = [training_under(task, name) for name in names]
    tokens = task.tokens(dist.get_rank())
    for training in trainings:
        for _ in range(warmup):
            training.step(tokens)
    times: list[list[MeasuredStep]] = [[] for _ in names]
    shuffled = random.Random(0)  # the same on all ranks
    for _ in range(rounds):
        # In a fixed order, a strategy would always bear the work that the same other one leaves behind.
        for index in shuffled.sample(range(len(names)), len(names)):
            times[index] += timed_steps(task, trainings[index], tokens, 1)
    for training in trainings:
        training.close()
    whole = [[step.whole for step in of_one] for of_one in times]
    return [
        {"strategy": name, **rates(task, of_one, tokens), "paired": paired(whole_of_one, whole[0])}
        for name, of_one, whole_of_one in zip(names, times, whole, strict=True)
    ]


def paired(times: list[float], of_first: list[float]) -> list[float]:
    """Return lower quartile, median and upper quartile of the ratios of a round."""
    return statistics.quantiles((a / b for a, b in zip(times, of_first, strict=True)), n=4)


def free_running_steps(task: Task, training: Training, tokens: torch.Tensor, steps: int) -> list[MeasuredStep]:
    """Return the mean time of steps that do not wait for each other, as one. Collective.

    Work that one step leaves under way, the next ones may hide; if each is waited for, it is part of its time.
    """
    dist.barrier()
    synchronize(task)
    began = time.perf_counter()
    for _ in range(steps):
        training.step(tokens)
    host = (time.perf_counter() - began) / steps * 1e3
    synchronize(task)
    return step_times(task, [(time.perf_counter() - began) / steps * 1e3], [host])
