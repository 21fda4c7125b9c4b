"""Streams beside the computation's, and memory that passes from one stream to another.

torch's allocator reuses memory as soon as nothing refers to it, in the stream that allocated it. Work in that stream is
ordered, but a kernel of another stream may still read the memory. So either the reader's stream is recorded with the
tensor before the last reference goes (:func:`keep_until_read`), or the stream that will write to the memory waits for
the reader's (:meth:`SideStream.after_current`). Neither makes the host wait.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


class SideStream:
    """A stream for communication beside the computation, made at its first use. On a CPU there is none."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._readers: set[torch.cuda.Stream] = set()  # as few as a device's streams, which torch uses in turn

    def after_current(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the stream as a context; it waits for all work so far of the current stream and of its readers."""
        if device.type != "cuda":
            return nullcontext()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        # What is made here next may reuse memory that the readers still read.
        for other in {torch.cuda.current_stream(device), *self._readers}:
            stream.wait_stream(other)
        return torch.cuda.stream(stream)

    def read_by_current(self) -> None:
        """Note that the current stream reads what was made in this one."""
        for device in self._streams:
            self._readers.add(torch.cuda.current_stream(device))


def record_event(made: Tensor) -> torch.cuda.Event | None:
    """Record an event in the current stream, after ``made`` has its values; None on a CPU."""
    return torch.cuda.current_stream(made.device).record_event() if made.is_cuda else None


def wait_for(event: torch.cuda.Event | None, device: torch.device) -> None:
    """Wait in the current stream for an event of :func:`record_event`."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


def keep_until_read(tensor: Tensor) -> Tensor:
    """Return ``tensor``, its memory kept from reuse until the current stream has done all that it is given before the
    last reference goes."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor
