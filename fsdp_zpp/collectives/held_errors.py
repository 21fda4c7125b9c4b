"""Errors of one hop as a tensor, which follows its parameters from one layout of the gradient to the next."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_zpp.codecs.blockwise import Int8
from fsdp_zpp_kernels.payload import SCALE_MASK

from .flat_layout import FlatLayout, Piece
from .streams import keep_until_read


class HeldErrorsState(TypedDict):
    """:class:`HeldErrors` in a checkpoint; ``parked`` has the fields of each piece, and then its errors."""

    state: Tensor
    numel: int
    starts: list[int]
    layout: SavedLayout | None
    parked: list[tuple[int, str, int, Tensor]]


SavedLayout = tuple[list[tuple[int, str, int]], list[int], int]
"""The pieces, starts and number of values of a :class:`FlatLayout`."""


@dataclass(frozen=True)
class Extent:
    """Values of a flat gradient that a hop encodes on this rank.

    Args:
        numel: Number of values in a chunk that is encoded.
        starts: Where each chunk begins in the flat gradient.
        layout: The gradient's layout; None if it never changes.
    """

    numel: int
    starts: tuple[int, ...]
    layout: FlatLayout | None = None

    @property
    def chunks(self) -> int:
        """Return the number of chunks."""
        return len(self.starts)

    @property
    def is_whole(self) -> bool:
        """Return whether each chunk consists of parts of all parameters of the layout."""
        return self.layout is not None and self.numel == self.layout.numel

    def marked(self, names: Collection[str], device: torch.device) -> Tensor | None:
        """Return where values of the parameters ``names`` are, bool [chunks * numel]; None if there are none here."""
        if self.layout is None:
            return None
        firsts = (0,) * self.chunks if self.is_whole else self.starts
        runs = [
            (chunk, max(start - first, 0), min(stop - first, self.numel))
            for start, stop in self.layout.runs(names)
            for chunk, first in enumerate(firsts)
            if max(start, first) < min(stop, first + self.numel)
        ]
        if not runs:
            return None
        marks = torch.zeros(self.chunks, self.numel, dtype=torch.bool, device=device)
        for chunk, start, stop in runs:
            marks[chunk, start:stop] = True
        return marks.view(-1)

    def embed(self, values: Tensor) -> Tensor:
        """Return the extent's values in whole chunks of the layout, with zeros around them."""
        if self.is_whole or self.layout is None:
            return values
        flat = values.new_zeros(self.layout.numel)
        for chunk, start in zip(values.view(self.chunks, self.numel), self.starts, strict=True):
            place = flat[start : start + self.numel]
            place.copy_(chunk[: place.numel()])
        return flat

    def cut(self, flat: Tensor) -> Tensor:
        """Return the extent's values, cut out of whole chunks of the layout, with zeros where it goes beyond."""
        if self.is_whole:
            return flat
        values = flat.new_zeros(self.chunks, self.numel)
        for chunk, start in zip(values, self.starts, strict=True):
            place = flat[start : start + self.numel]
            chunk[: place.numel()] = place
        return values.view(-1)


@dataclass(frozen=True)
class HeldErrors:
    """Errors of the parameters that the gradient consists of, and those of others that it once consisted of.

    See [Note: Identity] in flat_layout.py.

    Args:
        state: fp32 [chunks * numel], or uint8 [chunks, codec.nbytes(numel)]; kernels update it in place.
        extent: The values that they are errors of.
        parked: Errors of parameters that the present layout lacks, in the form of ``state``, by parameter; never
            changed in place.
        codec: Encodes them; None keeps fp32.
    """

    state: Tensor
    extent: Extent
    parked: dict[Piece, Tensor]
    codec: Int8 | None

    @classmethod
    def zeros(cls, extent: Extent, codec: Int8 | None, device: torch.device) -> HeldErrors:
        """Make errors that are all zero."""
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
        """Return the errors for another gradient; those of parameters that it lacks are parked until one has them.

        If chunks may cut the layout anywhere, a value that moves to another rank starts from zero there.
        """
        old, new = self.extent.layout, extent.layout
        if old is None or new is None or self.extent.is_whole != extent.is_whole:
            return HeldErrors.zeros(extent, self.codec, self.state.device)
        # A rollback or a change of scale may have made them in the stream of another hop, and they are dropped now.
        for made in (self.state, *self.parked.values()):
            keep_until_read(made)
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

    def copy(self) -> HeldErrors:
        """Return a copy, of which the state may be changed in place."""
        return replace(self, state=self.state.clone())

    def to(self, device: torch.device) -> HeldErrors:
        """Return the errors on ``device``."""
        if self.state.device == device:
            return self
        parked = {piece: state.to(device) for piece, state in self.parked.items()}
        return replace(self, state=self.state.to(device), parked=parked)

    def rescaled(self, factor: Tensor) -> HeldErrors:
        """Return the errors times ``factor``, a number on their device; the state is changed in place."""
        if self.codec is None:
            self.state.mul_(factor)
            return replace(self, parked={piece: state * factor for piece, state in self.parked.items()})
        self.codec.scales(self.state, self.extent.numel).mul_(factor)
        parked = {piece: state.clone() for piece, state in self.parked.items()}
        for piece, state in parked.items():
            self.codec.scales(state, piece.numel).mul_(factor)
        return replace(self, parked=parked)

    def decay(self, factor: float) -> None:
        """Multiply the errors of the present extent by ``factor``, in place; those that are parked stay."""
        if self.codec is None:
            self.state.mul_(factor)
            return
        scales = self.codec.scales(self.state, self.extent.numel)
        # As few bits as kernels give scales, so that decoding stays exact ([Note: Exact products] in payload.py).
        scales.copy_(((scales * factor).view(torch.int32) & SCALE_MASK).view(torch.float32))

    def put_back(self, where: Tensor, before: Tensor) -> None:
        """Return to earlier errors in some places, in place.

        Args:
            where: The places, bool [chunks * numel].
            before: The earlier state.
        """
        if self.codec is None:
            torch.where(where, before, self.state, out=self.state)
            return
        chunks, numel = self.extent.chunks, self.extent.numel
        earlier = self._decoded(before, chunks, numel)
        values = torch.where(where, earlier, self.values())
        self.state.copy_(self._encoded(values, chunks))
        # A block may also hold errors of neighbours, which change its scale in every step. Errors that are put back
        # would be rounded as often. So the block keeps its scale, under which they are exact, or doubles it.
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

    # ---- in checkpoints

    def state_dict(self) -> HeldErrorsState:
        """Return the errors, on the CPU, and the extent and parameters that they belong to."""
        extent = self.extent
        return {
            "state": self.state.cpu(),
            "numel": extent.numel,
            "starts": list(extent.starts),
            "layout": None if extent.layout is None else _saved(extent.layout),
            "parked": [(*piece, state.cpu()) for piece, state in self.parked.items()],
        }

    @classmethod
    def from_state_dict(cls, saved: HeldErrorsState, codec: Int8 | None) -> HeldErrors:
        """Make the errors that :meth:`state_dict` was called on."""
        layout = None if saved["layout"] is None else _loaded(*saved["layout"])
        extent = Extent(saved["numel"], tuple(saved["starts"]), layout)
        parked = {Piece(order, name, numel): state.clone() for order, name, numel, state in saved["parked"]}
        return cls(saved["state"].clone(), extent, parked, codec)


def _saved(layout: FlatLayout) -> SavedLayout:
    return [(*piece,) for piece in layout.pieces], list(layout.starts), layout.numel


def _loaded(pieces: list[tuple[int, str, int]], starts: list[int], numel: int) -> FlatLayout:
    return FlatLayout(tuple(Piece(*piece) for piece in pieces), tuple(starts), numel)
