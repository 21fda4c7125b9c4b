"""Codecs, which encode values as the bytes of a hop: full precision, int8, int4, int3, deltas, NF4, and as stored.

Each codec is one class and knows nothing about ranks.
"""

from __future__ import annotations

import functools
import importlib.util
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_zpp.names import explains_keywords, how_to_install
from fsdp_zpp_kernels import (
    PayloadLayout,
    add_delta,
    dequantize,
    dequantize_nf4_rows,
    dequantize_rows,
    dequantize_sum,
    dequantize_sum_quantize,
    quantize,
    quantize_delta,
)
from fsdp_zpp_kernels.reference import ALIGNMENT, levels_on

# ---- base
#
# Codecs: how a chunk of values is encoded as bytes for one hop, and decoded again.
#
# A *chunk* is one rank's shard of a flat tensor. FSDP orders chunks by rank, which is (node, local); a hop receives or
# returns them in (local, node) order. So every method that handles full-precision values takes the grid of chunks as
# ``rows`` x ``cols`` and transposes it: chunk (r, c) on one side is chunk (c, r) on the other. A caller that needs no
# reordering passes ``rows=1`` or ``cols=1``.
#
# The bytes of a chunk, scales included, are one row of a uint8 tensor, so a hop is a single collective. Rows have the
# same length for every chunk, and no block spans two chunks.

Place = Literal["weights", "gradients", "frozen", "exchanges"]  # what a strategy may encode
_NAMES: dict[Place, str] = {
    "weights": "weights",
    "gradients": "gradients",
    "frozen": "frozen weights",
    "exchanges": "exchanges of local steps, LocalSteps(codec=...),",
}


class Codec(ABC):
    """Encodes values as bytes. Subclass it to add a codec; instances are immutable and hashable.

    Attributes:
        places: The uses that the codec suits.
        reason: Why it suits no other use, quoted by errors.
        is_lossless: True if it sends values as they are.
        needs_feedback: True if it loses so much that it is of no use without error feedback.
        mixes_values: True if it mixes the values of a block first. So zeros beside other values do not stay zeros, and
            more than half of an error that is fed back can be left after a step.
    """

    places: ClassVar[tuple[Place, ...]] = ("weights", "gradients", "frozen", "exchanges")
    reason: ClassVar[str] = ""
    is_lossless: ClassVar[bool] = False
    needs_feedback: ClassVar[bool] = False
    mixes_values: ClassVar[bool] = False

    @property
    def block_numel(self) -> int:
        """Return the number of values in a block, which depend on each other; 0 if the whole chunk is one block."""
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
            cols: Its columns.

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
            cols: Its columns.
        """

    def for_sum_of(self, peers: int) -> Codec:
        """Return the codec that encodes the sum of ``peers`` summands, each of which this codec has encoded."""
        return self

    def prepare_decode(self, device: torch.device) -> None:  # noqa: B027
        """Load what decoding needs besides payloads; called before a forward, once ``device`` holds payloads."""

    def decode_rows(self, payload: Tensor, out: Tensor) -> None:
        """Decode rows of a larger payload, without reordering.

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
            cols: Its columns.
            scale: Factor on the sums.
        """

    def decode_sum_encode(self, payload: Tensor, numel: int, codec: Codec, scale: float) -> Tensor:
        """Decode and sum as ``decode_sum`` does, then encode the fp32 sums with ``codec``; chunks keep their order.

        ``payload`` is uint8 [peers, chunks, nbytes(numel)], the result uint8 [chunks, codec.nbytes(numel)].
        """
        return codec.encode(self.sums(payload, numel, scale), 1, payload.shape[1])

    def sums(self, payload: Tensor, numel: int, scale: float) -> Tensor:
        """Return the sums of ``decode_sum`` in fp32, flat [chunks * numel]; chunks keep their order."""
        chunks = payload.shape[1]
        sums = torch.empty(chunks * numel, dtype=torch.float32, device=payload.device)
        self.decode_sum(payload, sums, 1, chunks, scale)
        return sums


def check_codec(name: str, value: object, *, also: str = "", such_as: str = "Int8(256) or Int4(128)") -> None:
    """Raise a TypeError unless ``value``, the argument ``name``, is a codec or None; ``also`` names alternatives."""
    if value is not None and not isinstance(value, Codec):
        hint = f" (did you mean {value.__name__}()?)" if isinstance(value, type) else ""
        raise TypeError(f"{name} must be a codec such as {such_as}, or None{also}, got {value!r}{hint}")


def check_place(name: str, value: object, place: Place) -> None:
    """Raise a ValueError if ``value``, the argument ``name``, is a codec that does not suit ``place``, or no use."""
    if isinstance(value, Codec) and place not in value.places:
        suits = " and ".join(_NAMES[each] for each in value.places) or "deltas"
        reason = f": {value.reason}" if value.reason else ""
        raise ValueError(
            f"{name} can't be {value!r}, which is for {suits} alone{reason}; choose Int8(...) or Int4(...)"
        )
    if isinstance(value, Codec) and value.mixes_values and not value.block_numel:
        raise ValueError(f"{name}={value!r} mixes values, so it needs blocks: its block_numel must not be 0")


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
        # If the values are contiguous, in dtype and in order, the payload is a view of them. So a caller must
        # send the payload before it changes the values, or encode again.
        return values.contiguous().view(rows * cols, -1).view(torch.uint8)

    def decode(self, payload: Tensor, out: Tensor, rows: int, cols: int) -> None:
        self._write(payload.view(self.dtype), out, rows, cols)

    def decode_sum(self, payload: Tensor, out: Tensor, rows: int, cols: int, scale: float) -> None:
        values = payload.view(self.dtype)
        # Sum in fp32, whichever dtype was sent: bf16 sums over many ranks would lose the smaller terms.
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


full_precision = functools.cache(FullPrecision)  # each gather and reduction without a codec calls it


# ---- blocks
#
# Codecs whose payloads consist of blocks that decode on their own, and so can be moved into other payloads.


class BlockCodec(Codec):
    """A codec of independent blocks of ``block`` values."""

    block: int

    @property
    def block_numel(self) -> int:
        return self.block

    @abstractmethod
    def blocks(self, payload: Tensor, numel: int) -> tuple[Tensor, ...]:
        """Return a view for each part of the blocks in a payload: the codes, the scales.

        ``payload`` is uint8 [chunks, nbytes(numel)], of whole blocks; its rows may lie apart. Each view is uint8
        [chunks, blocks, bytes of a block].
        """


def copy_blocks(
    codec: BlockCodec, source: Tensor, numel: int, first: int, out: Tensor, out_numel: int, at: int
) -> None:
    """Copy blocks of a payload into another one of the same codec, until the source ends or ``out`` is full.

    Args:
        codec: The codec of both payloads.
        source: uint8 [chunks, nbytes(numel)]; blocks are numbered through all chunks.
        numel: The number of values in a chunk of ``source``.
        first: The first block to copy.
        out: A single chunk, uint8 [1, nbytes(out_numel)].
        out_numel: The number of values in ``out``.
        at: The block of ``out`` at which the copy starts.
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


class _ScaledBlocks(BlockCodec):
    """A codec whose payloads hold codes of ``bits`` bits and an fp32 scale for each block, as kernels lay them out."""

    bits: ClassVar[int]
    least: ClassVar[int] = 32
    most: ClassVar[int] = 4096

    def __post_init__(self) -> None:
        # Python counts bool as an int, and True would pass for a block of 1.
        if isinstance(self.block, bool) or not isinstance(self.block, int):
            raise TypeError(f"{type(self).__name__}'s block must be an int, got {self.block!r}")
        if not self.least <= self.block <= self.most:
            allowed = f"a power of two from {self.least} to {self.most}"
            raise ValueError(f"{type(self).__name__}'s block must be {allowed}, got {self.block}")
        _ = self.layout  # raises if the block is out of range

    @cached_property
    def layout(self) -> PayloadLayout:
        """Return where codes and scales lie in a payload."""
        return PayloadLayout(self.bits, self.block)

    def _padded(self, numel: int) -> int:
        """Round ``numel`` up to whole blocks, for codecs that take all chunks at once: no block may span two."""
        return -(-numel // self.block) * self.block

    def blocks(self, payload: Tensor, numel: int) -> tuple[Tensor, ...]:
        count, start = self.layout.blocks(numel), self.layout.scales_offset(numel)
        codes = payload[:, : self.layout.codes_nbytes(numel)].unflatten(1, (count, -1))
        return codes, payload[:, start : start + 4 * count].unflatten(1, (count, 4))


# ---- blockwise
#
# Blockwise integers: the codecs ``Int8`` and ``Int4``, and ``Int2`` for deltas.


@dataclass(frozen=True)
class Blockwise(_ScaledBlocks):
    """Blockwise integers: each ``block`` of values has a scale.

    Args:
        block: Number of values that share one fp32 scale, a power of two from 32 to 4096.

    Raises:
        TypeError: If ``block`` is not an int.
        ValueError: If ``block`` is not a power of two in that range.
    """

    block: int = 256

    def __str__(self) -> str:
        return f"int{self.bits}({self.block})"

    def nbytes(self, numel: int) -> int:
        return self.layout.nbytes(numel)

    def scales(self, payload: Tensor, numel: int) -> Tensor:
        """Return a view of the scales in a payload [chunks, nbytes(numel)]: fp32 [chunks, blocks]."""
        return self.layout.scales(payload, numel)

    def encode(self, values: Tensor, rows: int, cols: int) -> Tensor:
        return quantize(values, rows, cols, self.bits, self.block)

    def decode(self, payload: Tensor, out: Tensor, rows: int, cols: int) -> None:
        dequantize(payload, out, rows, cols, self.bits, self.block)

    def decode_rows(self, payload: Tensor, out: Tensor) -> None:
        dequantize_rows(payload, out, self.bits, self.block)

    def decode_sum(self, payload: Tensor, out: Tensor, rows: int, cols: int, scale: float) -> None:
        dequantize_sum(payload, out, rows, cols, self.bits, self.block, scale)

    def decode_sum_encode(self, payload: Tensor, numel: int, codec: Codec, scale: float) -> Tensor:
        if not isinstance(codec, Blockwise):  # the fused kernel writes no other format
            return super().decode_sum_encode(payload, numel, codec, scale)
        return dequantize_sum_quantize(
            payload, numel, 1, payload.shape[1], self.bits, self.block, codec.bits, codec.block, scale
        )


@explains_keywords
@dataclass(frozen=True)
class Int8(Blockwise):
    """8-bit symmetric blockwise integers in [-127, 127]; no value clips; 1 + 4 / block bytes per value."""

    bits: ClassVar[int] = 8


@explains_keywords
@dataclass(frozen=True)
class Int4(Blockwise):
    """4-bit symmetric blockwise integers in [-7, 7]; no value clips; 0.5 + 4 / block bytes per value."""

    block: int = 128
    bits: ClassVar[int] = 4


@dataclass(frozen=True)
class Int2(Blockwise):
    """Levels of -3, -1, 1 and 3 times a scale from a block's root mean square; 0.25 + 4 / block bytes per value.

    Larger values clip, and no level is 0. So ``Int2`` is for deltas alone: the next delta makes up for these errors.
    """

    block: int = 256
    bits: ClassVar[int] = 2
    places: ClassVar[tuple[Place, ...]] = ()
    reason: ClassVar[str] = "without a next delta, what clips is lost"


# ---- rotated
#
# ``Int3``, whose blocks are encoded in a rotated basis.
#
# Values of a gradient differ so much that most of eight levels would stand where few of them are. After random signs
# and a Hadamard transform, the values of a block are nearly normally distributed (DRIVE, arXiv 2105.08339; SDP4Bit,
# arXiv 2410.15526, section 3.3), and the levels suit that distribution. Rotations are linear, so the sum of all peers
# is rotated back once. They run in bf16, on tensor cores: what bf16 rounds is less than a thousandth of the squares
# that three bits lose. A matrix holds powers of two alone, which bf16 has exactly. Copies under another parallelism
# stay equal because the product of a row does not depend on the number of rows (tests/codecs/test_codecs.py).


@explains_keywords
@dataclass(frozen=True)
class Int3(_ScaledBlocks):
    """Eight equidistant levels for the values of a rotated block; 0.375 + 4 / block bytes per value.

    For gradients, of which it loses some 4 % of the squares on average, one block of 128 normal values at most 9 %.
    Decoded values are scaled so that their projection on such values is as long as these. Sums are rounded to bf16.

    Zeros beside other values of a block do not stay zeros, such as rows of an embedding that no token uses, if the
    length of a row is no multiple of ``block``. Where a parameter ends inside a block, its values there travel in fp32.
    A chunk is completed to whole blocks. A block with a NaN or an infinity, or whose rotation overflows, decodes to
    NaN. Error feedback is refused. Loss: docs/results/loss.md.

    Args:
        block: Number of values that are rotated together and share one fp32 scale, a power of two from 32 to 1024.

    Raises:
        TypeError: If ``block`` is not an int.
        ValueError: If ``block`` is not a power of two in that range.
    """

    block: int = 128
    bits: ClassVar[int] = 3
    most: ClassVar[int] = 1024  # products of larger blocks are split where there are few rows
    places: ClassVar[tuple[Place, ...]] = ("gradients",)
    reason: ClassVar[str] = "nothing else was tried"
    mixes_values: ClassVar[bool] = True

    _KEPT: ClassVar[float] = 1 - 0.03744  # by levels, of normally distributed values (J. Max, 1960, table II)

    def __str__(self) -> str:
        return f"int3({self.block})"

    def nbytes(self, numel: int) -> int:
        return self.layout.nbytes(self._padded(numel))

    def encode(self, values: Tensor, rows: int, cols: int) -> Tensor:
        numel = values.numel() // (rows * cols)
        missing = self._padded(numel) - numel
        if missing:
            values = F.pad(values.view(rows * cols, numel), (0, missing))
        blocks = values.detach().to(torch.bfloat16).view(-1, self.block)
        # Autocast leaves calls with ``out`` alone.
        rotated = torch.mm(blocks, _rotation(self.block, blocks), out=torch.empty_like(blocks))
        return quantize(rotated.view(-1), rows, cols, self.bits, self.block)

    def decode(self, payload: Tensor, out: Tensor, rows: int, cols: int) -> None:
        self.decode_sum(payload.unsqueeze(0), out, rows, cols, 1.0)

    def decode_sum(self, payload: Tensor, out: Tensor, rows: int, cols: int, scale: float) -> None:
        chunks, numel = rows * cols, out.numel() // (rows * cols)
        rotated = torch.empty(chunks * self._padded(numel), dtype=torch.bfloat16, device=out.device)
        row_square = self.block / 4 ** _halvings(self.block)  # 1 or 2
        dequantize_sum(payload, rotated, rows, cols, self.bits, self.block, scale / (row_square * self._KEPT))
        blocks = rotated.view(-1, self.block)
        values = torch.mm(blocks, _rotation(self.block, blocks).t(), out=torch.empty_like(blocks))
        out.view(chunks, numel).copy_(values.view(chunks, -1)[:, :numel])


# With these signs, the projection of a block of equal values is within 1 % in blocks of 128, within 3 % from 32 to 512.
# All ranks draw the same signs, whichever torch they have.
_SEED = 419
_ROTATIONS: dict[tuple[int, torch.device], Tensor] = {}  # a process has few devices, a strategy few blocks


def _halvings(block: int) -> int:
    return (block.bit_length() - 1) // 2


def _rotation(block: int, like: Tensor) -> Tensor:
    """Return a bf16 matrix [block, block], whose orthogonal rows have squares of ``block / 4**_halvings(block)``."""
    is_real = type(like) is Tensor  # and no fake one, whose rotation must not stay
    made = _ROTATIONS.get((block, like.device)) if is_real else None
    if made is None:
        drawn = random.Random(_SEED)
        with torch.inference_mode(False):
            signs = torch.tensor([[drawn.choice((-1.0, 1.0))] for _ in range(block)], device="cpu")
            matrix = torch.full((1, 1), 2.0 ** -_halvings(block), device="cpu")
            while len(matrix) < block:
                matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
            made = (signs * matrix).to(like.device, torch.bfloat16)
        if is_real:
            _ROTATIONS[block, like.device] = made
    return made


# ---- delta
#
# Weights sent in the inter-node hop as deltas: the change since the last gather, in 4 bits or 2.
#
# A step changes weights only slightly. So the delta ``W - R`` from the base R, which the receivers hold, takes far
# fewer bits than W for the same error (SDP4Bit's qWD, arXiv 2410.15526, section 3.1). Receivers add the delta to their
# base, the secondary shard. So the base is the sum of everything sent so far. Errors do not build up: the sender holds
# the same base, bit for bit, and the next delta starts from this base, so it includes the loss of the delta before it.
# In 2 bits, a delta loses a third of its root mean square if its values are normally distributed. It clips values at
# 1.49 times the root mean square of their block, so it loses more if few weights of a block change.
#
# Weights that do not come from a step (from a checkpoint, for example) are far from R. So they are sent whole, encoded
# as R is; so is the first gather. To resume a training exactly, its checkpoint must contain R (runtime/checkpoint.py).


@dataclass(frozen=True)
class Delta(Codec):
    """A codec of weights that sends deltas over the inter-node hop; ``whole`` encodes whole weights."""

    changes_in: ClassVar[type[Blockwise]]
    block: int = 256
    whole: Int8 = field(default_factory=Int8)
    places: ClassVar[tuple[Place, ...]] = ("weights",)
    reason: ClassVar[str] = "a delta needs a base that its receivers hold, and only weights have one"

    def __post_init__(self) -> None:
        _ = self.changes  # raises if the block is not valid
        if not isinstance(self.whole, Int8):
            raise TypeError(f"{type(self).__name__}'s whole must be an Int8(...), got {self.whole!r}")

    def __str__(self) -> str:
        return f"{self.whole}, changes as {self.changes}"

    @cached_property
    def changes(self) -> Blockwise:
        """Return the codec of the deltas."""
        return self.changes_in(self.block)

    @property
    def block_numel(self) -> int:
        return max(self.block, self.whole.block)

    def nbytes(self, numel: int) -> int:
        return self.whole.nbytes(numel)

    def encode(self, values: Tensor, rows: int, cols: int) -> Tensor:
        return self.whole.encode(values, rows, cols)

    def decode(self, payload: Tensor, out: Tensor, rows: int, cols: int) -> None:
        self.whole.decode(payload, out, rows, cols)

    def decode_sum(self, payload: Tensor, out: Tensor, rows: int, cols: int, scale: float) -> None:
        self.whole.decode_sum(payload, out, rows, cols, scale)

    def encode_delta(self, base: Tensor, values: Tensor, tail: int = 0) -> Tensor:
        """Encode the delta from this rank's part of the base to ``values``; all ranks of a hop add it to the base.

        ``base`` is uint8 [rows, nbytes(numel)], ``values`` are flat [rows * numel], and the result is uint8
        [rows, changes.nbytes(numel)]. Rows of the base and of the result end in ``tail`` fp32 values; see
        :class:`ExactTail`.
        """
        codec, changes = self.whole, self.changes
        return quantize_delta(values, base, codec.bits, codec.block, changes.bits, changes.block, tail)

    def apply_delta(self, base: Tensor, deltas: Tensor, numel: int, tail: int = 0) -> Tensor:
        """Return ``base`` plus ``deltas``, which ``encode_delta`` made on each rank; a row encodes ``numel`` values."""
        codec, changes = self.whole, self.changes
        return add_delta(base, deltas, numel, codec.bits, codec.block, changes.bits, changes.block, tail)


@explains_keywords
@dataclass(frozen=True)
class Int4Delta(Delta):
    """Codec that sends changes of weights between nodes, in 4 bits: half the bytes of ``Int8`` at nearly its error.

    For strategies that keep a secondary shard in each node (first letter ``I``, third ``G``). A change is encoded
    against the base that other nodes hold, so errors do not build up (SDP4Bit, arXiv 2410.15526, qWD).

    Args:
        block: Number of deltas that share a scale, a power of two from 32 to 4096.
        whole: Codec of whole weights, of the secondary shard, and of the intra-node hop.

    Raises:
        ValueError: If ``block`` is not a power of two in that range.
        TypeError: If ``block`` is not an int, or ``whole`` is not an ``Int8``.
    """

    changes_in: ClassVar[type[Blockwise]] = Int4


@explains_keywords
@dataclass(frozen=True)
class Int2Delta(Delta):
    """Codec that sends changes of weights between nodes, in 2 bits: half the bytes of ``Int4Delta``.

    For strategies that keep a secondary shard in each node (first letter ``I``, third ``G``). A change is encoded
    against the base that other nodes hold, so errors do not build up (SDP4Bit, arXiv 2410.15526, qWD). A delta loses
    at least a third of the change in root mean square, and later deltas make up for it. The levels are -3, -1, 1 and 3
    times a scale. This codec raises the training loss: see docs/results/loss.md.

    Args:
        block: Number of deltas that share a scale, a power of two from 32 to 4096.
        whole: Codec of whole weights, of the secondary shard, and of the intra-node hop.

    Raises:
        ValueError: If ``block`` is not a power of two in that range.
        TypeError: If ``block`` is not an int, or ``whole`` is not an ``Int8``.
    """

    changes_in: ClassVar[type[Blockwise]] = Int2


# ---- nf4
#
# NF4, the 4-bit code for normally distributed weights of QLoRA (arXiv 2305.14314, section 3).
#
# bitsandbytes encodes, so that weights round exactly as they do there. This package's own kernel decodes to the same
# values: it reads codes and scales where a gather has left them, while bitsandbytes would need copies of both.


@explains_keywords
@dataclass(frozen=True)
class NF4(_ScaledBlocks):
    """16 levels from -1 to 1, dense around 0, times the absmax of a block; 0.5 + 4 / block bytes per value.

    For frozen weights. A block with a NaN or an infinity decodes to NaN. Codes and scales lie where those of
    ``Int4`` do.

    Args:
        block: Number of values that share one fp32 scale, a power of two from 64 to 4096.

    Raises:
        TypeError: If ``block`` is not an int.
        ValueError: If ``block`` is not a power of two in that range.
        ModuleNotFoundError: If bitsandbytes is not installed.
    """

    block: int = 64
    bits: ClassVar[int] = 4
    least: ClassVar[int] = 64  # the smallest for which bitsandbytes has kernels on all devices
    places: ClassVar[tuple[Place, ...]] = ("frozen",)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Looked up, not imported: an import takes seconds, and a strategy may be made only for a plan.
        if importlib.util.find_spec("bitsandbytes") is None:
            raise ModuleNotFoundError(f"NF4 needs bitsandbytes: {how_to_install('nf4')}", name="bitsandbytes")

    def __str__(self) -> str:
        return f"nf4({self.block})"

    def nbytes(self, numel: int) -> int:
        return self.layout.nbytes(self._padded(numel))

    def encode(self, values: Tensor, rows: int, cols: int) -> Tensor:
        chunks, numel = rows * cols, values.numel() // (rows * cols)
        padded, layout = self._padded(numel), self.layout
        payload = values.new_zeros((chunks, self.nbytes(numel)), dtype=torch.uint8)
        if numel == 0:
            return payload
        grid = values.view(rows, cols, numel).transpose(0, 1).reshape(chunks, numel)
        # Zeros complete the last block without changing its absmax.
        codes, scales = self._quantize(F.pad(grid, (0, padded - numel)).view(-1))
        layout.codes(payload, padded).copy_(codes.view(chunks, -1))
        layout.scales(payload, padded).copy_(scales.view(chunks, -1))
        return payload

    def _quantize(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and scales of whole blocks; the scale of a block that is not finite is NaN."""
        import bitsandbytes.functional  # on use, since that takes seconds

        # bitsandbytes quantizes in CUDA's default stream, whichever stream is current. So the default stream waits
        # for the values, and the current stream for the result.
        current = torch.cuda.current_stream(flat.device) if flat.is_cuda else None
        if current is not None:
            torch.cuda.default_stream(flat.device).wait_stream(current)
        codes, state = bitsandbytes.functional.quantize_4bit(flat, blocksize=self.block, quant_type="nf4")
        if current is not None:
            current.wait_stream(torch.cuda.default_stream(flat.device))
        finite = flat.view(-1, self.block).isfinite().all(dim=1)
        return codes, state.absmax.masked_fill(~finite, torch.nan)

    def decode(self, payload: Tensor, out: Tensor, rows: int, cols: int) -> None:
        numel = out.numel() // (rows * cols)
        padded = self._padded(numel)
        if numel == padded and (rows == 1 or cols == 1):  # nothing changes places
            self.decode_rows(payload, out)
            return
        values = out.new_empty(rows * cols, padded)
        self.decode_rows(payload, values)
        out.view(cols, rows, numel).copy_(values.view(rows, cols, padded)[..., :numel].transpose(0, 1))

    def prepare_decode(self, device: torch.device) -> None:
        levels_on(device)

    def decode_rows(self, payload: Tensor, out: Tensor) -> None:
        dequantize_nf4_rows(payload, out, self.block)

    def decode_sum(self, payload: Tensor, out: Tensor, rows: int, cols: int, scale: float) -> None:
        raise NotImplementedError("NF4 can't sum payloads: it encodes frozen weights, which no reduction carries")


# ---- as stored
#
# ``"as stored"`` and ``"auto"``: frozen weights keep the codes that a checkpoint or a library has for them.

FrozenName = Literal["as stored", "auto"]  # in place of a codec of frozen weights


@dataclass(frozen=True)
class AsStored(Codec):
    """Stands for each weight's stored format until the format is known. Encodes nothing itself.

    Args:
        otherwise: The codec of weights that are not stored quantized; None leaves them as they are.
    """

    places: ClassVar[tuple[Place, ...]] = ("frozen",)

    otherwise: Codec | None = None

    @property
    def name(self) -> FrozenName:
        return "as stored" if self.otherwise is None else "auto"

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return repr(self.name)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise ValueError(
            f"{self.name!r} keeps the codes that a checkpoint has, and encodes no values itself; name a codec with as "
            "many bits, such as NF4(64) or Int8(256)"
        )

    nbytes = encode = decode = decode_sum = _refuse


NAMED: dict[object, AsStored] = {codec.name: codec for codec in (AsStored(), AsStored(Int8(256)))}


def codec_of_plain(codec: Codec | None) -> Codec | None:
    """Return the codec for frozen weights that are stored in full precision; ``codec`` is for all frozen weights."""
    return codec.otherwise or codec if isinstance(codec, AsStored) else codec


# ---- exact tail
#
# Rows that carry some values exactly, beside those that a codec encodes.
#
# Values that share a scale with far larger ones are lost. So the few values that a codec would lose travel in fp32, in
# the tail of a row, and the codec encodes zeros in their places::
#
#     | what the codec makes of the chunk | zeros to 16 bytes | ``tail`` fp32 values |
#
# The tail is the caller's: no method of :class:`ExactTail` reads or writes it, so returned payloads have an
# uninitialized tail. Only the caller knows what the tails hold, which of them are summed, and where their values
# belong.


@dataclass(frozen=True)
class ExactTail(Codec):
    """A codec whose rows end in a tail. Blockwise kernels leave room for the tail; rows of other codecs are copied.

    Args:
        codec: Encodes the part of a row before the tail.
        tail: Number of fp32 values at the end of each row, a multiple of 4, so that rows stay aligned to 16 bytes.

    Raises:
        ValueError: If ``tail`` is negative or no multiple of 4.
    """

    codec: Codec
    tail: int

    def __post_init__(self) -> None:
        PayloadLayout(8, 32, self.tail)  # raises if the tail is not valid

    def __str__(self) -> str:
        return f"{self.codec}, {self.tail} values exactly"

    @cached_property
    def blockwise(self) -> Blockwise | None:
        """Return the codec whose kernels encode values; None if ``codec`` has none."""
        codec = self.codec.whole if isinstance(self.codec, Delta) else self.codec
        return codec if isinstance(codec, Blockwise) else None

    def nbytes(self, numel: int) -> int:
        return _aligned(self.codec.nbytes(numel)) + 4 * self.tail

    def encode(self, values: Tensor, rows: int, cols: int) -> Tensor:
        codec = self.blockwise
        if codec is not None:
            return quantize(values, rows, cols, codec.bits, codec.block, self.tail)
        coded = self.codec.encode(values, rows, cols)
        nbytes = coded.shape[1]
        start = _aligned(nbytes)
        payload = coded.new_empty((len(coded), start + 4 * self.tail))
        payload[:, :nbytes] = coded
        payload[:, nbytes:start] = 0  # ranks compare payloads byte by byte
        return payload

    def decode(self, payload: Tensor, out: Tensor, rows: int, cols: int) -> None:
        codec = self.blockwise
        if codec is not None:
            dequantize(payload, out, rows, cols, codec.bits, codec.block, self.tail)
        else:
            self.codec.decode(self._coded(payload, out.numel() // (rows * cols)), out, rows, cols)

    def decode_sum(self, payload: Tensor, out: Tensor, rows: int, cols: int, scale: float) -> None:
        codec = self.blockwise
        if codec is not None:
            dequantize_sum(payload, out, rows, cols, codec.bits, codec.block, scale, self.tail)
        else:
            self.codec.decode_sum(self._coded(payload, out.numel() // (rows * cols)), out, rows, cols, scale)

    def sums(self, payload: Tensor, numel: int, scale: float) -> Tensor:
        if self.blockwise is not None:
            return super().sums(payload, numel, scale)
        return self.codec.sums(self._coded(payload, numel), numel, scale)

    def decode_sum_encode(self, payload: Tensor, numel: int, codec: Codec, scale: float) -> Tensor:
        source = self.blockwise
        target = codec.blockwise if isinstance(codec, ExactTail) and codec.tail == self.tail else None
        if source is None or target is None:
            return super().decode_sum_encode(payload, numel, codec, scale)
        chunks, layouts = payload.shape[1], (source.bits, source.block, target.bits, target.block)
        return dequantize_sum_quantize(payload, numel, 1, chunks, *layouts, scale, self.tail)

    def _coded(self, payload: Tensor, numel: int) -> Tensor:
        """Return the rows without their tails, as ``codec`` takes them."""
        coded = payload[..., : self.codec.nbytes(numel)]
        return coded if isinstance(self.codec, FullPrecision) else coded.contiguous()  # others need contiguous rows


def tails_of(payload: Tensor, tail: int) -> Tensor:
    """Return a view of the last ``tail`` fp32 values of each row of a payload [..., nbytes]: fp32 [..., tail]."""
    return payload.view(torch.float32)[..., -tail:]


# Every hop asks for a codec with a tail. A model needs tens of them, but a tail's length depends on the parameters that
# a step uses, so the cache has a limit.
exact_tail = functools.lru_cache(maxsize=128)(ExactTail)


def without_tail(codec: Codec) -> tuple[Codec, int]:
    """Return the codec of a row up to the tail, and the tail's length: ``codec`` and 0 if ``codec`` has no tail."""
    return (codec.codec, codec.tail) if isinstance(codec, ExactTail) else (codec, 0)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
