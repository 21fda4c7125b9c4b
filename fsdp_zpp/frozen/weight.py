"""One frozen weight: how its values become chunks of codes, one for each rank that shares it, and values again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.codecs.blockwise import Int4, Int8
from fsdp_zpp.codecs.nf4 import NF4
from fsdp_zpp.kernels import PayloadLayout
from fsdp_zpp.runtime.unit import Communicator

from .placement import Placement
from .stored.codec import StoredCodec

Storable = Int8 | Int4 | NF4
"""Codecs whose payloads can be cut into codes and scales and put together anew: for files, and for other placements."""

ReadRows = Callable[[int, int], Tensor]
"""``read(first, last)`` returns rows ``first`` to ``last - 1`` of a weight, in any floating dtype, on any device.

A row of a stack of matrices is one of its matrices.
"""


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

    def stored_records(self, rows: Tensor) -> Tensor:
        """Return all records of a weight that is kept as it is stored, without padding.

        Args:
            rows: All chunks, uint8 [chunks, local_nbytes].

        Returns:
            uint8 [groups, bytes of a group].
        """
        assert isinstance(self.codec, StoredCodec)
        return self.codec.records(rows, self.chunk_numel).flatten(0, 1)[: self.codec.groups(self.shape.numel())]

    def local_payload_from_records(self, records: Tensor) -> Tensor:
        """Put this rank's chunk together from all records: uint8 [local_nbytes], on their device."""
        assert isinstance(self.codec, StoredCodec)
        groups = self.codec.groups(self.chunk_numel)
        own = records[self.placement.own_chunk * groups :][:groups].reshape(-1)
        row = records.new_zeros(self.local_nbytes)
        row[: len(own)] = own
        return row

    def encode(self, read: ReadRows, device: torch.device) -> Tensor:
        """Quantize this rank's chunk; only the rows that it lies in are read.

        Returns:
            The local payload, uint8 [local_nbytes] on ``device``.
        """
        numel = self.shape.numel()
        row_numel = numel // self.shape[0]
        # Chunks are equally long on all ranks, so the last ones may lie partly or wholly past the end of the weight.
        start = min(self.placement.own_chunk * self.chunk_numel, numel)
        end = min(start + self.chunk_numel, numel)
        first, last = start // row_numel, -(-end // row_numel)
        chunk = torch.zeros(0, device=device)
        if start < end:
            values = read(first, last)
            chunk = values.detach().to(device).reshape(-1)[start - first * row_numel : end - first * row_numel]
        if len(chunk) < self.chunk_numel:
            chunk = torch.cat([chunk, chunk.new_zeros(self.chunk_numel - len(chunk))])
        return self.codec.encode(chunk.contiguous(), 1, 1)[0]

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
        if isinstance(self.codec, StoredCodec) and numel % self.codec.block == 0:
            groups = self.codec.groups(numel)
            records = self.stored_records(self.holder.gathered_payload(self, device))[index * groups :][:groups]
            out = torch.empty(self.shape[1:], dtype=dtype, device=records.device)
            self.codec.decode_into(records, out.view(-1))
            return out
        # NF4 has a layout, too: codes are only copied here, and its payload is laid out like any other.
        layout: PayloadLayout | None = getattr(self.codec, "layout", None)
        if layout is None or numel % layout.block:
            return self.dense(dtype, device)[index]
        rows = self.holder.gathered_payload(self, device)
        payload = rows.new_empty(1, self.codec.nbytes(numel))
        written = 0
        while written < numel:  # a matrix may lie in several chunks
            chunk, first = divmod(index * numel + written, self.chunk_numel)
            count = min(self.chunk_numel - first, numel - written)
            source = rows[chunk : chunk + 1]
            # Chunks and matrices are whole blocks, so these counts are, too: in bytes for codes, in blocks for scales.
            at, of, n = (layout.codes_nbytes(values) for values in (written, first, count))
            layout.codes(payload, numel)[:, at : at + n] = layout.codes(source, self.chunk_numel)[:, of : of + n]
            at, of, n = (values // layout.block for values in (written, first, count))
            layout.scales(payload, numel)[:, at : at + n] = layout.scales(source, self.chunk_numel)[:, of : of + n]
            written += count
        out = torch.empty(self.shape[1:], dtype=dtype, device=rows.device)
        self.codec.decode(payload, out.view(-1), 1, 1)
        return out
