"""Accumulated gradients: the sums of a step's earlier micro-batches, which the last one takes along."""

from __future__ import annotations

import torch
from torch import Tensor

from .flat_layout import FlatLayout
from .streams import keep_until_read, record_event, wait_for


class AccumulatedGradient:
    """Accumulated gradient of one unit, in fp32, as far reduced as its gradient scope says.

    It belongs to parameters, and the next micro-batch may use other ones; see [Note: Identity] in flat_layout.py.

    Micro-batches may add in one stream, and the last one take in another, which waits for the sums.

    Attributes:
        sums: The sums, flat; None if nothing has been accumulated.
        names: The FQNs of the parameters that are accumulated, as far as layouts were given.
    """

    def __init__(self) -> None:
        self.sums: Tensor | None = None
        self.names: frozenset[str] = frozenset()
        self._layout: FlatLayout | None = None
        self._complete: torch.cuda.Event | None = None

    def drop(self) -> None:
        """Drop the sums."""
        self._set(None, None)

    def _set(self, sums: Tensor | None, layout: FlatLayout | None) -> None:
        self.sums, self._layout = sums, layout
        self.names = frozenset() if layout is None else layout.names
        self._complete = None if sums is None else record_event(sums)

    def _wait_for(self, sums: Tensor) -> Tensor:
        wait_for(self._complete, sums.device)
        return keep_until_read(sums)

    def add(self, part: Tensor, layout: FlatLayout | None) -> None:
        """Add a micro-batch's fp32 ``part``, of whole chunks of ``layout``, which may be kept and written to.

        If layouts are fixed, or there is none, all parts have the same layout.
        """
        if layout is not None and layout.is_fixed:
            layout = None
        if self.sums is None:
            self._set(part, layout)
            return
        sums = self._wait_for(self.sums)
        if layout is None or self._layout is None or layout == self._layout:
            self._set(sums.add_(part), self._layout)
            return
        both = self._layout | layout
        self._set(self._layout.translate(sums, both).add_(layout.translate(part, both)), both)

    def take(self, layout: FlatLayout | None, divided_by: float = 1.0) -> Tensor | None:
        """Drop the sums, and return them, divided, in ``layout``, which has all their parameters; None without sums."""
        if self.sums is None:
            return None
        sums, accumulated_layout = self._wait_for(self.sums), self._layout
        self.drop()
        if layout is not None and accumulated_layout is not None:
            assert accumulated_layout.names <= layout.names, "gradients of earlier micro-batches would be lost"
            sums = accumulated_layout.translate(sums, layout)
        return sums if divided_by == 1.0 else sums.div_(divided_by)
