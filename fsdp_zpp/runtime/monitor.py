"""``monitor``: what a model communicates in each step of its training, and how long that takes.

Hops are timed where they are launched (hop_timer.py), and the waits of the computation's stream around FSDP's hooks
(communication_waits.py). On a GPU all times are events, which :meth:`Monitor.step` reads when they have come, a step or
two later: nothing makes the host or a stream wait. Without a monitor nothing of it is there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from types import TracebackType
from typing import Self

import torch
from torch import nn

from fsdp_zpp.collectives.hop_timer import (
    MOST_INTERVALS,
    HopTimer,
    Mark,
    TimedHop,
    has_come,
    mark,
    milliseconds_between,
)
from fsdp_zpp.collectives.hops import Traffic
from fsdp_zpp.collectives.kinds import Kind, Level

from .api import communicators
from .communication_waits import CommunicationWaits
from .forward_counter import ForwardCounter
from .full_shard import Forwards, FullShardUnit, full_shard_bytes
from .outer_watch import mean_of, named_figures
from .unit import StrategyUnit, Unit, units_of

_KINDS: dict[Kind, str] = {"gather": "weights", "reduce": "gradients"}
_LEVELS: tuple[Level, ...] = ("inter", "intra")


def monitor(model: nn.Module) -> Monitor:
    """Begin to measure what ``model`` communicates; call ``step()`` of what it returns after each optimizer step.

    Args:
        model: A model, or a part of one, that is wrapped with a ``Strategy``, has a ``quantized_reduce_hook``, or has a
            quantized frozen base.

    Raises:
        ValueError: If nothing of fsdp_zpp is in ``model``.
        RuntimeError: If another monitor, which is not closed, measures ``model`` or a part of it.

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
        self._model = model
        self._timer = HopTimer()
        self._sent = self._attach(_counters(model))  # raises before anything is set
        self._device = _device(model)
        # On a CPU the host itself makes each hop, so all of its time is exposed.
        self._waits = CommunicationWaits(model, self._device) if self._device.type == "cuda" else None
        self._forwards = ForwardCounter(model)
        self._is_closed = False
        self._steps: deque[_Step] = deque()
        self._number = 0
        self._last: dict[str, float] = {}
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
            which FULL_SHARD would send in the same forwards under ``no_sync``, and ``inter/share`` and
            ``intra/share``, the part of it that was sent. These four are left out where torch sends something itself,
            which is not counted, and shares where FULL_SHARD would send nothing. All times but the step's are left out
            if it had 100,000 collectives or more. With local steps, ``outer/gain``, ``outer/momentum`` and
            ``outer/correlation`` say how large the last outer steps that are known were, in units of the nodes' mean
            change, with which momentum, and how successive changes correlate. Empty if no step is complete.

        Raises:
            RuntimeError: If the monitor is closed, or another one measures a part that is new in the model.
        """
        if self._is_closed:
            raise RuntimeError("this monitor is closed; call fsdp_zpp.monitor(model) again to go on")
        end, sent = mark(self._device), self._attach(_counters(self._model))
        self._number += 1
        hops, self._timer.hops = self._timer.hops, []
        waits = None if self._waits is None else self._waits.take()
        difference = {key: sent[key] - self._sent[key] for key in sent}
        full_shard = _full_shard(self._model, self._forwards.take())
        outer = _outer_steps(self._model)
        self._steps.append(_Step(self._number, self._began, end, hops, waits, difference, full_shard, outer))
        self._sent, self._began = sent, end
        return self._latest()

    def close(self) -> None:
        """End the measurement: the model runs as it would without."""
        if self._is_closed:
            return
        self._is_closed = True
        self._forwards.remove()
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

    def _attach(self, counters: Collection[Traffic]) -> Counter[tuple[Kind, Level]]:
        """Time all hops of ``counters``, some of which may be new, and return the bytes that they have counted."""
        if any(counter.timer not in (None, self._timer) for counter in counters):
            raise RuntimeError(
                f"another monitor measures this {type(self._model).__name__} or a part of it, and would miss what this "
                "one times; call close() of that one first, or use it in a `with` block"
            )
        total: Counter[tuple[Kind, Level]] = Counter()
        for counter in counters:
            counter.timer = self._timer
            total.update(counter.sent)
        return total


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
    outer: dict[str, float] = field(default_factory=dict)

    def is_complete(self) -> bool:
        """Return whether all times of the step are known."""
        ends = (*(hop.end for hop in self.hops), *(end for _, end in self.waits or ()))
        return has_come(self.end) and all(map(has_come, ends))

    def figures(self) -> dict[str, float]:
        """Return what :meth:`Monitor.step` returns."""
        found: dict[str, float] = {"step": self.number, "ms": milliseconds_between(self.start, self.end)}
        for kind, name in _KINDS.items():
            for level in _LEVELS:
                found[f"{name}/{level}/bytes"] = self.sent.get((kind, level), 0)
        # Of longer steps not all is known.
        if max(len(self.hops), len(self.waits or ())) < MOST_INTERVALS:
            found |= self._times()
        for level, nbytes in (self.full_shard or {}).items():
            found[f"{level}/full_shard_bytes"] = nbytes
            if nbytes:
                found[f"{level}/share"] = sum(self.sent.get((kind, level), 0) for kind in _KINDS) / nbytes
        return found | self.outer

    def _times(self) -> dict[str, float]:
        """Return the times of hops."""
        found = {}
        waits = None if self.waits is None else [self._since_start(*wait) for wait in self.waits]
        for kind, name in _KINDS.items():
            for level in _LEVELS:
                ran = [self._since_start(h.start, h.end) for h in self.hops if (h.kind, h.level) == (kind, level)]
                exposed = ran if waits is None else overlaps(ran, waits)
                found[f"{name}/{level}/ms"] = sum(end - start for start, end in ran)
                found[f"{name}/{level}/exposed_ms"] = sum(end - start for start, end in exposed)
        return found

    def _since_start(self, start: Mark, end: Mark) -> tuple[float, float]:
        return milliseconds_between(self.start, start), milliseconds_between(self.start, end)


def overlaps(
    ones: Iterable[tuple[float, float]], others: Iterable[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """Yield the parts of intervals in which one of ``others``, which do not overlap each other, runs, too."""
    others = sorted(others)
    for start, end in ones:
        for at in range(bisect_right(others, start, key=itemgetter(1)), len(others)):
            begins, ends = others[at]
            if begins >= end:
                break
            yield max(start, begins), min(end, ends)


def _counters(model: nn.Module) -> list[Traffic]:
    # By identity, since all units of a model with a comm hook count into the one Traffic of its state.
    return list({id(part.traffic): part.traffic for part in communicators(model)}.values())


def _device(model: nn.Module) -> torch.device:
    """Return the device that ``model`` computes on, which need not be that of its parameters: they may be offloaded."""
    devices = (part.compute_device() for part in communicators(model))
    return next((device for device in devices if device is not None), torch.device("cpu"))


def _outer_steps(model: nn.Module) -> dict[str, float]:
    """Return figures of the last outer steps of ``model`` that are known."""
    units = (part for part in communicators(model) if isinstance(part, StrategyUnit))
    trainings = dict.fromkeys(unit.local_training for unit in units if unit.local_training is not None)
    return named_figures(mean_of(figures for training in trainings for figures in training.outer.last.values()))


def _full_shard(model: nn.Module, forwards: Forwards) -> dict[Level, int] | None:
    """Return the bytes of FULL_SHARD; None if not all that the model itself sends is counted."""
    units: list[FullShardUnit] = []
    outermost: set[object] = set(_outermost_units(model))
    for part in communicators(model):
        of_part = part.full_shard_units(is_outermost=part in outermost)
        if of_part is None:
            return None
        units += of_part
    return full_shard_bytes(units, forwards)


def _outermost_units(module: nn.Module) -> Iterator[Unit]:
    """Yield the units that no other unit of ``module`` encloses."""
    if units_of(module):
        yield from units_of(module)
        return
    for child in module.children():
        yield from _outermost_units(child)
