"""The clock of step.py: steps timed on all ranks together, and what follows from their times."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from contenders import Contender
from models import Task
from utilization import utilization


def synchronize(task: Task) -> None:
    """Wait for this rank's GPU."""
    if task.device == "cuda":
        torch.cuda.synchronize()


class PeakMemory:
    """Peaks of what a contender allocates, above what others before it have left.

    Not all libraries let go of all that a contender of theirs has held.

    Args:
        task: What is trained.

    Attributes:
        left_gib: What was allocated on this rank from the start.
    """

    def __init__(self, task: Task) -> None:
        self._on_gpu = task.device == "cuda"
        self.left_gib = torch.cuda.memory_allocated() / 2**30 if self._on_gpu else 0.0

    def since_last(self) -> float | None:
        """The largest peak of any rank since the last call, in GiB; None on the CPU."""
        if not self._on_gpu:
            return None
        peak = torch.tensor(torch.cuda.max_memory_allocated() / 2**30 - self.left_gib, device="cuda")
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        torch.cuda.reset_peak_memory_stats()
        return peak.item()


def timed_steps(task: Task, contender: Contender, tokens: torch.Tensor, steps: int) -> list[float]:
    """Milliseconds of each step, as this rank sees them; all ranks start together."""
    times = []
    for _ in range(steps):
        dist.barrier()
        synchronize(task)
        began = time.perf_counter()
        contender.step(tokens)
        synchronize(task)
        times.append((time.perf_counter() - began) * 1e3)
    return times


def rates(task: Task, times: list[float], tokens: torch.Tensor) -> dict[str, Any]:
    """Median and range of the steps' times in ms, and what it makes of tokens a second and the GPUs' peak FLOP/s."""
    tokens_per_s = tokens.numel() * dist.get_world_size() / statistics.median(times) * 1e3
    gpu = torch.cuda.get_device_name() if task.device == "cuda" else ""
    return {
        "step_ms": statistics.median(times),
        "fastest_ms": min(times),
        "slowest_ms": max(times),
        "tokens_per_s": tokens_per_s,
        "utilization": utilization(task, tokens_per_s, gpu),
    }
