"""All-gathers that start together, by a private name of torch's: as one collective of each process group and dtype.

Each collective takes a CPU tens of microseconds to start, and a network its latency.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from .hops import all_gather_single


class Waitable(Protocol):
    """What has been started and can be waited for, such as ``dist.Work``."""

    def wait(self) -> object:
        """Wait for it: on a GPU the current stream, not the host."""


class AllGathers:
    """All-gathers that start when all of them are known.

    Ranks of a group must add the same ones, in the same order.
    """

    def __init__(self) -> None:
        self._of_groups: dict[tuple[dist.ProcessGroup, torch.dtype], _OfGroup] = {}

    def add(self, out: Tensor, own: Tensor, group: dist.ProcessGroup) -> Waitable:
        """Add one: of ``own`` into ``out``, which belong to it until what is returned has been waited for."""
        # gloo would make one tensor of those that start together, in a dtype that all can be cast to.
        of_group = self._of_groups.setdefault((group, own.dtype), _OfGroup(group))
        of_group.tensors.append((out, own))
        return of_group

    def start(self) -> None:
        """Start all that were added."""
        for of_group in self._of_groups.values():
            of_group.start()
        self._of_groups = {}


class _OfGroup:
    """The all-gathers of one process group and dtype."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.tensors: list[tuple[Tensor, Tensor]] = []
        self._works: list[Waitable] | None = None

    def start(self) -> None:
        gather = all_gather_single()
        with _coalescing_manager(self.group, async_ops=True) as started:
            for out, own in self.tensors:
                gather(out, own, group=self.group)
        self._works = [started]

    def wait(self) -> None:
        assert self._works is not None, "all-gathers are waited for before they start"
        while self._works:
            self._works.pop().wait()
        self.tensors = []  # whose readers are done with them at different times
