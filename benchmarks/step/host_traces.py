"""Figures and traces of the CPU's part of a step on rank 0, for ``run.py --host-time``; host_time.py reads them.

[Note: Three looks at the host]
A profiler slows what it watches, so each look is for what it disturbs least.

- Without a profiler: time until ``step()`` returns and until the GPU is done, and each thread's time on a core and in
  the queue for one, as the kernel counts them. A thread that waits in CUDA spins, so time on a core isn't all work.
- A trace without stacks: operators, labels and CUDA calls cost a microsecond or so each. Times in tables are from it.
- A trace with stacks: it slows each Python call, so it only says whose Python the time between operators is.

A sampling thread checks the last at little cost. It must get the GIL to look, so it sees mostly the places that
release it, which are operators and CUDA calls: its shares of Python are rough.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from host_calls import BACKWARD, STEP, owner_of_file
from result_files import Row
from torch.profiler import ProfilerActivity, profile, record_function

from fsdp_zpp.bench.contenders import Training
from fsdp_zpp.bench.results import Task
from fsdp_zpp.bench.run import synchronize
from fsdp_zpp.comm.agreement import from_first_rank

TRACED, STACKED = 2, 1
"""Labelled steps of a trace: few, since a step may have 100,000 Python calls."""
SAMPLED, SAMPLED_MS = 20, 5000
"""Most steps, and about as many ms, under the sampling thread."""
EVERY_S = 0.0005
"""Seconds between samples."""


def host_figures(task: Task, training: Training, tokens: torch.Tensor, steps: int, trace: Path) -> Row:
    """Measure the host's part of further steps on rank 0, and trace them; other ranks return nothing. Collective.

    Args:
        task: Task that is trained.
        training: Its training, warmed up.
        tokens: Tokens of this rank's steps.
        steps: Steps without a profiler.
        trace: File of the trace, ``*.trace.json.gz``; that with stacks is ``*.stacks.json.gz`` beside it.
    """
    step, figures = _Steps(task, training, tokens), {}
    before = thread_times()
    times = [step() for _ in range(steps)]
    threads = {name: _difference(now, before.get(name), steps) for name, now in thread_times().items()}
    figures["host_ms"], figures["until_gpu_done_ms"] = (statistics.median(each) for each in zip(*times, strict=True))
    figures["threads"] = {name: own for name, own in threads.items() if own["on_core_ms"] + own["queued_ms"] > 0.1}
    # The first traced step sets up CUPTI, so it has no label.
    figures["trace"] = _traced(step, TRACED, trace, unlabelled=1)
    stacks = trace.with_name(trace.name.replace(".trace.", ".stacks."))
    figures["stacks"] = _traced(step, STACKED, stacks, with_stack=True)
    fitting = round(SAMPLED_MS / figures["host_ms"])
    count = int(from_first_rank(str(max(2, min(SAMPLED, fitting)))))
    with sampled() as samples:
        times = [step() for _ in range(count)]
    figures["sampled_ms"] = statistics.median(host for host, _ in times)
    figures["samples"] = {f"{thread}: {owner}": count for (thread, owner), count in samples.most_common()}
    return {"host_time": figures} if dist.get_rank() == 0 else {}


class _Steps:
    """Takes a step that all ranks begin together with idle GPUs; returns ms until it returns, and until it is done."""

    def __init__(self, task: Task, training: Training, tokens: torch.Tensor):
        self._task, self._training, self._tokens = task, training, tokens

    def __call__(self, label: str | None = None) -> tuple[float, float]:
        dist.barrier()
        synchronize(self._task)
        began = time.perf_counter()
        if label is None:
            self._training.step(self._tokens)
        else:
            with record_function(label), _backward_labelled():
                self._training.step(self._tokens)
        returned = time.perf_counter()
        synchronize(self._task)
        return (returned - began) * 1e3, (time.perf_counter() - began) * 1e3


@contextmanager
def _backward_labelled() -> Iterator[None]:
    """Label each backward, in which the main thread waits for autograd's."""
    original: Callable[..., None] = torch.Tensor.backward

    def labelled(*args: Any, **options: Any) -> None:
        with record_function(BACKWARD):
            original(*args, **options)

    torch.Tensor.backward = labelled  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.backward = original  # type: ignore[method-assign]


def _traced(step: _Steps, steps: int, trace: Path, unlabelled: int = 0, with_stack: bool = False) -> str | None:
    """Take steps, traced on rank 0, and return the trace's name; None if it could not be written."""
    labels = [None] * unlabelled + [STEP] * steps
    if dist.get_rank() != 0:
        for _ in labels:
            step()
        return None
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities, with_stack=with_stack, acc_events=True) as profiler:
        for label in labels:
            step(label)
    try:
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
    except Exception:  # the other ranks go on, so this one must
        traceback.print_exc()
        return None
    return trace.name


@contextmanager
def sampled() -> Iterator[Counter[tuple[str, str]]]:
    """Return a context that counts whose Python the main thread and others run, every :data:`EVERY_S`."""
    counts: Counter[tuple[str, str]] = Counter()
    main, done = threading.main_thread().ident, threading.Event()

    def watch() -> None:
        own = threading.get_ident()
        python = {thread.ident for thread in threading.enumerate()} - {main}
        while not done.wait(EVERY_S):
            for ident, frame in sys._current_frames().items():
                # Autograd's threads aren't Python's, and have frames only while they run hooks.
                if ident != own and ident not in python:
                    counts["main" if ident == main else "autograd", _owner(frame)] += 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(EVERY_S / 5)
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield counts
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)


def _owner(frame: FrameType | None) -> str:
    """Return whose the innermost frame is that is anybody's."""
    while frame is not None:
        if owner := owner_of_file(frame.f_code.co_filename):
            return owner
        frame = frame.f_back
    return "other Python"


def thread_times() -> dict[str, tuple[float, float]]:
    """Return each thread's ms on a core and in the queue for one by its name and number, if the kernel tells them."""
    times = {}
    for task in Path("/proc/self/task").glob("*"):
        try:
            on_core, queued, _ = map(int, (task / "schedstat").read_text().split())
            times[f"{(task / 'comm').read_text().strip()} {task.name}"] = (on_core / 1e6, queued / 1e6)
        except (OSError, ValueError):
            continue
    return times


def _difference(now: tuple[float, float], before: tuple[float, float] | None, steps: int) -> dict[str, float]:
    on_core, queued = before or (0.0, 0.0)
    return {"on_core_ms": (now[0] - on_core) / steps, "queued_ms": (now[1] - queued) / steps}
