"""Intervals in which the computation's stream waits for communication.

Around the computation of a unit, FSDP has the stream wait: before its forward and its backward for weights, and at the
end of a backward for gradients. A mark before and one after each of these places leave nothing but the wait between
them. Both FSDPs use the same three kinds of hooks; those of this file run just before and just after theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from fsdp_zpp.collectives._torch_autograd import at_end_of_backward
from fsdp_zpp.collectives.hop_timer import MOST_INTERVALS, Mark, mark

from .unit import units_of


class CommunicationWaits:
    """Notes when a model's computation waits for communication.

    Args:
        model: Model with units.
        device: Device that it computes on.

    Attributes:
        intervals: Those since the list was emptied, at most ``MOST_INTERVALS``.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.intervals: list[tuple[Mark, Mark]] = []
        self._device = device
        self._began: Mark | None = None
        self._asked_before = self._asked_after = False
        modules = [module for module in model.modules() if units_of(module)]
        self._handles = [handle for module in modules for handle in self._watch(module)]

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()

    def take(self) -> list[tuple[Mark, Mark]]:
        """Return the intervals, and empty the list; a backward that has failed is forgotten."""
        intervals, self.intervals = self.intervals, []
        self._began, self._asked_before, self._asked_after = None, False, False
        return intervals

    def _watch(self, module: nn.Module) -> Iterator[RemovableHandle]:
        # FullyShardedDataParallel waits in its own forward, around the module that it wraps.
        inner = module.module if isinstance(module, FullyShardedDataParallel) else module
        # Hooks of a compiled layer would be compiled, too, as functions that differ from layer to layer.
        begin, end, begin_in_backward, end_in_backward = map(
            torch.compiler.disable,
            (
                lambda *_: self._begin(),
                lambda *_: self._end(),
                lambda *given: _watch_gradients(given[-1], self._begin_in_backward),
                lambda *given: _watch_gradients(given[-1], self._end_in_backward),
            ),
        )
        yield module.register_forward_pre_hook(begin, prepend=True)
        yield inner.register_forward_pre_hook(end, prepend=inner is not module)
        yield inner.register_forward_hook(begin_in_backward, prepend=True)
        yield module.register_forward_hook(end_in_backward)

    def _begin(self) -> None:
        self._began = mark(self._device)

    def _end(self) -> None:
        if self._began is not None:
            if len(self.intervals) < MOST_INTERVALS:
                self.intervals.append((self._began, mark(self._device)))
            self._began = None

    def _begin_in_backward(self) -> None:
        if not self._asked_before:
            self._asked_before = True
            at_end_of_backward(self._begin)
        self._begin()

    def _end_in_backward(self) -> None:
        self._end()
        if not self._asked_after:
            # FSDP has asked for its own call since the first call of _begin_in_backward.
            self._asked_after = True
            at_end_of_backward(self._end_backward)

    def _end_backward(self) -> None:
        self._end()
        self._asked_before = self._asked_after = False


def _watch_gradients(output: object, note: Callable[[], None]) -> None:
    """Have ``note`` called when the gradient of a forward's output is there, in turn with FSDP's own hooks."""
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _: note())
