"""Jobs of two processes that save into a folder and are killed there, at a moment that counts operations on its files.

Two jobs take turns at such moments, so that what they do within each other's saves is the same each time. They start in
a process that has imported what they need and has no threads, and so can be forked.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch.distributed as dist
from file_operations import before_operations
from harness.pool import free_port, init_process_group

from fsdp_zpp.integrations import _turns

WORLD = 2
PATIENCE = 100.0
"""Seconds after which jobs hang."""
MOMENT = 0.5
"""Seconds that a process goes on, at most, without the other one of its job."""
_fork: Any = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Moment:
    """Before an operation of a rank on a file of the folder, counted from 0; the end of the save counts as the last."""

    rank: int
    operation: int


@dataclass(frozen=True)
class Job:
    """A job that saves checkpoints.

    Args:
        save: What all ranks call, with the folder.
        killed_at: When a process is killed, if any.
        takes_down: Whether the other process is killed at once then, as torchrun does; else it goes on for a moment.
        pauses_at: When a rank lets the other job go on, if any, until that has come to its own such moment, or its end.
    """

    save: Callable[[Path], Any]
    killed_at: Moment | None = None
    takes_down: bool = True
    pauses_at: Moment | None = None


@dataclass(frozen=True)
class End:
    """How a job ended.

    Args:
        codes: Exit codes by rank.
        operations: How many each rank has done; -1 for one that was killed.
        errors: What it has raised.
    """

    codes: list[int]
    operations: list[int]
    errors: list[str]


class _Gate:
    """Closed until it is opened. Unlike an ``Event``, it takes no harm if a process is killed that waits at it."""

    def __init__(self) -> None:
        self._tokens = _fork.Semaphore(0)

    def wait(self) -> None:
        if self._tokens.acquire(timeout=PATIENCE):
            self._tokens.release()

    def open(self) -> None:
        self._tokens.release()


@dataclass(frozen=True)
class _Turn:
    """A turn of a job: the event that it waits for, and the one that it lets happen.

    Args:
        begins: When it may begin.
        goes_on: When it may go on after its pause.
        yields: What the other job waits for.
    """

    begins: _Gate
    goes_on: _Gate
    yields: tuple[_Gate, ...]


def run(jobs: Sequence[Job], folder: Path, checkpoint: Path, notes: Path) -> list[End]:
    """Run one job, or two that take turns in a checkpoint: the second begins when the first pauses or has ended.

    A job that waits for its turn lets the other go on.

    Args:
        jobs: The jobs.
        folder: What jobs are given.
        checkpoint: The folder in it on whose files operations are counted.
        notes: Another, for what processes leave to be read here.
    """
    notes.mkdir(parents=True, exist_ok=True)
    at_once, second_begins, first_goes_on, second_goes_on = (_Gate() for _ in range(4))
    at_once.open()
    turns = [
        _Turn(at_once, first_goes_on, (second_begins, second_goes_on)),
        _Turn(second_begins, second_goes_on, (first_goes_on,)),
    ]
    running = []
    for index, (job, turn) in enumerate(zip(jobs, turns, strict=False)):
        port = free_port()
        for rank in range(WORLD):
            files = folder, checkpoint, notes / f"{index}-{rank}"
            process = _fork.Process(target=_main, args=(rank, port, job, turn, *files))
            process.start()
            running.append((index, process))
    _wait(running, jobs, turns)
    return [
        End(
            [process.exitcode for at, process in running if at == index],
            [int(_read(notes / f"{index}-{rank}.operations") or -1) for rank in range(WORLD)],
            [_read(notes / f"{index}-{rank}.error") for rank in range(WORLD)],
        )
        for index in range(len(jobs))
    ]


def _wait(processes: Sequence[tuple[int, Any]], jobs: Sequence[Job], turns: Sequence[_Turn]) -> None:
    """Wait for all, and let each job's end be seen by its other process, and by the other job."""
    running, deadline = list(processes), time.monotonic() + PATIENCE
    ends = dict.fromkeys(range(len(jobs)), deadline)  # of each job
    while running:
        now = time.monotonic()
        for index, process in running:
            if now >= ends[index]:
                process.kill()
        assert now < deadline, "jobs hang"
        # What is killed ends as any other does.
        ended = wait([process.sentinel for _, process in running], max(0.01, min(ends.values()) - now))
        for index, process in running:
            if process.sentinel in ended:
                process.join()
                if process.exitcode:
                    ends[index] = min(ends[index], time.monotonic() + MOMENT * (not jobs[index].takes_down))
        running = [each for each in running if each[1].sentinel not in ended]
        for index, turn in enumerate(turns):
            if index not in [at for at, _ in running]:
                ends.pop(index, None)
                _open(turn.yields)


def _main(rank: int, port: int, job: Job, turn: _Turn, folder: Path, checkpoint: Path, notes: Path) -> None:
    printed = os.open(f"{notes}.printed", os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(printed, descriptor)
    operations = count()

    def before(changes: bool) -> None:
        now = Moment(rank, next(operations))
        if now.operation == 0:
            turn.begins.wait()
        if now == job.pauses_at:
            _open(turn.yields)
            turn.goes_on.wait()
        if now == job.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def pause(seconds: float) -> None:
        _open(turn.yields)
        time.sleep(0.01)

    _turns.sleep = pause
    os.fsync = lambda descriptor: None  # type: ignore[assignment] # a process that is killed loses nothing of the page cache
    init_process_group(rank, WORLD, port)
    code = 0
    try:
        with before_operations(checkpoint, before):
            job.save(folder)
            before(False)
        dist.barrier()
    except BaseException:
        Path(f"{notes}.error").write_text(traceback.format_exc())
        code = 1
    Path(f"{notes}.operations").write_text(str(next(operations)))
    os._exit(code)  # what frameworks do at an exit waits for processes that are killed


def _open(gates: Sequence[_Gate]) -> None:
    for gate in gates:
        gate.open()


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
