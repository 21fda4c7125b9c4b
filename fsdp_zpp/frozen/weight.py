"""One frozen weight: how its values become chunks of codes, one for each rank that shares it, and values again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.codecs.blocks import BlockCodec, copy_blocks
from fsdp_zpp.codecs.blockwise import Int4, Int8
from fsdp_zpp.codecs.nf4 import NF4
from fsdp_zpp.runtime.unit import Communicator

from .placement import Placement
from .stored.format import StoredWeight

Storable = Int8 | Int4 | NF4
"""Codecs whose payloads can be cut into codes and scales and put together anew, for files."""

ReadValues = Callable[[int, int], Tensor]
"""``read(first, last)`` returns the flat values ``first`` to ``last - 1`` of a weight, in any floating dtype, on any
device."""

_PIECE = 2**21
"""Values that are read, and encoded, at a time."""


@contextmanager
def out_of_inference_mode() -> Iterator[None]:
    """Leave inference mode for tensors that outlive a forward: its own can't be written to or saved for a backward."""
    if torch.is_inference_mode_enabled():
        # Leaving inference mode enables gradients, so they are turned off again.
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield


class PayloadHolder(Protocol):
    """Holds the codes of one or more weights on this rank, and gathers them."""

    def gathered_payload(self, weight: FrozenWeight, device: torch.device) -> Tensor: ...

    def local_payload(self, weight: FrozenWeight) -> Tensor: ...

    def move(self, device: torch.device) -> None: ...

    @property
    def device(self) -> torch.device: ...


class Base(Communicator, Protocol):
    """A base that a weight is part of: all frozen weights of a model."""

    def make_units(self) -> None: ...


class Sliceable(Protocol):
    """A flat tensor, or the slice of a file, which reads what it is indexed with."""

    def __getitem__(self, index: slice, /) -> Tensor: ...


class FrozenWeight:
    """A matrix, or a stack of matrices, that is quantized once and sharded.

    Args:
        name: Its name in errors, until units are made and its FQN in the model is known.
        shape: Its shape.
        dtype: The dtype it shows and dequantizes to by default; embeddings return it.
        codec: How it is quantized.
        placement: Which rank holds which chunk.

    Attributes:
        holder: Holds its codes, alone or with the other weights of its unit.
        base: The base of its model.
        shown: The tensor that stands for it, if one is alive.
        sampled: Some of its scales, once they were asked for.
    """

    holder: PayloadHolder
    base: Base
    shown: weakref.ref[Tensor] | None = None
    sampled: list[float] | None = None

    def __init__(self, name: str, shape: torch.Size, dtype: torch.dtype, codec: Codec, placement: Placement) -> None:
        self.name, self.shape, self.dtype, self.codec = name, shape, dtype, codec
        self.place(placement)

    def place(self, placement: Placement) -> None:
        """Set the placement and the chunk sizes that follow from it; the caller must re-cut an existing chunk."""
        self.placement = placement
        self.chunk_numel = placement.chunk_numel(self.shape.numel(), self.codec)
        self.local_nbytes = self.codec.nbytes(self.chunk_numel)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(f"{self.name} is a shard of a frozen weight and can't be copied; copy its module instead")

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self.name} is a shard of a frozen weight and can't be pickled; see save_frozen_params")

    @property
    def device(self) -> torch.device:
        """Return the device that its codes are on."""
        return self.holder.device

    def codes_and_scales(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Cut chunks into all codes and scales, without padding.

        Args:
            rows: All chunks, uint8 [chunks, local_nbytes].

        Returns:
            Codes, flat uint8, and scales, fp32 [blocks].
        """
        assert isinstance(self.codec, Storable)
        layout, chunk = self.codec.layout, self.chunk_numel
        start = layout.scales_offset(chunk)
        codes = rows[:, : layout.codes_nbytes(chunk)].reshape(-1)
        scales = rows[:, start : start + 4 * layout.blocks(chunk)].contiguous().view(torch.float32).reshape(-1)
        # The layout decides how much padding the last chunks have, but not how many blocks the weight has.
        blocks = layout.blocks(self.shape.numel())
        return codes[: layout.codes_nbytes(blocks * layout.block)], scales[:blocks]

    def local_payload_from_slices(self, codes: Sliceable, scales: Sliceable) -> Tensor:
        """Put this rank's chunk together from codes and scales.

        Args:
            codes: All codes; only this rank's are read, so this may be a slice of a file, which reads lazily.
            scales: All scales; this may be a slice of a file, too.

        Returns:
            The local payload, uint8 [local_nbytes] on the CPU.
        """
        assert isinstance(self.codec, Storable)
        layout = self.codec.layout
        row = torch.zeros(self.local_nbytes, dtype=torch.uint8)
        end_of_all = layout.blocks(self.shape.numel())
        per_chunk = self.chunk_numel // layout.block
        first = min(self.placement.own_chunk * per_chunk, end_of_all)
        last = min(first + per_chunk, end_of_all)
        if first == last:
            return row
        nbytes = layout.codes_nbytes(layout.block)
        row[: (last - first) * nbytes] = codes[first * nbytes : last * nbytes]
        start = layout.scales_offset(self.chunk_numel)
        row[start : start + 4 * (last - first)] = scales[first:last].view(torch.uint8)
        return row

    def recut(self, rows: Tensor, placement: Placement) -> Tensor:
        """Set another placement, and put this rank's chunk together anew.

        Args:
            rows: All chunks, uint8 [chunks, local_nbytes].
            placement: The placement.

        Returns:
            The local payload, uint8 [local_nbytes], on the device of ``rows``.
        """
        assert isinstance(self.codec, BlockCodec)
        before = self.chunk_numel
        self.place(placement)
        row = rows.new_zeros(1, self.local_nbytes)
        first = placement.own_chunk * self.chunk_numel // self.codec.block
        copy_blocks(self.codec, rows, before, first, row, self.chunk_numel, 0)
        return row[0]

    def encode(self, read: ReadValues, device: torch.device) -> Tensor:
        """Quantize this rank's chunk; no other values are read.

        Returns:
            The local payload, uint8 [local_nbytes] on ``device``.
        """

        def encoded(first: int, last: int, padded: int) -> Tensor:
            values = read(first, last).detach().to(device) if first < last else torch.zeros(0, device=device)
            if len(values) < padded:
                values = torch.cat([values, values.new_zeros(padded - len(values))])
            return self.codec.encode(values.contiguous(), 1, 1)

        return self._in_pieces(encoded, device)

    def keep(self, stored: StoredWeight, device: torch.device) -> Tensor:
        """Return this rank's chunk as it is stored, uint8 [local_nbytes] on ``device``; no other codes are read."""
        block = stored.format.group_numel

        def kept(first: int, last: int, padded: int) -> Tensor:
            return stored.payload(first // block, -(-last // block)).to(device).view(1, -1)

        return self._in_pieces(kept, device)

    def _in_pieces(self, make: Callable[[int, int, int], Tensor], device: torch.device) -> Tensor:
        """Return this rank's chunk, of pieces of whole blocks, so that no more than a piece is in memory otherwise.

        Args:
            make: Returns the payload of values ``first`` to ``last - 1``, and of what completes their last block:
                ``make(first, last, padded)`` is uint8 [1, nbytes(padded)].
            device: The device of the chunk.
        """
        codec, numel = self.codec, self.shape.numel()
        # Chunks are equally long on all ranks, so the last ones may lie partly or wholly past the end of the weight.
        start = min(self.placement.own_chunk * self.chunk_numel, numel)
        end = min(start + self.chunk_numel, numel)
        if not isinstance(codec, BlockCodec):  # nothing says what parts its payload has
            return make(start, end, self.chunk_numel)[0]
        # Before the pieces: between rows that stay, an allocator could not use the memory of pieces again.
        row = torch.zeros(1, self.local_nbytes, dtype=torch.uint8, device=device)
        step = max(1, _PIECE // codec.block) * codec.block
        for first in range(start, end, step):
            last = min(first + step, end)
            padded = -(-(last - first) // codec.block) * codec.block
            piece = make(first, last, padded)
            copy_blocks(codec, piece, padded, 0, row, self.chunk_numel, (first - start) // codec.block)
        return row[0]

    @torch.compiler.disable
    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        """Dequantize the whole weight for a computation on ``device``. Collective over the ranks of its placement.

        Args:
            dtype: The dtype of the result. Default: the weight's.
            device: The device that computes. Default: the one that the codes are on.

        Returns:
            A new tensor of the weight's shape.
        """
        return self.dense(dtype or self.dtype, device or self.device)

    def dense(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Dequantize the whole weight, for callers that neither autograd nor a compiler looks into. Collective."""
        rows = self.holder.gathered_payload(self, device)
        numel, padded = self.shape.numel(), rows.shape[0] * self.chunk_numel
        # Decoding writes whole chunks, so the padding at the end of the last ones needs room; a view cuts it off.
        out = torch.empty(self.shape if numel == padded else padded, dtype=dtype, device=rows.device)
        # A weight's columns of a gathered payload are not contiguous.
        self.codec.decode_rows(rows, out)
        return out if numel == padded else out[:numel].view(self.shape)

    def dense_row(self, index: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Dequantize one matrix of a stack: it alone is decoded, unless blocks straddle two matrices. Collective."""
        index, numel = range(self.shape[0])[index], self.shape[1:].numel()  # the range resolves negative indices
        codec = self.codec
        if not isinstance(codec, BlockCodec) or numel % codec.block:
            return self.dense(dtype, device)[index]
        rows = self.holder.gathered_payload(self, device)
        payload = rows.new_empty(1, codec.nbytes(numel))
        copy_blocks(codec, rows, self.chunk_numel, index * numel // codec.block, payload, numel, 0)
        out = torch.empty(self.shape[1:], dtype=dtype, device=rows.device)
        codec.decode(payload, out.view(-1), 1, 1)
        return out
