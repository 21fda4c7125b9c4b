"""One frozen weight: its shape, and this rank's chunk of its codes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn, Protocol

import torch
from torch import Tensor

from fsdp_zpp.kernels import PayloadLayout
from fsdp_zpp.kernels.dispatch import is_plain
from fsdp_zpp.kernels.strided import decode_checked_rows, dequantize_rows

from ..codecs import Blockwise, Codec
from .placement import Placement

if TYPE_CHECKING:
    from .base import FrozenBase
    from .tensor import FrozenTensor

ReadRows = Callable[[int, int], Tensor]
"""``read(first, last)``: rows of a weight, the last one excluded, of any floating dtype on any device.

The rows of a stack of matrices are its matrices.
"""


@contextmanager
def out_of_inference_mode() -> Iterator[None]:
    """A context for tensors that outlive a forward: inference tensors can't be written to or saved for a backward."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield


class Payloads(Protocol):
    """What a weight's codes are gathered with."""

    def rows_of(self, weight: FrozenWeight, device: torch.device) -> Tensor: ...

    def row_of(self, weight: FrozenWeight) -> Tensor: ...

    def move(self, device: torch.device) -> None: ...

    @property
    def device(self) -> torch.device: ...


class FrozenWeight:
    """A matrix, or a stack of matrices, that is quantized once and sharded.

    Args:
        name: Its name in errors, until the model it is in is known.
        shape: Its shape.
        dtype: What it passes for; embeddings come out in it.
        codec: How it is quantized.
        placement: Where its chunks are.

    Attributes:
        held: What holds its codes, alone or with its unit's others.
        base: The base of the model that it is part of.
        shown: The tensor that stands for it, if there is one.
    """

    held: Payloads
    base: FrozenBase
    shown: weakref.ref[FrozenTensor] | None = None

    def __init__(self, name: str, shape: torch.Size, dtype: torch.dtype, codec: Codec, placement: Placement) -> None:
        self.name, self.shape, self.dtype, self.codec = name, shape, dtype, codec
        self.place(placement)
        self._layout = codec.layout if isinstance(codec, Blockwise) else None

    def place(self, placement: Placement) -> None:
        """Set the placement and the chunk sizes that follow from it; existing chunks must be re-cut by the caller."""
        self.placement = placement
        self.chunk_numel = placement.chunk_numel(self.shape.numel(), self.codec)
        self.row_nbytes = self.codec.nbytes(self.chunk_numel)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(f"{self.name} is a shard of a frozen weight and can't be copied; copy its module instead")

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self.name} is a shard of a frozen weight and can't be pickled; see save_frozen_params")

    @property
    def device(self) -> torch.device:
        """Where its codes are."""
        return self.held.device

    def encode(self, read: ReadRows, device: torch.device) -> Tensor:
        """Quantize this rank's chunk; only the rows that it lies in are read.

        Returns:
            Its codes, uint8 [row_nbytes] on ``device``.
        """
        numel = self.shape.numel()
        row_numel = numel // self.shape[0]
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
        """The whole weight, in ``dtype`` or its own, for the computation on ``device``. Collective over its unit."""
        return self.dense(dtype or self.dtype, device or self.device)

    def dense(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """:meth:`dequantize` where autograd does not look, for a linear's forward and backward, which are many."""
        rows = self.held.rows_of(self, device)
        numel, padded = self.shape.numel(), rows.shape[0] * self.chunk_numel
        out = torch.empty(self.shape if numel == padded else padded, dtype=dtype, device=rows.device)
        if self._layout is None:
            self.codec.decode(rows.contiguous(), out.view(-1), len(rows), 1)
        elif is_plain(rows, out):
            decode_checked_rows(rows, out, self._layout)
        else:
            dequantize_rows(rows, out.view(-1), self._layout.bits, self._layout.block)
        return out if numel == padded else out[:numel].view(self.shape)

    def dense_row(self, index: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """``dense(...)[index]``; of a stack of matrices only this one is decoded, where no block straddles two."""
        index, numel = range(self.shape[0])[index], self.shape[1:].numel()
        layout: PayloadLayout | None = getattr(self.codec, "layout", None)
        if layout is None or numel % layout.block:
            return self.dense(dtype, device)[index]
        rows = self.held.rows_of(self, device)
        payload = rows.new_empty(1, self.codec.nbytes(numel))
        written = 0
        while written < numel:
            chunk, first = divmod(index * numel + written, self.chunk_numel)
            count = min(self.chunk_numel - first, numel - written)
            source = rows[chunk : chunk + 1]
            at, of, n = (layout.codes_nbytes(values) for values in (written, first, count))
            layout.codes(payload, numel)[:, at : at + n] = layout.codes(source, self.chunk_numel)[:, of : of + n]
            at, of, n = (values // layout.block for values in (written, first, count))
            layout.scales(payload, numel)[:, at : at + n] = layout.scales(source, self.chunk_numel)[:, of : of + n]
            written += count
        out = torch.empty(self.shape[1:], dtype=dtype, device=rows.device)
        self.codec.decode(payload, out.view(-1), 1, 1)
        return out
