"""Error state of one unit: its errors, and when they are committed, rolled back, rescaled and reset.

[Note: The lifetime of errors]
Errors change with the optimizer's steps: a reduction updates them, the step that follows commits the update, and all
buffers are reset together, every so many steps. Micro-batches do not count, for the hop that compresses sees their sum
(the gradient scope is lowered for that, see resolve_scopes in resolve.py). If each micro-batch synchronizes, each
reduction starts from the errors of the one before. An optimizer that does not derive from torch's announces no steps;
until one is announced, every reduction counts as a step.

A gradient scaler may skip the step. Then the errors return to what they were before the step, of which there is a copy
while losses are scaled. Errors are in units of the loss scale: when it changes, they are rescaled before the next
reduction adds them. All of this is done on the device, with the scaler's own tensors. A scaler is noticed when it
scales a loss, which may be another model's: one that then steps only other models' optimizers is ignored.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import TypedDict

import torch
from torch import Tensor
from torch.amp import GradScaler

from fsdp_zpp.config.error_feedback import LoCo

from .error_buffer import ErrorBuffer, ErrorBufferState


class SavedErrors(TypedDict):
    """An :class:`ErrorFeedbackState` in a checkpoint.

    Attributes:
        steps: Steps since the errors were reset last.
        hears_of_steps: Whether optimizers have told of their steps.
        errors: The errors of each hop; None where there are none.
    """

    steps: int
    hears_of_steps: bool
    errors: dict[str, ErrorBufferState | None]


class ErrorFeedbackState:
    """Errors of one unit's hops.

    Args:
        config: How errors are fed back.
        hops: The names of what is sent with feedback, as of :func:`fsdp_zpp.config.error_feedback.error_buffer_specs`.

    Attributes:
        codec: Encodes the errors at rest; None keeps them in fp32.
        has_uncommitted: Whether a reduction has used errors since the last step.
    """

    def __init__(self, config: LoCo, hops: Collection[str]) -> None:
        self._reset_every, self.codec = config.reset_every, config.dtype
        self._buffers = {hop: ErrorBuffer(config.beta, config.dtype, config.decay) for hop in hops}
        self.has_uncommitted = False
        self._steps = 0
        self._steps_announced = False
        self._scaler_of_loss: weakref.ref[GradScaler] | None = None
        self._scaler_of_step: weakref.ref[GradScaler] | None = None
        self._last_step_unscaled = False
        self._scale: Tensor | None = None  # the loss scale of committed errors; None is 1
        self._next_scale: Tensor | None = None  # the loss scale of uncommitted errors

    def buffer(self, hop: str) -> ErrorBuffer | None:
        """Return the errors of a hop; None if there is no feedback on it."""
        return self._buffers.get(hop)

    def begin(self, device: torch.device) -> None:
        """Note that a reduction is about to use the errors."""
        if not self._steps_announced and self.has_uncommitted:
            self._count_step()
        if self.has_uncommitted:
            return
        self.has_uncommitted = True
        if self._last_step_unscaled and self._scaler_of_step is None:
            self._scale = None  # the scaler that was heard before was another model's
        self._next_scale = self._loss_scale(device)
        if self._scale is not None:
            self._scale = self._scale.to(device)
        for buffer in self._buffers.values():
            buffer.move(device)
            if self._next_scale is not None:
                buffer.snapshot()
        if self._next_scale is not None or self._scale is not None:
            one = torch.ones((), device=device)
            now, before = (one if scale is None else scale for scale in (self._next_scale, self._scale))
            for buffer in self._buffers.values():
                buffer.rescale(now / before)

    def step_made(self, skipped: Tensor | None = None) -> None:
        """Note that an optimizer has made a step, whether or not it used this unit's gradients.

        Args:
            skipped: For optimizers that skip steps on the device: nonzero if this step was skipped. It counts towards
                ``reset_every`` all the same.
        """
        if not self._steps_announced:
            self._steps_announced, self._steps = True, 0
        self._last_step_unscaled, self._scaler_of_loss = True, None  # unless a scaler says that it was the one to call
        if self.has_uncommitted:
            self.has_uncommitted = False
            self._scale = self._chosen(skipped, self._scale, self._next_scale)
            for buffer in self._buffers.values():
                if skipped is None:
                    buffer.commit()
                else:
                    buffer.rollback_if(skipped)
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
        """Note that a scaler has scaled a loss, perhaps this model's."""
        if not self._last_step_unscaled and (self._scaler_of_step is None or self._scaler_of_step() is scaler):
            self._scaler_of_loss = weakref.ref(scaler)

    def scaler_stepped(self, scaler: GradScaler) -> None:
        """Note that a gradient scaler has called the optimizer's step, or skipped it."""
        self._scaler_of_step, self._last_step_unscaled, self._steps_announced = weakref.ref(scaler), False, True
        self._scaler_of_loss = None
        if self.has_uncommitted:
            self.has_uncommitted = False
            for buffer in self._buffers.values():
                buffer.rollback()

    def _loss_scale(self, device: torch.device) -> Tensor | None:
        scaler = None if self._scaler_of_loss is None else self._scaler_of_loss()
        return None if scaler is None else scaler.scale(torch.ones((), device=device))

    # ---- in checkpoints

    def reset(self) -> None:
        """Start anew."""
        for buffer in self._buffers.values():
            buffer.reset()
        self._steps, self.has_uncommitted, self._scale, self._next_scale = 0, False, None, None

    def state_dict(self) -> SavedErrors:
        """Return the errors, in units of an unscaled loss, and the count of steps, with tensors on the CPU."""
        scale = self._next_scale if self.has_uncommitted else self._scale
        return {
            "steps": self._steps,
            "hears_of_steps": self._steps_announced,
            "errors": {hop: buffer.state_dict(scale) for hop, buffer in self._buffers.items()},
        }

    def load_state_dict(self, state: SavedErrors) -> None:
        """Continue with what :meth:`state_dict` returned.

        Raises:
            ValueError: If those errors are of other hops, or were kept in another form.
        """
        if state["errors"].keys() != self._buffers.keys():
            raise ValueError(
                f"the error state was saved for the hops {sorted(state['errors'])}, but this model has error feedback "
                f"on {sorted(self._buffers)}; use the same, or don't load the codec state"
            )
        self.reset()
        for hop, buffer in self._buffers.items():
            buffer.load_state_dict(state["errors"][hop])
        self._steps, self._steps_announced = state["steps"], state["hears_of_steps"]
