"""Gathers full tensors in turn: the next ones while the caller has the current one, within the memory of one unit.

Tensors are gathered in batches of at most half of the largest unit, so that the current batch and the next one are no
more than a unit. The next batch starts as soon as there is room for it beside the rest of the current one and the
tensor that the caller still holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fsdp_zpp.collectives._torch_coalescing import AllGathers

from .full_tensors import FullTensor, Pending

K = TypeVar("K")
Unit = Sequence[tuple[K, FullTensor]]
"""Tensors of one unit, each with what its receiver knows it by."""

LARGEST_BATCH = 2**28
"""Bytes of a batch, unless a tensor has more: larger batches don't make better use of links."""


class _Item(NamedTuple, Generic[K]):
    """A tensor, what its receiver knows it by, and the bytes that it takes while it is gathered."""

    key: K
    tensor: FullTensor
    nbytes: int


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
        items = [_Item(key, tensor, tensor.peak_nbytes(dtype)) for unit in units for key, tensor in unit]
        self._batches = deque(self._in_batches(items))
        self._started: deque[tuple[_Item[K], Pending]] = deque()

    def __iter__(self) -> Generator[tuple[K, Tensor | None], None, None]:
        """Yield each tensor; None in its place on ranks that don't get it."""
        held = 0
        try:
            while self._started or self._batches:
                if not self._started:
                    self._start_batch()
                if self._has_room(held):
                    self._start_batch()
                item, pending = self._started.popleft()
                held = item.tensor.nbytes(self._dtype)
                tensor = pending.wait()
                del pending
                yield item.key, tensor
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
        items = [*(item for item, _ in self._started), *self._batches[0]]
        return held + sum(item.nbytes for item in items) <= self._limit

    def _start_batch(self) -> None:
        gathers = AllGathers()
        batch = [(item, item.tensor.start(self._dtype, self._to, gathers)) for item in self._batches.popleft()]
        gathers.start()
        self._started += batch

    def _in_batches(self, items: Sequence[_Item[K]]) -> list[list[_Item[K]]]:
        batches: list[list[_Item[K]]] = []
        size, room = 0, -1
        for item in items:
            if size + item.nbytes > room:
                # Beside a large tensor, there is room for less than half a unit.
                room = min(LARGEST_BATCH, self._limit // 2, max(self._limit - size, 0))
                batches.append([])
                size = 0
            batches[-1].append(item)
            size += item.nbytes
        # Largest first: the caller still holds the last one when the next batch starts.
        return [sorted(batch, key=lambda item: -item.nbytes) for batch in batches]
