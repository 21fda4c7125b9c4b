"""Errors that codecs leave, kept for the next step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_zpp.codecs import Blockwise, Codec, Int8, without_tail
from fsdp_zpp.strategy.error_feedback import LoCo
from fsdp_zpp_kernels import dequantize_sum_quantize_with_feedback, quantize_with_feedback
from fsdp_zpp_kernels.reference import SCALE_MASK

from .flat_layout import Extent, FlatLayout, Piece

# ---- held errors
#
# The errors of one hop, in one tensor. When the gradient's layout changes, errors move with their parameters.


@dataclass(frozen=True)
class HeldErrors:
    """Errors of the current gradient's parameters; ``parked`` has errors of parameters that this gradient lacks.

    ``state`` is fp32 [chunks * numel], or uint8 [chunks, codec.nbytes(numel)]; kernels update it in place. Parked
    errors have the same form and are never changed in place. See [Note: Identity] in flat_layout.py.
    """

    state: Tensor
    extent: Extent
    parked: dict[Piece, Tensor]
    codec: Int8 | None

    @classmethod
    def zeros(cls, extent: Extent, codec: Int8 | None, device: torch.device) -> HeldErrors:
        chunks, numel = extent.chunks, extent.numel
        shape = (chunks * numel,) if codec is None else (chunks, codec.nbytes(numel))
        dtype = torch.float32 if codec is None else torch.uint8
        return cls(torch.zeros(shape, dtype=dtype, device=device), extent, {}, codec)

    def values(self) -> Tensor:
        """Return the errors in fp32, flat."""
        return self._decoded(self.state, self.extent.chunks, self.extent.numel)

    def _decoded(self, state: Tensor, chunks: int, numel: int) -> Tensor:
        if self.codec is None:
            return state.view(-1)
        values = torch.empty(chunks * numel, dtype=torch.float32, device=state.device)
        self.codec.decode(state, values, 1, chunks)
        return values

    def _encoded(self, values: Tensor, chunks: int) -> Tensor:
        return values if self.codec is None else self.codec.encode(values.contiguous().view(-1), 1, chunks)

    def in_extent(self, extent: Extent) -> HeldErrors:
        """Return the errors for another gradient; errors of parameters that it lacks are parked for a later one."""
        old, new = self.extent.layout, extent.layout
        # Errors start from zero if a layout is unknown, or if only one of the extents has whole chunks. If neither has
        # whole chunks, errors of values that another rank has sent so far start from zero on this rank, too.
        if old is None or new is None or self.extent.is_whole != extent.is_whole:
            return HeldErrors.zeros(extent, self.codec, self.state.device)
        # The last hop may have written these errors on another stream. Their memory may be freed before they are read.
        for made in (self.state, *self.parked.values()):
            if made.is_cuda:
                made.record_stream(torch.cuda.current_stream(made.device))
        flat = self.extent.embed(self.values())
        chunks, parts = flat.numel() // old.numel, old.split(flat)
        parked = {
            piece: self._encoded(part.clone(), chunks)
            for piece, part in parts.items()
            if piece not in new.pieces and piece.numel
        }
        for piece, state in self.parked.items():
            if piece in new.pieces:
                parts[piece] = self._decoded(state, chunks, piece.numel).view(chunks, -1)
            else:
                parked[piece] = state
        values = extent.cut(new.join(parts, chunks, flat))
        return HeldErrors(self._encoded(values, extent.chunks), extent, parked, self.codec)

    def to(self, device: torch.device) -> HeldErrors:
        parked = {piece: state.to(device) for piece, state in self.parked.items()}
        return HeldErrors(self.state.to(device), self.extent, parked, self.codec)

    def decay(self, factor: float) -> None:
        """Multiply the errors of the present extent by ``factor``, in place; parked errors do not decay."""
        if self.codec is None:
            self.state.mul_(factor)
            return
        scales = self.codec.scales(self.state, self.extent.numel)
        # Clear the low bits of scales, as kernels do, so that decoding stays exact ([Note: Exact products] in
        # reference.py).
        scales.copy_(((scales * factor).view(torch.int32) & SCALE_MASK).view(torch.float32))

    def put_back(self, where: Tensor, before: Tensor) -> None:
        """Restore the errors of the state ``before`` in the places ``where``, bool [chunks * numel], in place."""
        if self.codec is None:
            torch.where(where, before, self.state, out=self.state)
            return
        chunks, numel = self.extent.chunks, self.extent.numel
        earlier = self._decoded(before, chunks, numel)
        values = torch.where(where, earlier, self.values())
        self.state.copy_(self._encoded(values, chunks))
        # A block may also hold errors of other parameters, which change the block's scale in every step. Each new scale
        # would round the restored errors again. So the block keeps its old scale, under which the restored errors are
        # exact. This scale is doubled only as often as the other errors need.
        layout = self.codec.layout
        blocks = [self._in_blocks(each, layout.block) for each in (values, where & (earlier != 0))]
        scales, was = layout.scales(self.state, numel), layout.scales(before, numel)
        times = torch.log2(scales / was).nan_to_num(0, 0, 0).ceil().clamp(min=0).int()
        doubled = (was.view(torch.int32) + (times << 23)).view(torch.float32)  # in the exponent, so that it is exact
        scales.copy_(torch.where(blocks[1].any(-1), doubled, scales))
        codes = (blocks[0] / scales.unsqueeze(-1)).nan_to_num().round().to(torch.int8)
        layout.codes(self.state, numel).copy_(codes.view(chunks, -1)[:, :numel].view(torch.uint8))

    def _in_blocks(self, values: Tensor, block: int) -> Tensor:
        chunks, numel = self.extent.chunks, self.extent.numel
        return F.pad(values.view(chunks, numel), (0, -numel % block)).view(chunks, -1, block)


# ---- error buffer
#
# [Note: Error feedback]
# The sender of a gradient ``g`` keeps an error ``e``, which compression has left out of earlier gradients. It sends
# ``Q(h)``, where ``h = g + e``, and sets ``e = beta*e + (1-beta)*(h - deq(Q(h)))`` (LoCo, arXiv 2407.04480). Here,
# ``beta`` weighs the old error, so 0 is classical error feedback. Since ``deq(Q(h)) = g - (e_new - e_old) / (1-beta)``,
# the sum of all sent values differs from the sum of all gradients only by the last error over ``1-beta``: errors do not
# build up. A block of ``h`` that is not finite is sent as NaN and keeps its old errors: a NaN would never leave them.
#
# If a step does not use a parameter, such as an unused head, the gradient there is zero. An optimizer must not move the
# parameter by errors of earlier steps. So a rank that has not used a parameter in the step sends zeros wherever the
# parameter's values at the hop are zero, and leaves the errors there unchanged. After the first hop, the values are
# sums over ranks, which are not zero if another rank has used the parameter. Payload sizes do not depend on use, so
# ranks may differ in the parameters that they use.
#
# Errors may decay: ``decay * e`` then replaces ``e`` in both formulas. With beta 0 this is the error feedback of
# SparseLoCo (arXiv 2508.15706, algorithm 1): its error is a momentum, from which each step subtracts what it has sent.


class ErrorBufferState(TypedDict):
    """An :class:`ErrorBuffer` in a checkpoint.

    ``layout`` has the pieces, starts and number of values of a :class:`FlatLayout`; ``parked`` has, for
    each piece, its fields and then its errors.
    """

    block: int
    state: Tensor
    numel: int
    starts: list[int]
    layout: tuple[list[tuple[int, str, int]], list[int], int] | None
    parked: list[tuple[int, str, int, Tensor]]


class Spared(NamedTuple):
    """``marks``, bool [chunks * numel], marks errors of unused parameters; ``state`` has all errors before decay."""

    marks: Tensor
    state: Tensor


class ErrorBuffer:
    """This rank's errors on one hop; ``codec`` encodes them between reductions, None keeps them in fp32.

    ``spared`` says which errors the next encoding leaves unchanged; None if the rank has used all parameters.
    """

    def __init__(self, beta: float, codec: Int8 | None, decay: float = 1.0) -> None:
        self.beta = beta
        self._codec, self._decay = codec, decay
        self._errors: HeldErrors | None = None
        self.spared: Spared | None = None

    @property
    def state(self) -> Tensor:
        """Return the errors in the order of the payload's rows: fp32 [chunks * numel], or uint8 [chunks, nbytes]."""
        assert self._errors is not None
        return self._errors.state

    @property
    def block(self) -> int:
        """Return the number of errors that share a scale; 0 if they are fp32."""
        return 0 if self._codec is None else self._codec.block

    def prepare(self, extent: Extent, device: torch.device, idle: Collection[str] = ()) -> ErrorBuffer:
        """Fit the errors to ``extent`` and decay them; return this buffer. Call it before each encoding.

        Parameters without errors start from zero; errors of parameters that ``extent`` lacks do not decay. ``idle`` are
        the parameters that this rank has not used.
        """
        held, self.spared = self._errors, None
        if held is None:
            self._errors = HeldErrors.zeros(extent, self._codec, device)
            return self
        if held.extent != extent:
            held = held.in_extent(extent)
        if idle and (marks := extent.marked(idle, device)) is not None:
            self.spared = Spared(marks, held.state.clone())
        if self._decay < 1:
            held.decay(self._decay)
        self._errors = held
        return self

    # ---- for codecs without kernels of their own

    def read(self) -> Tensor:
        assert self._errors is not None
        return self._errors.values()

    def write(self, errors: Tensor, chunks: int) -> None:
        self.state.copy_(errors if self._codec is None else self._codec.encode(errors, 1, chunks))

    def put_back(self, where: Tensor, state: Tensor) -> None:
        assert self._errors is not None
        self._errors.put_back(where, state)

    # ---- moves and resets

    def move(self, device: torch.device) -> None:
        self._errors = None if self._errors is None else self._errors.to(device)

    def reset(self) -> None:
        self._errors = None

    # ---- in checkpoints

    def state_dict(self) -> ErrorBufferState | None:
        """Return the errors, on the CPU, and their form; None if there are no errors."""
        held = self._errors
        if held is None:
            return None
        extent, layout = held.extent, held.extent.layout
        pieces = [] if layout is None else [(*piece,) for piece in layout.pieces]
        return {
            "block": self.block,
            "state": held.state.to("cpu", copy=True),
            "numel": extent.numel,
            "starts": list(extent.starts),
            "layout": None if layout is None else (pieces, list(layout.starts), layout.numel),
            "parked": [(*piece, state.cpu()) for piece, state in held.parked.items()],
        }

    def load_state_dict(self, saved: ErrorBufferState | None) -> None:
        self.reset()
        if saved is None:
            return
        if saved["block"] != self.block:
            was, is_now = (f"Int8({block})" if block else "None" for block in (saved["block"], self.block))
            raise ValueError(
                f"the error state was saved with LoCo(dtype={was}), but this model has LoCo(dtype={is_now}); use the "
                "same, or don't load the codec state"
            )
        layout = None
        if saved["layout"] is not None:
            pieces, starts, numel = saved["layout"]
            layout = FlatLayout(tuple(Piece(*piece) for piece in pieces), tuple(starts), numel)
        extent = Extent(saved["numel"], tuple(saved["starts"]), layout)
        parked = {Piece(order, name, numel): state.clone() for order, name, numel, state in saved["parked"]}
        self._errors = HeldErrors(saved["state"].clone(), extent, parked, self._codec)


def encode_with_feedback(codec: Codec, values: Tensor, rows: int, cols: int, errors: ErrorBuffer) -> Tensor:
    """Encode as :meth:`Codec.encode` does, adding ``errors`` and updating them; see [Note: Error feedback]."""
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
    # Buffers may be large, so reuse ``sent``. Keep ``compensated``, since the payload may be a view of it.
    new = torch.sub(compensated, sent, out=sent).mul_(1 - errors.beta).add_(old * errors.beta)
    is_finite = new * 0 == 0
    errors.write(torch.where(is_finite, new, old, out=new), chunks)
    return payload


def _encode_sparing(codec: Codec, values: Tensor, rows: int, cols: int, errors: ErrorBuffer, spared: Spared) -> Tensor:
    """Encode zeros where errors are spared and values are zero, and leave those errors as they are."""
    errors.spared = None
    chunks = values.view(rows, cols, -1).transpose(0, 1)  # in the order of the errors
    idle = spared.marks.view_as(chunks) & (chunks == 0)
    # Negated errors as values make the sums to send zero. Setting errors to zero would round their blocks again.
    opposed = torch.where(idle, errors.read().view_as(chunks).neg(), chunks)
    payload = encode_with_feedback(codec, opposed.transpose(0, 1).reshape(-1), rows, cols, errors)
    errors.put_back(idle.reshape(-1), spared.state)
    return payload


def decode_sum_encode_with_feedback(
    codec: Codec, payload: Tensor, numel: int, next_codec: Codec, scale: float, errors: ErrorBuffer
) -> Tensor:
    """Decode and sum as :meth:`Codec.decode_sum_encode` does, then encode as :func:`encode_with_feedback` does."""
    (source, tail), (target, next_tail) = without_tail(codec), without_tail(next_codec)
    is_plain = errors.spared is None and tail == next_tail
    if not (is_plain and isinstance(source, Blockwise) and isinstance(target, Blockwise)):
        return encode_with_feedback(next_codec, codec.sums(payload, numel, scale), 1, payload.shape[1], errors)
    coded = source.bits, source.block, target.bits, target.block
    return dequantize_sum_quantize_with_feedback(
        payload, errors.state, numel, *coded, scale, errors.block, errors.beta, tail
    )


# ---- error state
#
# Error state of one unit: its errors, and when they are reset.
#
# [Note: The lifetime of errors]
# Each reduction updates the errors, and all buffers are reset together, every ``reset_every`` optimizer steps.
# Micro-batches do not count as steps, because the hop that compresses sends their sum (resolve_scopes in strategy.py
# lowers the gradient scope for that). If each micro-batch synchronizes, each reduction starts from the errors of the
# previous one. An optimizer that does not derive from torch's announces no steps; until a step is announced, every
# reduction counts as a step.
#
# A gradient scaler changes the scale of gradients, and earlier errors would keep theirs. When it skips a step after an
# overflow, the errors that were fed back in that step are lost. So runtime/lifecycle.py refuses a scaler's steps.


class SavedErrors(TypedDict):
    """An :class:`ErrorFeedbackState` in a checkpoint; steps are counted from the last ``reset()``."""

    steps: int
    hears_of_steps: bool  # whether optimizers have announced steps
    errors: dict[str, ErrorBufferState | None]


class ErrorFeedbackState:
    """Errors of one unit, by hop; :func:`fsdp_zpp.strategy.error_feedback.error_buffer_specs` names the hops.

    ``was_used`` says whether a reduction has used errors since the last step.
    """

    def __init__(self, config: LoCo, hops: Collection[str]) -> None:
        self._reset_every, self.codec = config.reset_every, config.dtype
        self._buffers = {hop: ErrorBuffer(config.beta, config.dtype, config.decay) for hop in hops}
        self.was_used = False
        self._steps = 0
        self._steps_announced = False

    def buffer(self, hop: str) -> ErrorBuffer | None:
        return self._buffers.get(hop)

    def begin(self, device: torch.device) -> None:
        if self.was_used:
            if not self._steps_announced:
                self._count_step()
            return
        self.was_used = True
        for buffer in self._buffers.values():
            buffer.move(device)  # after a checkpoint was loaded, errors are on the CPU

    def step_made(self) -> None:
        """Note that an optimizer has made a step, whether or not it used this unit's gradients."""
        if not self._steps_announced:
            self._steps_announced, self._steps = True, 0
        self.was_used = False
        self._count_step()

    def _count_step(self) -> None:
        self._steps += 1
        if self._reset_every and self._steps % self._reset_every == 0:
            for buffer in self._buffers.values():
                buffer.reset()

    # ---- in checkpoints

    def reset(self) -> None:
        for buffer in self._buffers.values():
            buffer.reset()
        self._steps, self.was_used = 0, False

    def state_dict(self) -> SavedErrors:
        """Return the errors and the count of steps, with tensors on the CPU."""
        return {
            "steps": self._steps,
            "hears_of_steps": self._steps_announced,
            "errors": {hop: buffer.state_dict() for hop, buffer in self._buffers.items()},
        }

    def load_state_dict(self, state: SavedErrors) -> None:
        if state["errors"].keys() != self._buffers.keys():
            raise ValueError(
                f"the error state was saved for the hops {sorted(state['errors'])}, but this model has error feedback "
                f"on {sorted(self._buffers)}; use the same, or don't load the codec state"
            )
        self.reset()
        for hop, buffer in self._buffers.items():
            buffer.load_state_dict(state["errors"][hop])
        self._steps, self._steps_announced = state["steps"], state["hears_of_steps"]
