"""The errors of one hop: what its compression has left out so far.

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

from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.codecs.blockwise import Blockwise, Int8
from fsdp_zpp.codecs.exact_tail import without_tail
from fsdp_zpp.kernels import dequantize_sum_quantize_with_feedback, quantize_with_feedback


class ErrorBuffer:
    """This rank's errors on one hop.

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
    def block(self) -> int:
        """Errors that share a scale; 0 if they are fp32."""
        return 0 if self._codec is None else self._codec.block

    def prepare(self, chunks: int, numel: int, device: torch.device) -> ErrorBuffer:
        """Have errors for ``chunks`` chunks of ``numel`` values; they start from zero if the shape differs."""
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
        values = torch.empty(chunks * self._numel, dtype=torch.float32, device=self.state.device)
        self._codec.decode(self.state, values, 1, chunks)
        return values

    def write(self, errors: Tensor, chunks: int) -> None:
        """Replace the errors by fp32 ones."""
        self.state.copy_(errors if self._codec is None else self._codec.encode(errors, 1, chunks))

    # ---- in time

    def move(self, device: torch.device) -> None:
        """Move the errors to ``device``; after a checkpoint was loaded they are on the CPU."""
        self._state = None if self._state is None else self._state.to(device)

    def snapshot(self) -> None:
        """Keep a copy of the errors, to which :meth:`rollback` returns."""
        self._kept = None if self._state is None else self._state.clone()

    def commit(self) -> None:
        """Keep the errors as they are now, and drop the copy."""
        self._kept, self._is_new = None, False

    def rollback(self) -> None:
        """Return to the errors of the last :meth:`snapshot`, or to none if they are newer than that."""
        if self._kept is not None or self._is_new:
            self._state = self._kept
        self.commit()

    def rollback_if(self, condition: Tensor) -> None:
        """As :meth:`rollback` if ``condition``, a number on a device, is not 0. The host does not wait for it."""
        if self._state is not None and (self._kept is not None or self._is_new):
            before = self._kept if self._kept is not None else torch.zeros_like(self._state)
            torch.where(
                condition.to(self._state.device, non_blocking=True).bool(), before, self._state, out=self._state
            )
        self.commit()

    def reset(self) -> None:
        """Drop all errors."""
        self._state = None
        self.commit()

    def rescale(self, factor: Tensor) -> None:
        """Multiply the errors by ``factor``, a number on their device."""
        if self._state is not None:
            values = self._state if self._codec is None else self._codec.scales(self._state, self._numel)
            values.mul_(factor)

    # ---- in checkpoints

    def state_dict(self, scale: Tensor | None) -> dict[str, Any] | None:
        """The errors divided by ``scale``, on the CPU, and how they are kept; None if there are none."""
        if self._state is None:
            return None
        copy = ErrorBuffer(self.beta, self._codec)
        copy._state, copy._numel = self._state.clone(), self._numel
        if scale is not None:
            copy.rescale(1 / scale)
        return {"state": copy.state.cpu(), "numel": self._numel, "block": self.block}

    def load_state_dict(self, saved: dict[str, Any] | None) -> None:
        """Go on with what :meth:`state_dict` gave.

        Raises:
            ValueError: If those errors were kept in another form.
        """
        self.reset()
        if saved is None:
            return
        if saved["block"] != self.block:
            was, is_now = (f"Int8({block})" if block else "None" for block in (saved["block"], self.block))
            raise ValueError(
                f"the error state was saved with LoCo(dtype={was}), but this model has LoCo(dtype={is_now}); use the "
                "same, or don't load the codec state"
            )
        self._state, self._numel = saved["state"].clone(), saved["numel"]


def encode_with_feedback(codec: Codec, values: Tensor, rows: int, cols: int, errors: ErrorBuffer) -> Tensor:
    """Encode as :meth:`Codec.encode` does, with error feedback; see [Note: Error feedback].

    Args:
        codec: The codec.
        values: As in :meth:`Codec.encode`.
        rows: As in :meth:`Codec.encode`.
        cols: As in :meth:`Codec.encode`.
        errors: What earlier calls have left out, which is added; then updated by what this one leaves out.
    """
    coded, tail = without_tail(codec)
    if isinstance(coded, Blockwise):
        return quantize_with_feedback(
            values, errors.state, rows, cols, coded.bits, coded.block, errors.block, errors.beta, tail
        )
    chunks = rows * cols
    old = errors.read(chunks)
    compensated = values.view(rows, cols, -1).transpose(0, 1).flatten().float() + old
    payload = codec.encode(compensated, 1, chunks)
    sent = torch.empty_like(compensated)
    codec.decode(payload, sent, 1, chunks)
    new = errors.beta * old + (1 - errors.beta) * (compensated - sent)
    errors.write(torch.where(new.isfinite(), new, old), chunks)
    return payload


def decode_sum_encode_with_feedback(
    codec: Codec, payload: Tensor, numel: int, next_codec: Codec, scale: float, errors: ErrorBuffer
) -> Tensor:
    """:meth:`Codec.decode_sum_encode` with error feedback on what it encodes, as in :func:`encode_with_feedback`."""
    (source, tail), (target, next_tail) = without_tail(codec), without_tail(next_codec)
    if not isinstance(source, Blockwise) or not isinstance(target, Blockwise) or tail != next_tail:
        return encode_with_feedback(next_codec, codec.sums(payload, numel, scale), 1, payload.shape[1], errors)
    return dequantize_sum_quantize_with_feedback(
        payload,
        errors.state,
        numel,
        source.bits,
        source.block,
        target.bits,
        target.block,
        scale,
        errors.block,
        errors.beta,
        tail,
    )
