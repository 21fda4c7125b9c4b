"""Measurements of one strategy, and how it fails: time, memory, bytes sent, a trace, generation."""

from __future__ import annotations

import argparse
import gc
import time
import traceback
from typing import Any

import torch
import torch.distributed as dist
from contenders import training_under
from models import Task
from overlap import overlap
from timing import PeakMemory, free_running_steps, rates, synchronize, timed_steps
from torch.profiler import ProfilerActivity, profile
from training import Training

PROFILED_STEPS = 2


def figures(arguments: argparse.Namespace, task: Task, training: Training, memory: PeakMemory) -> dict[str, Any]:
    """Measure step time in ms, peak memory in GiB and bytes sent in MiB a step, with the rates that follow."""
    result: dict[str, Any] = {"build_peak_gib": memory.since_last(), "left_by_others_gib": memory.left_gib}
    tokens = task.tokens(dist.get_rank())
    losses = [training.step(tokens) for _ in range(arguments.warmup)]
    memory.since_last()
    before = training.sent()
    timed = free_running_steps if arguments.free_running else timed_steps
    times = timed(task, training, tokens, arguments.steps)
    after = training.sent()
    result |= rates(task, times, tokens) | {"peak_gib": memory.since_last()}
    if before is not None and after is not None:
        result["sent_mib_a_step"] = {hop: (after[hop] - before[hop]) / arguments.steps / 2**20 for hop in after}
    losses.append(training.step(tokens))
    result["loss"] = [losses[0].item(), losses[-1].item()]
    return result


def profiled(arguments: argparse.Namespace, training: Training, tokens: torch.Tensor, name: str) -> dict[str, Any]:
    """Trace further steps on rank 0, write the trace, and return its figures of communication."""
    if dist.get_rank() != 0:
        for _ in range(PROFILED_STEPS):
            training.step(tokens)
        return {}
    cuda = arguments.device == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiler:
        for _ in range(PROFILED_STEPS):
            training.step(tokens)
        if cuda:
            torch.cuda.synchronize()
    arguments.out.mkdir(parents=True, exist_ok=True)
    trace = arguments.out / f"{name.replace(':', '-')}.trace.json.gz"
    profiler.export_chrome_trace(str(trace))
    return overlap(trace, PROFILED_STEPS)


def generation(task: Task, training: Training, memory: PeakMemory) -> dict[str, Any]:
    """Measure tokens a second of a greedy generation, the same on all ranks, and its peak memory in GiB."""
    prompt = torch.arange(16, device=task.place)[None] + 100
    if training.generate(prompt, task.generate) is None:
        return {}
    dist.barrier()
    synchronize(task)
    memory.since_last()
    began = time.perf_counter()
    tokens = training.generate(prompt, task.generate)
    synchronize(task)
    seconds = time.perf_counter() - began
    assert tokens is not None
    gathered = [torch.empty_like(tokens) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tokens)
    return {
        "generate_tokens_per_s": task.generate / seconds,
        "generate_peak_gib": memory.since_last(),
        "same_on_all_ranks": all(torch.equal(other, tokens) for other in gathered),
    }


def measure(arguments: argparse.Namespace, task: Task, name: str) -> dict[str, Any]:
    """Build one strategy's training and measure it."""
    memory = PeakMemory(task)
    began = time.perf_counter()
    training = training_under(task, name)
    try:
        dist.barrier()
        result = {"build_s": time.perf_counter() - began, **figures(arguments, task, training, memory)}
        if arguments.profile:
            result |= profiled(arguments, training, task.tokens(dist.get_rank()), name)
        if task.generate:
            result |= generation(task, training, memory)
        return result
    finally:
        training.close()


def attempt(arguments: argparse.Namespace, task: Task, name: str) -> dict[str, Any]:
    """Return the row of :func:`measure`, or of its failure on any rank."""
    result: dict[str, Any] = {}
    failure: dict[str, Any] | None = None
    try:
        result = measure(arguments, task, name)
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
