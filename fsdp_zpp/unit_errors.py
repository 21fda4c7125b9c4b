"""The errors of one unit's reduction, and what happens to them in time.

[Note: The time of errors]
Errors change with the optimizer's steps: a reduction updates them, the step that follows makes the update good, and
all buffers of a unit are reset together, every so many steps. Micro-batches do not count, for the hop that compresses
sees their sum (the gradient letter is lowered for that, see levels_on in strategy_unit.py).

A gradient scaler may skip the step. Then the errors are again what they were before, of which there is a copy where a
scaler has been seen. And errors are in units of the loss scale: when it has changed, they are rescaled before the next
reduction adds them. All of that is done on the device, by the scaler's own tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from .error_buffer import ErrorBuffer
from .error_feedback import LoCo


class UnitErrors:
    """The errors of one unit's hops.

    Args:
        config: How errors are fed back.
        hops: The names of what is sent with feedback, as of :func:`fsdp_zpp.error_feedback.senders`.
    """

    def __init__(self, config: LoCo, hops: Collection[str]) -> None:
        self._reset_every = config.reset_every
        self._buffers = {hop: ErrorBuffer(config.beta, config.dtype) for hop in hops}
        self._steps = 0
        self._unsettled = False
        self._hears_of_steps = False
        self._scale_now: Callable[[torch.device], Tensor | None] = lambda device: None
        self._scale: Tensor | None = None  # what the settled errors are in units of, if a scaler has been seen
        self._next_scale: Tensor | None = None

    def buffer(self, hop: str) -> ErrorBuffer | None:
        """The errors of a hop; None if there is no feedback on it."""
        return self._buffers.get(hop)

    def begin(self, device: torch.device) -> None:
        """A reduction is about to use the errors. Several before a step, each synchronizing, build on each other."""
        if self._unsettled and self._hears_of_steps:
            return
        if self._unsettled:  # the optimizer is none of torch's
            self._settle(None)
        self._unsettled = True
        for buffer in self._buffers.values():
            buffer.move(device)
        if self._scale is None:
            return
        for buffer in self._buffers.values():
            buffer.keep()
        scale = self._scale_now(device)
        self._scale = self._scale.to(device)
        self._next_scale = self._scale if scale is None else scale
        for buffer in self._buffers.values():
            buffer.rescale(self._next_scale / self._scale)

    def step_made(self, skipped: Tensor | None = None) -> None:
        """An optimizer has made a step with what the reduction left.

        Args:
            skipped: For optimizers that skip steps on the device: not 0 if it did.
        """
        self._hears_of_steps = True
        if self._unsettled:
            self._settle(skipped)

    def _settle(self, skipped: Tensor | None) -> None:
        self._unsettled = False
        if self._next_scale is not None and self._scale is not None:
            scale, self._next_scale = self._next_scale, None
            if skipped is not None:
                scale = torch.where(skipped.to(scale.device, non_blocking=True).bool(), self._scale, scale)
            self._scale = scale
        for buffer in self._buffers.values():
            if skipped is None:
                buffer.settle()
            else:
                buffer.restore_if(skipped)
        self._steps += 1
        if self._reset_every and self._steps % self._reset_every == 0:
            self.reset()

    def reset(self) -> None:
        """Forget all errors."""
        for buffer in self._buffers.values():
            buffer.reset()

    def scaler_stepped(self, scaler: GradScaler) -> None:
        """A gradient scaler has called the optimizer's step, or skipped it."""
        reference = weakref.ref(scaler)

        def scale_now(device: torch.device) -> Tensor | None:
            alive = reference()
            return None if alive is None else alive.scale(torch.ones((), device=device))

        self._scale_now, self._hears_of_steps = scale_now, True
        if self._unsettled:
            self._unsettled, self._next_scale = False, None
            for buffer in self._buffers.values():
                buffer.restore()
        if self._scale is None and (device := self._device()) is not None:
            self._scale = scale_now(device)

    def _device(self) -> torch.device | None:
        return next((buffer.device for buffer in self._buffers.values() if buffer.device is not None), None)

    # ---- in checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The errors and their time, with tensors on the CPU."""
        scale = self._scale if self._next_scale is None else self._next_scale
        now = None if scale is None else self._scale_now(scale.device)
        return {
            "steps": self._steps,
            "scale": None if scale is None else scale.item(),
            "scale_now": None if now is None else now.item(),
            "errors": {hop: buffer.saved() for hop, buffer in self._buffers.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what :meth:`state_dict` gave.

        Raises:
            ValueError: If those errors are of other hops, or were kept in another form.
        """
        if state["errors"].keys() != self._buffers.keys():
            raise ValueError(
                f"the errors were saved for the hops {sorted(state['errors'])}, but the strategy feeds them back on "
                f"{sorted(self._buffers)}"
            )
        for hop, buffer in self._buffers.items():
            buffer.load(state["errors"][hop])
        self._steps, self._unsettled, self._next_scale = state["steps"], False, None
        self._scale = None if state["scale"] is None else torch.tensor(state["scale"])
        now = state["scale_now"]
        # A scaler makes itself known with its first step only, but may have changed its scale after the last one.
        self._scale_now = lambda device: None if now is None else torch.tensor(now, device=device)
