"""A pool that gives up early on what hangs, which among random programs is an answer like any other."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from .pool import Pool

STARTING = 60.0
"""Patience with workers that import torch."""


class ImpatientPool(Pool):
    """As :class:`Pool`, but takes workers that compute nothing for ``patience`` seconds for hung.

    Their processor time says so, since on a busy machine a program may take long. Once a rank has failed, the others
    get two seconds.
    """

    most_groups = 1 << 30  # workers keep what stock has shown for what ours will

    def __init__(self, world: int, patience: float = 6.0) -> None:
        super().__init__(world)
        self.patience = patience
        self._fresh = True

    def _replies(self, deadline: float) -> dict[int, tuple[bool, Any]]:
        replies: dict[int, tuple[bool, Any]] = {}
        busy, computed, patience = time.monotonic(), 0.0, STARTING if self._fresh else self.patience
        while len(replies) < self.world and time.monotonic() < busy + patience:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in replies}
            for pipe in wait(list(waiting), timeout=0.5):
                replies[waiting[pipe]] = self._receive(pipe)
            if any(not ok or _raised(result) for ok, result in replies.values()):
                patience = 2.0
            elif (now := self._computed()) > computed + 0.05:
                busy, computed = time.monotonic(), now
        self._fresh = False
        raised = next((f", since another rank {result}" for _, result in replies.values() if _raised(result)), "")
        return {rank: replies.get(rank, (False, f"hangs{raised}")) for rank in range(self.world)}

    def _start(self) -> None:
        super()._start()
        self._fresh = True

    def _computed(self) -> float:
        """Seconds of processor time that the workers have taken; of the clock where that can't be told."""
        stats = [Path(f"/proc/{process.pid}/stat") for process in self._processes]
        try:
            fields = [stat.read_text().rpartition(")")[2].split() for stat in stats]
        except OSError:
            return 0.0
        return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def _raised(result: Any) -> bool:
    """Whether a run ended with an exception, after which other ranks may hang."""
    return isinstance(result, str) and "raises" in result
