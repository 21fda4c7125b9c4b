"""Errors of one hop: the values that its compression has left out so far.

[Note: Error feedback]
Before it sends a gradient g, the sender adds the error e that its compression has left out before: it sends ``Q(h)``,
where ``h = g + e``, and ``e = beta*e + (1-beta)*(h - deq(Q(h)))`` is kept (LoCo, arXiv 2407.04480; ``beta`` weighs the
old error here, so 0 is classical error feedback). Since ``deq(Q(h)) = g - (e_new - e_old) / (1-beta)``, the sum of all
that was sent differs from the sum of the gradients by the last error alone: nothing builds up, however coarse the codec
is. A block of ``h`` that is not finite is sent as it is and leaves its errors alone, or they would never recover.

A parameter that a step does not use has zeros in place of a gradient. Its errors must wait: an optimizer must not move
a head that idles by what earlier steps have left out. So if a rank has not used a parameter in the step, zeros are sent
wherever its values at the hop are zero, and the errors there stay as they are. The values are zero unless other ranks
have used the parameter. Ranks may differ in the parameters that they have not used, since only the values of what is
sent depend on that.

Errors may decay: ``decay * e`` then takes the place of ``e`` in both formulas. With beta 0 this is the error feedback
of SparseLoCo (arXiv 2508.15706, algorithm 1), whose error is a momentum from which what was sent is subtracted.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.codecs.blockwise import Blockwise, Int8
from fsdp_zpp.codecs.exact_tail import without_tail
from fsdp_zpp_kernels import dequantize_sum_quantize_with_feedback, quantize_with_feedback

from .held_errors import Extent, HeldErrors, HeldErrorsState


class ErrorBufferState(HeldErrorsState):
    """An :class:`ErrorBuffer` in a checkpoint: its errors, and how many of them share a scale."""

    block: int


class Spared(NamedTuple):
    """Errors that stay as they are where what is sent is zero.

    Attributes:
        marks: Where they are, bool [chunks * numel].
        state: All errors as they are.
    """

    marks: Tensor
    state: Tensor


class ErrorBuffer:
    """This rank's errors on one hop.

    Args:
        beta: Weight of the old errors.
        codec: Encodes the errors at rest; None keeps them in fp32.
        decay: Factor on the errors before each use.

    Attributes:
        spared: The errors that stay as they are in this use; None if the rank has used all parameters.
    """

    def __init__(self, beta: float, codec: Int8 | None, decay: float = 1.0) -> None:
        self.beta = beta
        self._codec, self._decay = codec, decay
        self._held: HeldErrors | None = None
        self._kept: HeldErrors | None = None
        self._is_new = False
        self.spared: Spared | None = None

    @property
    def state(self) -> Tensor:
        """Return the errors in the order of the payload's rows: fp32 [chunks * numel], or uint8 [chunks, nbytes]."""
        assert self._held is not None
        return self._held.state

    @property
    def block(self) -> int:
        """Return the number of errors that share a scale; 0 if they are fp32."""
        return 0 if self._codec is None else self._codec.block

    def prepare(self, extent: Extent, device: torch.device, idle: Collection[str] = ()) -> ErrorBuffer:
        """Fit the errors to ``extent``, and let them decay, for one use; return the buffer.

        Parameters without errors start from zero; errors of parameters that ``extent`` lacks do not decay.

        Args:
            extent: The values to be sent.
            device: Where they are.
            idle: The names of parameters that this rank has not used.
        """
        held, self.spared = self._held, None
        if held is None:
            self._held, self._is_new = HeldErrors.zeros(extent, self._codec, device), True
            return self
        if held.extent != extent:
            held = held.in_extent(extent)
        if idle and (marks := extent.marked(idle, device)) is not None:
            self.spared = Spared(marks, held.state.clone())
        if self._decay < 1:
            held.decay(self._decay)
        self._held = held
        return self

    # ---- for codecs without kernels of their own

    def read(self) -> Tensor:
        """Return the errors in fp32, flat."""
        assert self._held is not None
        return self._held.values()

    def write(self, errors: Tensor, chunks: int) -> None:
        """Replace the errors by fp32 ones."""
        self.state.copy_(errors if self._codec is None else self._codec.encode(errors, 1, chunks))

    def put_back(self, where: Tensor, state: Tensor) -> None:
        """Return to the errors of an earlier ``state`` in the places ``where``, bool [chunks * numel]."""
        assert self._held is not None
        self._held.put_back(where, state)

    # ---- in time

    def move(self, device: torch.device) -> None:
        """Move the errors to ``device``; after a checkpoint was loaded they are on the CPU."""
        self._held = None if self._held is None else self._held.to(device)

    def snapshot(self) -> None:
        """Keep a copy of the errors, to which :meth:`rollback` returns."""
        self._kept = None if self._held is None else self._held.copy()

    def commit(self) -> None:
        """Keep the errors as they are now, and drop the copy."""
        self._kept, self._is_new = None, False

    def rollback(self) -> None:
        """Return to the errors of the last :meth:`snapshot`, or to none if they are newer than that."""
        if self._kept is not None or self._is_new:
            self._held = self._kept
        self.commit()

    def rollback_if(self, condition: Tensor) -> None:
        """Roll back if ``condition``, a number on a device, is not 0; the host does not wait for it."""
        held, kept = self._held, self._kept
        if held is not None and (kept is not None or self._is_new):
            if kept is not None and kept.extent != held.extent:
                kept = kept.in_extent(held.extent)
            before = torch.zeros_like(held.state) if kept is None else kept.state
            torch.where(condition.to(held.state.device, non_blocking=True).bool(), before, held.state, out=held.state)
        self.commit()

    def reset(self) -> None:
        """Drop all errors."""
        self._held = None
        self.commit()

    def rescale(self, factor: Tensor) -> None:
        """Multiply the errors by ``factor``, a number on their device."""
        if self._held is not None:
            self._held = self._held.rescaled(factor)

    # ---- in checkpoints

    def state_dict(self, scale: Tensor | None) -> ErrorBufferState | None:
        """Return the errors divided by ``scale``, on the CPU, and how they are kept; None if there are none."""
        if self._held is None:
            return None
        held = self._held.copy()
        if scale is not None:
            held = held.rescaled(1 / scale)
        return {"block": self.block, **held.state_dict()}

    def load_state_dict(self, saved: ErrorBufferState | None) -> None:
        """Continue with what :meth:`state_dict` returned.

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
        self._held = HeldErrors.from_state_dict(saved, self._codec)


def encode_with_feedback(codec: Codec, values: Tensor, rows: int, cols: int, errors: ErrorBuffer) -> Tensor:
    """Encode as :meth:`Codec.encode` does, with error feedback; see [Note: Error feedback].

    Args:
        codec: The codec.
        values: As in :meth:`Codec.encode`.
        rows: As in :meth:`Codec.encode`.
        cols: As in :meth:`Codec.encode`.
        errors: What earlier calls have left out, which is added; then updated by what this one leaves out.
    """
    if errors.spared is not None:
        return _encode_sparing(codec, values, rows, cols, errors, errors.spared)
    coded, tail = without_tail(codec)
    if isinstance(coded, Blockwise):
        return quantize_with_feedback(
            values, errors.state, rows, cols, coded.bits, coded.block, errors.block, errors.beta, tail
        )
    chunks = rows * cols
    old = errors.read()
    compensated = values.view(rows, cols, -1).transpose(0, 1).flatten().float() + old
    payload = codec.encode(compensated, 1, chunks)
    sent = torch.empty_like(compensated)
    codec.decode(payload, sent, 1, chunks)
    # In place of what was sent: buffers may be large, and the payload may view what was encoded.
    new = torch.sub(compensated, sent, out=sent).mul_(1 - errors.beta).add_(old * errors.beta)
    is_finite = new * 0 == 0
    errors.write(torch.where(is_finite, new, old, out=new), chunks)
    return payload


def _encode_sparing(codec: Codec, values: Tensor, rows: int, cols: int, errors: ErrorBuffer, spared: Spared) -> Tensor:
    """Encode zeros where errors are spared and values are zero, and leave those errors as they are."""
    errors.spared = None
    chunks = values.view(rows, cols, -1).transpose(0, 1)  # in the order of the errors
    idle = spared.marks.view_as(chunks) & (chunks == 0)
    # Errors and their opposite add up to zeros. If errors are encoded, to zero them first would round their neighbours.
    opposed = torch.where(idle, errors.read().view_as(chunks).neg(), chunks)
    payload = encode_with_feedback(codec, opposed.transpose(0, 1).reshape(-1), rows, cols, errors)
    errors.put_back(idle.reshape(-1), spared.state)
    return payload


def decode_sum_encode_with_feedback(
    codec: Codec, payload: Tensor, numel: int, next_codec: Codec, scale: float, errors: ErrorBuffer
) -> Tensor:
    """Do what :meth:`Codec.decode_sum_encode` does, encoding as :func:`encode_with_feedback` does."""
    (source, tail), (target, next_tail) = without_tail(codec), without_tail(next_codec)
    is_plain = errors.spared is None and tail == next_tail
    if not (is_plain and isinstance(source, Blockwise) and isinstance(target, Blockwise)):
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
