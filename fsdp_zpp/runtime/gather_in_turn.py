"""Gathers full tensors in turn: the next ones while the caller has the current one, within the memory of one unit.

Tensors are gathered in batches of at most half of the largest unit, so that the current batch and the next one are no
more than a unit. The next batch starts as soon as there is room for it beside the rest of the current one and the
tensor that the caller still holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from .full_tensors import FullTensor, Pending

K = TypeVar("K")
Unit = Sequence[tuple[K, FullTensor]]
"""Tensors of one unit, each with what its receiver knows it by."""

LARGEST_BATCH = 2**28
"""Bytes of a batch, unless a tensor has more: larger batches don't make better use of links."""


class GatherInTurn(Generic[K]):
    """Gathers the tensors of a model, batch by batch. Collective; all ranks must do so in the same order.

    Args:
        units: The tensors, unit by unit, equal on all ranks.
        dtype: The dtype to cast floating-point tensors to; None leaves them as they are stored.
        to: The global rank that gets them; None means all.
    """

    def __init__(self, units: Sequence[Unit[K]], dtype: torch.dtype | None = None, to: int | None = None) -> None:
        self._dtype, self._to = dtype, to
        self._limit = max((sum(tensor.nbytes(dtype) for _, tensor in unit) for unit in units), default=0)
        self._batches = deque(self._in_batches([named for unit in units for named in unit]))
        self._started: deque[tuple[K, Pending]] = deque()

    def __iter__(self) -> Generator[tuple[K, Tensor | None], None, None]:
        """Yield each tensor; None in its place on ranks that don't get it."""
        held = 0
        try:
            while self._started or self._batches:
                if not self._started:
                    self._start_batch()
                if self._has_room(held):
                    self._start_batch()
                key, pending = self._started.popleft()
                held = pending.source.nbytes(self._dtype)
                tensor = pending.wait()
                del pending
                yield key, tensor
                del tensor
        finally:
            # The caller may leave early, at the same tensor on all ranks.
            for _, pending in self._started:
                pending.drain()
            self._started.clear()

    def _has_room(self, held: int) -> bool:
        """Return whether the next batch fits beside what is started and the tensor that the caller holds."""
        if not self._batches:
            return False
        started = sum(self._nbytes(pending.source) for _, pending in self._started)
        return held + started + self._batch_nbytes(self._batches[0]) <= self._limit

    def _start_batch(self) -> None:
        for key, tensor in self._batches.popleft():
            self._started.append((key, tensor.start(self._dtype, self._to)))

    def _in_batches(self, tensors: Sequence[tuple[K, FullTensor]]) -> list[Unit[K]]:
        batches: list[list[tuple[K, FullTensor]]] = []
        size, room = 0, -1
        for key, tensor in tensors:
            nbytes = self._nbytes(tensor)
            if size + nbytes > room:
                # Beside a large tensor, there is room for less than half a unit.
                room = min(LARGEST_BATCH, self._limit // 2, max(self._limit - size, 0))
                batches.append([])
                size = 0
            batches[-1].append((key, tensor))
            size += nbytes
        # Largest first: the caller still holds the last one when the next batch starts.
        return [sorted(batch, key=lambda named: -self._nbytes(named[1])) for batch in batches]

    def _batch_nbytes(self, batch: Unit[K]) -> int:
        return sum(self._nbytes(tensor) for _, tensor in batch)

    def _nbytes(self, tensor: FullTensor) -> int:
        return tensor.peak_nbytes(self._dtype)
