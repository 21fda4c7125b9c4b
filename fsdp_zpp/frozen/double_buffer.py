"""Two buffers for gathered frozen units: one for the unit in use, one to prefetch the next.

Units are gathered on demand, when the first of their weights is dequantized. So forward, backward, recomputation and
generation are one case, and no hooks are needed. One buffer holds the unit in use. The other holds the unit that was in
use before, until the next one is prefetched into it. Earlier requests tell which unit is next, by the last two units,
since forward and backward go through the units in opposite directions. A wrong guess costs one gather. Ranks that run
the same model request units in the same order, so they make the same guesses and enter the same gathers.

On GPUs gathers run in a side stream. A gather waits for the computation enqueued so far, which is the last to read the
buffer it overwrites; the computation waits for the gather when it reaches that unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fsdp_zpp.collectives.flat_layout import keep_recent
from fsdp_zpp.collectives.hops import labelled
from fsdp_zpp.collectives.streams import SideStream, record_event, wait_for

from .weight import out_of_inference_mode


class Gathered(Protocol):
    """A unit that can be gathered into a buffer."""

    label: str

    @property
    def device(self) -> torch.device: ...

    @property
    def gathered_shape(self) -> tuple[int, int]: ...

    def gather(self, out: Tensor) -> None: ...

    def split(self, gathered: Tensor) -> Sequence[Tensor]: ...


class _Place(NamedTuple):
    """A unit's place in a buffer: all of it, and the parts that it splits it into."""

    gathered: Tensor
    parts: Sequence[Tensor]


@dataclass
class _Buffer:
    """Memory for one gathered unit, kept from unit to unit: allocations that cross streams fragment the memory.

    A unit comes back to the same memory in every step, so its place is made once.
    """

    memory: Tensor | None = None
    unit: Gathered | None = None
    places: dict[Gathered, _Place] = field(default_factory=dict)
    parts: Sequence[Tensor] = ()
    ready: torch.cuda.Event | None = None

    def hold(self, unit: Gathered) -> Tensor:
        """Return memory for ``unit``, uint8 of its gathered shape, without its values."""
        rows, nbytes = unit.gathered_shape
        if self.memory is None or self.memory.numel() < rows * nbytes or self.memory.device != unit.device:
            # Views, too: this frees the old memory before the new is allocated, not after.
            self.memory, self.parts = None, ()
            self.places.clear()
            self.memory = torch.empty(rows * nbytes, dtype=torch.uint8, device=unit.device)
        place = self.places.get(unit)
        if place is None:
            gathered = self.memory[: rows * nbytes].view(rows, nbytes)
            place = self.places[unit] = _Place(gathered, unit.split(gathered))
        self.unit, self.parts = unit, place.parts
        return place.gathered


class DoubleBuffer:
    """Gathers units on demand, and prefetches the next. See the top of this file."""

    def __init__(self) -> None:
        self._current, self._other = _Buffer(), _Buffer()
        self._previous: Gathered | None = None
        # The unit that came after two in a row, by the second and the first. Where always other units come before one,
        # as with experts, few of the pairs come again, so only the last few are kept.
        self._next: dict[Gathered, dict[Gathered, Gathered]] = {}
        self._stream = SideStream()

    def get(self, unit: Gathered) -> Sequence[Tensor]:
        """Return the gathered parts of ``unit``, valid in this stream until another unit is requested. Collective."""
        if self._current.unit is not unit:
            self._switch(unit)
        # At every request, since this may be another stream than that of the last one.
        wait_for(self._current.ready, unit.device)
        return self._current.parts

    @property
    def nbytes(self) -> int:
        """Return how many bytes both buffers take."""
        return sum(b.memory.nbytes for b in (self._current, self._other) if b.memory is not None)

    def drop(self, unit: Gathered) -> None:
        """Drop what is gathered of ``unit``, so that the next request gathers it again."""
        for buffer in (self._current, self._other):
            if buffer.unit is unit:
                buffer.unit, buffer.parts = None, ()

    def _switch(self, unit: Gathered) -> None:
        """Make ``unit`` the current one, and prefetch the one that is expected after it."""
        before, last = self._previous, self._current.unit
        if last is not None:
            if before is not None:
                followers = self._next.setdefault(last, {})
                if followers.get(before) is not unit:
                    followers.pop(before, None)
                    keep_recent(followers, before, unit)
            self._previous = last
        if self._other.unit is not unit:
            self._gather(unit, self._other)
        self._current, self._other = self._other, self._current
        expected = None if last is None else self._next.get(unit, {}).get(last)
        # Where forward turns into backward, the unit that is expected is the last one, and still gathered.
        if expected is not None and expected is not self._other.unit:
            with labelled("prefetch", expected.label):
                self._gather(expected, self._other)

    def _gather(self, unit: Gathered, buffer: _Buffer) -> None:
        # The buffer is allocated in the side stream, too. When it is freed for a larger one, its memory goes back to
        # that stream, which has waited for all that the computation read of it. It outlives the forward, too.
        with out_of_inference_mode(), self._stream.after_current(unit.device):
            out = buffer.hold(unit)
            unit.gather(out)
            buffer.ready = record_event(out)
