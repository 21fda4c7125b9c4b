"""``monitor``: what a model communicates in each step of its training, and how long that takes.

Hops are timed where they are launched (hop_timer.py), and the waits of the computation's stream around FSDP's hooks
(communication_waits.py). On a GPU all times are events, which :meth:`Monitor.step` reads when they have come, a step or
two later: nothing makes the host or a stream wait. Without a monitor nothing of it is there.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fsdp_zpp.collectives.hop_timer import HopTimer, Mark, TimedHop, has_come, mark, milliseconds_between
from fsdp_zpp.collectives.hops import Traffic
from fsdp_zpp.collectives.kinds import Kind, Level

from .api import communicators
from .communication_waits import CommunicationWaits
from .full_shard import FullShardUnit, full_shard_bytes
from .unit import units_of

_KINDS: dict[Kind, str] = {"gather": "weights", "reduce": "gradients"}
_LEVELS: tuple[Level, ...] = ("inter", "intra")


def monitor(model: nn.Module) -> Monitor:
    """Begin to measure what ``model`` communicates; call ``step()`` of what it returns after each optimizer step.

    Args:
        model: A model, or a part of one, that is wrapped with a ``Strategy``, has a ``quantized_reduce_hook``, or has a
            quantized frozen base.

    Raises:
        ValueError: If nothing of fsdp_zpp is in ``model``.

    Examples:
        >>> watch = monitor(model)
        >>> for batch in data:
        ...     train_step(model, batch)
        ...     figures = watch.step()  # {"step": 12, "weights/inter/bytes": 1048576, ...}
    """
    return Monitor(model)


class Monitor:
    """Measures what a model communicates in each step; :func:`monitor` makes it.

    It is a context manager, too, which closes it.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        counters = _counters(model)  # raises before anything is set
        self._model = model
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._timer = HopTimer()
        # On a CPU the host itself makes each hop, so all of its time is exposed.
        self._waits = CommunicationWaits(model, self._device) if self._device.type == "cuda" else None
        self._micro_batches = 0
        outermost = next((module for module in model.modules() if units_of(module)), model)
        self._counted: RemovableHandle | None = outermost.register_forward_pre_hook(self._count_forward)
        self._steps: deque[_Step] = deque()
        self._number = 0
        self._last: dict[str, float] = {}
        self._sent = self._attach(counters)
        self._began = mark(self._device)

    def step(self) -> dict[str, float]:
        """End a step, and return the figures of the latest step that the device has completed.

        On a GPU that is mostly the step before, and in the first calls there may be none; on a CPU it is this one. All
        calls between two of this belong to one step, those of micro-batches and of evaluation among them.

        Returns:
            ``step``, counted from 1; ``ms``, the step's time; for ``weights`` and ``gradients``, each with ``inter``
            and ``intra``, as in ``weights/inter/bytes``: ``bytes`` that this rank sent (:func:`fsdp_zpp.traffic`),
            ``ms`` that its collectives took in their streams, the wait for other ranks included, and ``exposed_ms``,
            the part of it in which the computation waited; ``inter/full_shard_bytes`` and ``intra/full_shard_bytes``,
            which FULL_SHARD would send in the same micro-batches under ``no_sync``, and ``inter/share`` and
            ``intra/share``, the part of it that was sent. These four are left out where torch sends something itself,
            which is not counted, and shares where FULL_SHARD would send nothing. Empty if no step is complete.

        Raises:
            RuntimeError: If the monitor is closed.
        """
        if self._counted is None:
            raise RuntimeError("this monitor is closed; call fsdp_zpp.monitor(model) again to go on")
        end, counters = mark(self._device), _counters(self._model)
        sent = self._attach(counters)
        self._number += 1
        hops, self._timer.hops = self._timer.hops, []
        waits = None if self._waits is None else self._waits.take()
        difference = {key: sent[key] - self._sent[key] for key in sent}
        full_shard = _full_shard(self._model, self._micro_batches)
        self._steps.append(_Step(self._number, self._began, end, hops, waits, difference, full_shard))
        self._sent, self._began, self._micro_batches = sent, end, 0
        return self._latest()

    def close(self) -> None:
        """End the measurement: the model runs as it would without."""
        if self._counted is None:
            return
        self._counted.remove()
        self._counted = None
        if self._waits is not None:
            self._waits.remove()
        for counter in _counters(self._model):
            if counter.timer is self._timer:
                counter.timer = None

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        """Close it."""
        self.close()

    def _latest(self) -> dict[str, float]:
        """Return the figures of the latest step that the device has completed."""
        while self._steps and self._steps[0].is_complete():
            self._last = self._steps.popleft().figures()
        return dict(self._last)

    def _attach(self, counters: Iterable[Traffic]) -> Counter[tuple[Kind, Level]]:
        """Time all hops of ``counters``, some of which may be new, and return the bytes that they have counted."""
        total: Counter[tuple[Kind, Level]] = Counter()
        for counter in counters:
            counter.timer = self._timer
            total.update(counter.sent)
        return total

    def _count_forward(self, *_: object) -> None:
        # Evaluation is no micro-batch.
        self._micro_batches += torch.is_grad_enabled()


@dataclass(frozen=True)
class _Step:
    """What was noted of one step."""

    number: int
    start: Mark
    end: Mark
    hops: list[TimedHop]
    waits: list[tuple[Mark, Mark]] | None
    sent: dict[tuple[Kind, Level], int]
    full_shard: dict[Level, int] | None

    def is_complete(self) -> bool:
        """Return whether all times of the step are known."""
        return has_come(self.end) and all(has_come(hop.end) for hop in self.hops)

    def figures(self) -> dict[str, float]:
        """Return what :meth:`Monitor.step` returns."""
        found: dict[str, float] = {"step": self.number, "ms": milliseconds_between(self.start, self.end)}
        waits = None if self.waits is None else [self._since_start(*wait) for wait in self.waits]
        for kind, name in _KINDS.items():
            for level in _LEVELS:
                ran = [self._since_start(h.start, h.end) for h in self.hops if (h.kind, h.level) == (kind, level)]
                found[f"{name}/{level}/bytes"] = self.sent.get((kind, level), 0)
                found[f"{name}/{level}/ms"] = sum(end - start for start, end in ran)
                exposed = ran if waits is None else overlaps(ran, waits)
                found[f"{name}/{level}/exposed_ms"] = sum(end - start for start, end in exposed)
        for level, nbytes in (self.full_shard or {}).items():
            found[f"{level}/full_shard_bytes"] = nbytes
            if nbytes:
                found[f"{level}/share"] = sum(self.sent.get((kind, level), 0) for kind in _KINDS) / nbytes
        return found

    def _since_start(self, start: Mark, end: Mark) -> tuple[float, float]:
        return milliseconds_between(self.start, start), milliseconds_between(self.start, end)


def overlaps(
    ones: Iterable[tuple[float, float]], others: Iterable[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """Yield the parts of intervals in which one of ``others``, which do not overlap each other, runs, too."""
    others = list(others)
    for start, end in ones:
        for begins, ends in others:
            if start < ends and begins < end:
                yield max(start, begins), min(end, ends)


def _counters(model: nn.Module) -> list[Traffic]:
    # By identity, since all units of a model with a comm hook count into the one Traffic of its state.
    return list({id(part.traffic): part.traffic for part in communicators(model)}.values())


def _full_shard(model: nn.Module, micro_batches: int) -> dict[Level, int] | None:
    """Return the bytes of FULL_SHARD; None if not all that the model itself sends is counted."""
    units: list[FullShardUnit] = []
    for number, part in enumerate(communicators(model)):
        of_part = part.full_shard_units(is_outermost=number == 0)
        if of_part is None:
            return None
        units += of_part
    return full_shard_bytes(units, micro_batches)
