"""The clock: steps timed on all ranks together, and the rates that follow from their times."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .task import Task
from .training import Training
from .utilization import utilization


def synchronize(task: Task) -> None:
    """Wait for this rank's GPU."""
    if task.device == "cuda":
        torch.cuda.synchronize()


class PeakMemory:
    """Peaks of a contender's memory, above the memory that earlier ones have left: not all libraries free theirs.

    Args:
        task: Task that is trained.

    Attributes:
        left_gib: GiB allocated on this rank from the start.
    """

    def __init__(self, task: Task) -> None:
        self._on_gpu = task.device == "cuda"
        self.left_gib = torch.cuda.memory_allocated() / 2**30 if self._on_gpu else 0.0

    def since_last(self) -> float | None:
        """Return the largest peak of any rank since the last call, in GiB; None on the CPU. Collective."""
        if not self._on_gpu:
            return None
        peak = torch.tensor(torch.cuda.max_memory_allocated() / 2**30 - self.left_gib, device="cuda")
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        torch.cuda.reset_peak_memory_stats()
        return peak.item()


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of one step.

    Attributes:
        whole: Until this rank's GPU was done.
        host: Until ``step()`` had returned, on the slowest rank.
    """

    whole: float
    host: float


def timed_steps(task: Task, training: Training, tokens: torch.Tensor, steps: int) -> list[StepTime]:
    """Time each step; all ranks start together. Collective."""
    whole, host = [], []
    for _ in range(steps):
        dist.barrier()
        synchronize(task)
        began = time.perf_counter()
        training.step(tokens)
        host.append((time.perf_counter() - began) * 1e3)
        synchronize(task)
        whole.append((time.perf_counter() - began) * 1e3)
    return _step_times(task, whole, host)


def free_running_steps(task: Task, training: Training, tokens: torch.Tensor, steps: int) -> list[StepTime]:
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
    return _step_times(task, [(time.perf_counter() - began) / steps * 1e3], [host])


def _step_times(task: Task, whole: list[float], host: list[float]) -> list[StepTime]:
    """Return this rank's times with the slowest rank's for the host. Collective."""
    slowest = torch.tensor(host, dtype=torch.float64, device=task.place)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [StepTime(*both) for both in zip(whole, slowest.tolist(), strict=True)]


def rates(task: Task, times: list[StepTime], tokens: torch.Tensor) -> dict[str, Any]:
    """Return median, range and quartiles of the steps' times in ms, tokens/s, and the share of the peak FLOP/s."""
    whole = [step.whole for step in times]
    tokens_per_s = tokens.numel() * dist.get_world_size() / statistics.median(whole) * 1e3
    on_gpu = task.device == "cuda"
    return {
        "step_ms": statistics.median(whole),
        "fastest_ms": min(whole),
        "slowest_ms": max(whole),
        "quartiles_ms": _quartiles(whole),
        "host_ms": statistics.median(step.host for step in times) if on_gpu else None,
        "tokens_per_s": tokens_per_s,
        "utilization": utilization(task, tokens_per_s, torch.cuda.get_device_name() if on_gpu else ""),
    }


def _quartiles(times: list[float]) -> list[float]:
    """Return the lower and the upper quartile; of one time, that time twice."""
    lower, _, upper = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return [lower, upper]
