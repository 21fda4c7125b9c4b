"""Codecs: how values become the bytes of a hop, and values again."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fsdp_zpp_kernels import PayloadLayout

# ---- base
#
# Codecs: how a chunk of values is encoded as bytes for one hop, and decoded again.
#
# A *chunk* is one rank's shard of a flat tensor. FSDP orders chunks by rank, which is (node, local); a hop takes or
# leaves them in (local, node) order. So every method that handles full-precision values takes the grid of chunks as
# ``rows`` x ``cols`` and transposes it: chunk (r, c) on one side is chunk (c, r) on the other. A caller that needs no
# reordering passes ``rows=1`` or ``cols=1``.
#
# The bytes of a chunk, scales included, are one row of a uint8 tensor, so a hop is a single collective. Rows have the
# same length for every chunk, and no block spans two chunks.

Place = Literal["weights", "gradients", "frozen", "exchanges"]
"""What a strategy may encode: trained weights, gradients, frozen weights, and changes of weights in local steps."""

_NAMES: dict[Place, str] = {
    "weights": "weights",
    "gradients": "gradients",
    "frozen": "frozen weights",
    "exchanges": "exchanges of local steps, LocalSteps(codec=...),",
}


class Codec(ABC):
    """Encodes values as bytes. Subclass it to add a codec; instances are immutable and hashable.

    Attributes:
        places: What the codec suits.
        reason: Why it suits nothing else, for errors.
        is_lossless: Whether it sends values as they are.
        needs_feedback: Whether it leaves out so much that it is of no use without error feedback.
    """

    places: ClassVar[tuple[Place, ...]] = ("weights", "gradients", "frozen", "exchanges")
    reason: ClassVar[str] = ""
    is_lossless: ClassVar[bool] = False
    needs_feedback: ClassVar[bool] = False

    @property
    def block_numel(self) -> int:
        """Return how many consecutive values of a chunk depend on each other, counted from its start; 0 means all."""
        return 0

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Return the bytes of a chunk of ``numel`` values. They depend on ``numel`` alone, so ranks know all sizes."""

    @abstractmethod
    def encode(self, values: Tensor, rows: int, cols: int) -> Tensor:
        """Encode ``rows * cols`` chunks.

        Args:
            values: Flat values of shape [rows * cols * numel], bf16, fp16 or fp32.
            rows: Rows of the grid of chunks in ``values``.
            cols: Columns of the grid.

        Returns:
            uint8 payload of shape [cols * rows, nbytes(numel)], with the grid transposed.
        """

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor, rows: int, cols: int) -> None:
        """Decode a payload, a grid of ``rows`` x ``cols`` chunks, and transpose the grid.

        Args:
            payload: uint8 of shape [rows * cols, nbytes(numel)].
            out: Flat output of shape [cols * rows * numel], bf16, fp16 or fp32.
            rows: Rows of the grid of chunks in ``payload``.
            cols: Columns of the grid.
        """

    def for_sum_of(self, peers: int) -> Codec:
        """Return the codec for a sum over ``peers`` peers, each of which has sent its summand encoded by this codec."""
        return self

    def prepare_decode(self, device: torch.device) -> None:  # noqa: B027
        """Load what decoding needs besides payloads; called when ``device`` gets payloads to keep, before a forward."""

    def decode_rows(self, payload: Tensor, out: Tensor) -> None:
        """Decode rows of a larger payload, in order.

        Args:
            payload: uint8 of shape [chunks, nbytes(numel)]. Rows may lie apart; each is contiguous.
            out: Contiguous output of ``chunks * numel`` values in any shape, bf16, fp16 or fp32.
        """
        self.decode(payload.contiguous(), out.view(-1), len(payload), 1)

    @abstractmethod
    def decode_sum(self, payload: Tensor, out: Tensor, rows: int, cols: int, scale: float) -> None:
        """Decode the payloads of several peers, sum them, and transpose the grid.

        Args:
            payload: uint8 of shape [peers, rows * cols, nbytes(numel)].
            out: Flat output as for ``decode``: the fp32 sums times ``scale``, rounded once.
            rows: Rows of the grid of chunks in each peer's payload.
            cols: Columns of the grid.
            scale: Factor on the sums.
        """

    def decode_sum_encode(self, payload: Tensor, numel: int, codec: Codec, scale: float) -> Tensor:
        """Decode and sum as ``decode_sum`` does, then encode the fp32 sums with another codec, in the same order.

        Args:
            payload: uint8 of shape [peers, chunks, nbytes(numel)].
            numel: Number of values in a chunk.
            codec: The codec of the next hop.
            scale: Factor on the sums.

        Returns:
            uint8 payload of shape [chunks, codec.nbytes(numel)].
        """
        chunks = payload.shape[1]
        return codec.encode(self.sums(payload, numel, scale), 1, chunks)

    def sums(self, payload: Tensor, numel: int, scale: float) -> Tensor:
        """Return the fp32 sums of ``decode_sum``, in the same order, flat: [chunks * numel]."""
        chunks = payload.shape[1]
        sums = torch.empty(chunks * numel, dtype=torch.float32, device=payload.device)
        self.decode_sum(payload, sums, 1, chunks, scale)
        return sums


def check_codec(name: str, value: object, *, also: str = "", such_as: str = "Int8(256) or Int4(128)") -> None:
    """Raise a TypeError unless ``value``, the argument ``name``, is a codec or None; ``also`` names others."""
    if value is not None and not isinstance(value, Codec):
        hint = f" (did you mean {value.__name__}()?)" if isinstance(value, type) else ""
        raise TypeError(f"{name} must be a codec such as {such_as}, or None{also}, got {value!r}{hint}")


def check_place(name: str, value: object, place: Place) -> None:
    """Raise a ValueError if ``value``, the argument ``name``, is a codec that does not suit ``place``."""
    if isinstance(value, Codec) and place not in value.places:
        suits = " and ".join(_NAMES[each] for each in value.places)
        reason = f": {value.reason}" if value.reason else ""
        raise ValueError(
            f"{name} can't be {value!r}, which is for {suits} alone{reason}; choose Int8(...) or Int4(...)"
        )


def check_block(codec: Codec, block: object) -> None:
    """Raise a TypeError unless the ``block`` given to a codec is an int."""
    # Python counts bool as an int, and True would pass for a block of 1.
    if isinstance(block, bool) or not isinstance(block, int):
        raise TypeError(f"{type(codec).__name__}'s block must be an int, got {block!r}")


@dataclass(frozen=True)
class FullPrecision(Codec):
    """Sends values as they are, in ``dtype``: no codec. A strategy writes it as ``None``."""

    is_lossless: ClassVar[bool] = True

    dtype: torch.dtype

    @property
    def block_numel(self) -> int:
        return 1

    def nbytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def encode(self, values: Tensor, rows: int, cols: int) -> Tensor:
        if values.dtype != self.dtype:
            values = values.to(self.dtype)
        if rows > 1 and cols > 1:
            values = values.view(rows, cols, -1).transpose(0, 1)
        # Of values in dtype, contiguous and in order, the payload is a view: callers send it before they change them,
        # or encode anew after that.
        return values.contiguous().view(rows * cols, -1).view(torch.uint8)

    def decode(self, payload: Tensor, out: Tensor, rows: int, cols: int) -> None:
        self._write(payload.view(self.dtype), out, rows, cols)

    def decode_sum(self, payload: Tensor, out: Tensor, rows: int, cols: int, scale: float) -> None:
        values = payload.view(self.dtype)
        # fp32 whatever the dtype sent: bf16 sums over many ranks would lose the smaller terms.
        if out.dtype == torch.float32 and (rows == 1 or cols == 1):
            torch.sum(values, dim=0, dtype=torch.float32, out=out.view(rows * cols, -1)).mul_(scale)
        else:
            self._write(values.sum(dim=0, dtype=torch.float32).mul_(scale), out, rows, cols)

    def sums(self, payload: Tensor, numel: int, scale: float) -> Tensor:
        return payload.view(self.dtype).sum(dim=0, dtype=torch.float32).mul_(scale).view(-1)

    def _write(self, chunks: Tensor, out: Tensor, rows: int, cols: int) -> None:
        """Write a grid of chunks [rows * cols, numel] to ``out``, transposed."""
        if rows == 1 or cols == 1:  # nothing changes places
            out.view_as(chunks).copy_(chunks)
        else:
            out.view(cols, rows, -1).copy_(chunks.view(rows, cols, -1).transpose(0, 1))


full_precision = functools.cache(FullPrecision)
"""Return the same instance for each dtype, since every gather and reduction without a codec asks for one."""


# ---- blocks
#
# Codecs whose payloads consist of blocks that decode on their own, and so can be moved into other payloads.


class BlockCodec(Codec):
    """A codec of independent blocks.

    Attributes:
        block: Number of values in a block.
    """

    block: int

    @property
    def block_numel(self) -> int:
        return self.block

    @abstractmethod
    def blocks(self, payload: Tensor, numel: int) -> tuple[Tensor, ...]:
        """Return views of what a payload holds of each block: its codes, its scale.

        Args:
            payload: uint8 [chunks, nbytes(numel)]; rows may lie apart.
            numel: The number of values in a chunk, whole blocks.

        Returns:
            For each part of the payload, uint8 [chunks, blocks, bytes of a block].
        """


def copy_blocks(
    codec: BlockCodec, source: Tensor, numel: int, first: int, out: Tensor, out_numel: int, at: int
) -> None:
    """Copy blocks of a payload into another one, from block ``first`` on, as many as both have room for.

    Args:
        codec: The codec of both.
        source: uint8 [chunks, nbytes(numel)]; blocks are numbered through all chunks.
        numel: The number of values in a chunk of ``source``.
        first: The first block.
        out: A single chunk, uint8 [1, nbytes(out_numel)].
        out_numel: The number of its values.
        at: The block of ``out`` that the first one becomes.
    """
    per_chunk = numel // codec.block
    for part, written in zip(codec.blocks(source, numel), codec.blocks(out, out_numel), strict=True):
        count = min(len(source) * per_chunk - first, written.shape[1] - at)
        done = 0
        while done < count:
            chunk, begin = divmod(first + done, per_chunk)
            some = min(per_chunk - begin, count - done)
            written[0, at + done : at + done + some] = part[chunk, begin : begin + some]
            done += some


def blocks_of_layout(layout: PayloadLayout, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Return :meth:`BlockCodec.blocks` of a payload that has a layout of codes and scales."""
    count, start = layout.blocks(numel), layout.scales_offset(numel)
    codes = payload[:, : layout.codes_nbytes(numel)].unflatten(1, (count, -1))
    return codes, payload[:, start : start + 4 * count].unflatten(1, (count, 4))
