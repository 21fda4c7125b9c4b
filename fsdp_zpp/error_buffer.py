"""What the compression of one hop has left out so far.

[Note: Error feedback]
The sender adds to what it is about to send what its compression has left out before: ``h = g + e`` is sent, as
``Q(h)``, and ``e = beta*e + (1-beta)*(h - deq(Q(h)))`` is kept (LoCo, arXiv 2407.04480; ``beta`` weighs the old error
here, so 0 is classical error feedback). Since ``deq(Q(h)) = g - (e_new - e_old) / (1-beta)``, the sum of all that was
sent differs from the sum of the gradients by the last error alone: nothing builds up, however coarse the codec is.
A block of ``h`` that is not finite is sent as it is and leaves its errors alone, or they would never recover.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .codecs import Int8


class ErrorBuffer:
    """The errors of one sender on one hop.

    Args:
        beta: Weight of the old errors.
        codec: Encodes the errors at rest; None keeps them in fp32.

    Attributes:
        state: The errors, in the order of the payload's rows: fp32 [chunks * numel], or uint8 [chunks,
            codec.nbytes(numel)].
    """

    def __init__(self, beta: float, codec: Int8 | None) -> None:
        self.beta = beta
        self._codec = codec
        self._numel = 0
        self._kept: Tensor | None = None
        self._is_new = False
        self._state: Tensor | None = None

    @property
    def state(self) -> Tensor:
        assert self._state is not None
        return self._state

    @property
    def device(self) -> torch.device | None:
        """Where the errors are; None if there are none yet."""
        return None if self._state is None else self._state.device

    @property
    def block(self) -> int:
        """Errors that share a scale; 0 if they are fp32."""
        return 0 if self._codec is None else self._codec.block

    def begin(self, chunks: int, numel: int, device: torch.device) -> ErrorBuffer:
        """Be ready for ``chunks`` chunks of ``numel`` values; errors of another shape are forgotten."""
        shape = (chunks * numel,) if self._codec is None else (chunks, self._codec.nbytes(numel))
        if self._state is None or self._state.shape != shape:
            dtype = torch.float32 if self._codec is None else torch.uint8
            self._state, self._is_new = torch.zeros(shape, dtype=dtype, device=device), True
        self._numel = numel
        return self

    # ---- for codecs without kernels of their own

    def read(self, chunks: int) -> Tensor:
        """The errors in fp32, flat."""
        if self._codec is None:
            return self.state
        values = torch.empty(chunks * self._numel, device=self.state.device)
        self._codec.decode(self.state, values, 1, chunks)
        return values

    def write(self, errors: Tensor, chunks: int) -> None:
        """Replace the errors by fp32 ones."""
        self.state.copy_(errors if self._codec is None else self._codec.encode(errors, 1, chunks))

    # ---- in time

    def move(self, device: torch.device) -> None:
        """Have the errors on ``device``; those of a checkpoint come from the CPU."""
        self._state = None if self._state is None else self._state.to(device)

    def keep(self) -> None:
        """Make it possible to take back what comes until :meth:`settle`."""
        self._kept = None if self._state is None else self._state.clone()

    def settle(self) -> None:
        """What has come since :meth:`keep` stays."""
        self._kept, self._is_new = None, False

    def restore(self) -> None:
        """Take back what has come since :meth:`keep`, or since there are errors."""
        if self._kept is not None or self._is_new:
            self._state = self._kept
        self.settle()

    def restore_if(self, condition: Tensor) -> None:
        """As :meth:`restore` if ``condition``, a number on a device, is not 0; without asking the device."""
        if self._state is not None and (self._kept is not None or self._is_new):
            before = self._kept if self._kept is not None else torch.zeros_like(self._state)
            torch.where(
                condition.to(self._state.device, non_blocking=True).bool(), before, self._state, out=self._state
            )
        self.settle()

    def reset(self) -> None:
        """Forget all errors."""
        self._state = None
        self.settle()

    def rescale(self, factor: Tensor) -> None:
        """Multiply the errors by ``factor``, a number on their device."""
        if self._state is not None:
            values = self._state if self._codec is None else self._codec.scales(self._state, self._numel)
            values.mul_(factor)

    # ---- in checkpoints

    def saved(self, scale: Tensor | None) -> dict[str, Any] | None:
        """The errors divided by ``scale``, on the CPU, and how they are kept; None if there are none."""
        if self._state is None:
            return None
        copy = ErrorBuffer(self.beta, self._codec)
        copy._state, copy._numel = self._state.clone(), self._numel
        if scale is not None:
            copy.rescale(1 / scale)
        return {"state": copy.state.cpu(), "numel": self._numel, "block": self.block}

    def load(self, saved: dict[str, Any] | None) -> None:
        """Go on with what :meth:`saved` gave.

        Raises:
            ValueError: If those errors were kept in another form.
        """
        self.reset()
        if saved is None:
            return
        if saved["block"] != self.block:
            was, is_now = (f"Int8({block})" if block else "None" for block in (saved["block"], self.block))
            raise ValueError(f"the errors were saved under LoCo(dtype={was}), but are to be kept as dtype={is_now}")
        self._state, self._numel = saved["state"].clone(), saved["numel"]
