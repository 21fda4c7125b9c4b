"""Workers for programs, which give up early on what hangs: among random programs that is an answer like any other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from harness.pool import Pool

from .program import Program

STARTING, PATIENCE, AFTER_A_FAILURE = 60.0, 6.0, 2.0
"""Seconds for workers to import torch, to compute something, and to answer once another rank has failed."""


class ImpatientPool(Pool):
    """A pool that takes workers for hung that use no processor time: on a busy machine a program may take long."""

    most_groups = 1 << 30  # workers keep what stock has shown for what ours will
    _patience = STARTING

    def _replies(self, deadline: float) -> dict[int, tuple[bool, Any]]:
        replies: dict[int, tuple[bool, Any]] = {}
        busy, computed, patience = time.monotonic(), 0.0, self._patience
        while len(replies) < self.world and time.monotonic() < busy + patience:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in replies}
            for pipe in wait(list(waiting), timeout=0.5):
                replies[waiting[pipe]] = self._receive(pipe)
            if any(not ok or _raised(result) for ok, result in replies.values()):
                patience = AFTER_A_FAILURE
            elif (now := self._computed()) > computed + 0.05:
                busy, computed = time.monotonic(), now
        self._patience = PATIENCE
        raised = next((f", since another rank {result}" for _, result in replies.values() if _raised(result)), "")
        return {rank: replies.get(rank, (False, f"hangs{raised}")) for rank in range(self.world)}

    def _start(self) -> None:
        super()._start()
        self._patience = STARTING

    def _computed(self) -> float:
        """Seconds of processor time that the workers have taken; of the clock where that can't be told."""
        stats = [Path(f"/proc/{process.pid}/stat") for process in self._processes]
        try:
            fields = [stat.read_text().rpartition(")")[2].split() for stat in stats]
        except OSError:
            return 0.0
        return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def _raised(result: Any) -> bool:
    return isinstance(result, str) and "raises" in result


class Workers:
    """Pools of the sizes that programs ask for, one at a time."""

    def __init__(self) -> None:
        self._pool: ImpatientPool | None = None

    def run(self, function: Callable[..., Any], program: Program) -> list[Any]:
        """Run ``function(program)`` on as many ranks as the program has."""
        if self._pool is None or self._pool.world != program.world:
            self.stop()
            self._pool = ImpatientPool(program.world)
        return self._pool.run(function, program)

    def stop(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.stop(kill=True)
