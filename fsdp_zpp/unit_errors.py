"""The errors of one unit's reduction, and what happens to them in time.

[Note: The time of errors]
Errors change with the optimizer's steps: a reduction updates them, the step that follows makes the update good, and
all buffers are reset together, every so many steps. Micro-batches do not count, for the hop that compresses sees their
sum (the gradient letter is lowered for that, see levels_on in strategy_unit.py). Where each of them synchronizes, their
reductions build on each other. An optimizer that is none of torch's announces no steps: as long as none was heard of,
every reduction counts.

A gradient scaler may skip the step. Then the errors are again what they were before, of which there is a copy while a
loss is scaled. And errors are in units of the loss scale: when it has changed, they are rescaled before the next
reduction adds them. All of that is done on the device, by the scaler's own tensors. Whose scale a backward is in is
heard when a loss is scaled; a scaler that turns out to step other models' optimizers only is not listened to.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable
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

    Attributes:
        unsettled: Whether a reduction has used errors since the last step.
    """

    def __init__(self, config: LoCo, hops: Collection[str]) -> None:
        self._reset_every = config.reset_every
        self._buffers = {hop: ErrorBuffer(config.beta, config.dtype) for hop in hops}
        self.unsettled = False
        self._steps = 0
        self._hears_of_steps = False
        self._heard: weakref.ref[GradScaler] | None = None
        self._own: weakref.ref[GradScaler] | None = None
        self._is_unscaled = False
        self._scale: Tensor | None = None  # what settled errors are in units of; None is 1
        self._next_scale: Tensor | None = None  # likewise, of unsettled ones
        self._layout: Hashable = None

    def buffer(self, hop: str) -> ErrorBuffer | None:
        """The errors of a hop; None if there is no feedback on it."""
        return self._buffers.get(hop)

    def begin(self, device: torch.device, layout: Hashable = None) -> None:
        """A reduction is about to use the errors, for a gradient of the parameters that ``layout`` identifies."""
        if layout != self._layout:
            # Errors are positions in the gradient: in another layout they would be added to other parameters.
            if self._layout is not None:
                for buffer in self._buffers.values():
                    buffer.reset()
            self._layout = layout
        if not self._hears_of_steps and self.unsettled:
            self._count_step()
        if self.unsettled:
            return
        self.unsettled = True
        if self._is_unscaled and self._own is None:
            self._scale = None  # the scaler that was heard before was another model's
        self._next_scale = self._loss_scale(device)
        if self._scale is not None:
            self._scale = self._scale.to(device)
        for buffer in self._buffers.values():
            buffer.move(device)
            if self._next_scale is not None:
                buffer.keep()
        if self._next_scale is not None or self._scale is not None:
            one = torch.ones((), device=device)
            now, before = (one if scale is None else scale for scale in (self._next_scale, self._scale))
            for buffer in self._buffers.values():
                buffer.rescale(now / before)

    def step_made(self, skipped: Tensor | None = None) -> None:
        """An optimizer has made a step with what reductions left, be this unit's among them or not.

        Args:
            skipped: For optimizers that skip steps on the device: not 0 if it did. Such a step counts all the same.
        """
        if not self._hears_of_steps:
            self._hears_of_steps, self._steps = True, 0
        self._is_unscaled, self._heard = True, None  # unless a scaler says that it was the one to call
        if self.unsettled:
            self.unsettled = False
            self._scale = self._chosen(skipped, self._scale, self._next_scale)
            for buffer in self._buffers.values():
                if skipped is None:
                    buffer.settle()
                else:
                    buffer.restore_if(skipped)
        self._count_step()

    @staticmethod
    def _chosen(skipped: Tensor | None, before: Tensor | None, now: Tensor | None) -> Tensor | None:
        if skipped is None or now is None:
            return now
        before = torch.ones_like(now) if before is None else before
        return torch.where(skipped.to(now.device, non_blocking=True).bool(), before, now).reshape(())

    def _count_step(self) -> None:
        self._steps += 1
        if self._reset_every and self._steps % self._reset_every == 0:
            for buffer in self._buffers.values():
                buffer.reset()

    # ---- under a gradient scaler

    def loss_scaled(self, scaler: GradScaler) -> None:
        """A scaler has scaled a loss, perhaps this model's."""
        if not self._is_unscaled and (self._own is None or self._own() is scaler):
            self._heard = weakref.ref(scaler)

    def scaler_stepped(self, scaler: GradScaler) -> None:
        """A gradient scaler has called the optimizer's step, or skipped it."""
        self._own, self._is_unscaled, self._hears_of_steps = weakref.ref(scaler), False, True
        self._heard = None
        if self.unsettled:
            self.unsettled = False
            for buffer in self._buffers.values():
                buffer.restore()

    def _loss_scale(self, device: torch.device) -> Tensor | None:
        scaler = None if self._heard is None else self._heard()
        return None if scaler is None else scaler.scale(torch.ones((), device=device))

    # ---- in checkpoints

    def reset(self) -> None:
        """Start anew."""
        for buffer in self._buffers.values():
            buffer.reset()
        self._steps, self.unsettled, self._scale, self._next_scale, self._layout = 0, False, None, None, None

    def state_dict(self) -> dict[str, Any]:
        """The errors, in units of an unscaled loss, and their time, with tensors on the CPU."""
        scale = self._next_scale if self.unsettled else self._scale
        return {
            "steps": self._steps,
            "hears_of_steps": self._hears_of_steps,
            "errors": {hop: buffer.saved(scale) for hop, buffer in self._buffers.items()},
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
        self.reset()
        for hop, buffer in self._buffers.items():
            buffer.load(state["errors"][hop])
        self._steps, self._hears_of_steps = state["steps"], state["hears_of_steps"]
