"""Which frozen units are gathered: the one in use, and the one that comes next.

[Note: Residency]
Units are gathered on demand, when the first of their weights is dequantized, so forward, backward, recomputation and
generation are all one case, whatever hooks ran or didn't. There are two buffers. One holds the unit that is in use, the
other the one that was used before it, until the next is gathered into it ahead of its use: the order in which units
were asked for tells which (the last two decide, since a forward and a backward go through a unit in opposite
directions). A wrong guess costs a gather. Ranks that run the same model ask in the same order, so they guess, and
gather, the same.

On GPUs gathers run in a stream of their own. It waits for the computation that was enqueued before it, which is the
last to read the buffer; the computation waits for the gather when it comes to that unit.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..labels import labelled


class Gathered(Protocol):
    """What can be gathered into a buffer."""

    label: str

    @property
    def device(self) -> torch.device: ...

    @property
    def gathered_shape(self) -> tuple[int, int]: ...

    def gather(self, out: Tensor) -> None: ...


@dataclass
class _Buffer:
    """Memory for one gathered unit; kept, since memory that comes and goes across streams fragments."""

    memory: Tensor | None = None
    unit: Gathered | None = None
    gathered: Tensor | None = None
    ready: Any = None

    def hold(self, unit: Gathered) -> Tensor:
        """Room for ``unit``."""
        rows, nbytes = unit.gathered_shape
        if self.memory is None or self.memory.numel() < rows * nbytes or self.memory.device != unit.device:
            self.memory = self.gathered = None  # before there is another
            self.memory = torch.empty(rows * nbytes, dtype=torch.uint8, device=unit.device)
        self.unit, self.gathered = unit, self.memory[: rows * nbytes].view(rows, nbytes)
        return self.gathered


class Residency:
    """Gathers units on demand and ahead of it. See [Note: Residency]."""

    def __init__(self) -> None:
        self._current, self._other = _Buffer(), _Buffer()
        self._before: Gathered | None = None
        self._next: dict[tuple[int, int], Gathered] = {}
        self._streams: dict[torch.device, Any] = {}

    def demand(self, unit: Gathered) -> Tensor:
        """The gathered payload of ``unit``, valid in the current stream until another unit is demanded. Collective."""
        if self._current.unit is not unit:
            self._switch(unit)
        if self._current.ready is not None:
            # Every time: this may be another stream than the last one that asked.
            torch.cuda.current_stream(unit.device).wait_event(self._current.ready)
        assert self._current.gathered is not None
        return self._current.gathered

    @property
    def nbytes(self) -> int:
        """Bytes that both buffers take."""
        return sum(b.memory.nbytes for b in (self._current, self._other) if b.memory is not None)

    def forget(self, unit: Gathered) -> None:
        """Gather ``unit`` anew when it is asked for next."""
        for buffer in (self._current, self._other):
            if buffer.unit is unit:
                buffer.unit = buffer.gathered = None

    def _switch(self, unit: Gathered) -> None:
        """Make ``unit`` the current one, and gather the one that is expected after it."""
        before, last = self._before, self._current.unit
        if last is not None:
            if before is not None:
                self._next[id(before), id(last)] = unit
            self._before = last
        if self._other.unit is not unit:
            self._gather(unit, self._other)
        self._current, self._other = self._other, self._current
        expected = None if last is None else self._next.get((id(last), id(unit)))
        if expected is not None and expected is not self._other.unit:
            with labelled("prefetch", expected.label):
                self._gather(expected, self._other)

    def _gather(self, unit: Gathered, buffer: _Buffer) -> None:
        with self._beside_computation(unit.device):
            out = buffer.hold(unit)
            unit.gather(out)
            buffer.ready = torch.cuda.current_stream(unit.device).record_event() if out.is_cuda else None

    def _beside_computation(self, device: torch.device) -> AbstractContextManager[Any]:
        """The stream of gathers, after the computation that is enqueued so far."""
        if device.type != "cuda":
            return nullcontext()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(stream)
