"""Codecs whose payloads consist of blocks that decode on their own, and so can be moved into other payloads."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from fsdp_zpp_kernels import PayloadLayout

from .base import Codec


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
