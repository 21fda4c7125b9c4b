"""A codec of your own: ``TopK`` sends only the largest values of each block, and where they are.

    from top_k_codec import TopK

    Strategy.diloco(local_steps=LocalSteps(codec=TopK(), error_feedback=LoCo(beta=0, decay=0.95, reset_every=0)))

It needs torch's operators alone. Run as a script, it prints what a payload takes, and how much of some changes arrives:

    python examples/top_k_codec.py
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_zpp import Codec, Int4, Int8

# ---- packed words
#
# Words of 14, 16 or 20 bits, packed into bytes without gaps, the first word in the lowest bits.

_TOGETHER = {14: 4, 16: 1, 20: 2}
"""How many words are packed at once, by their width: so many that they fill whole bytes, at most 8."""


def packed_nbytes(count: int, width: int) -> int:
    """Return the number of bytes that ``count`` words of ``width`` bits take."""
    together = _TOGETHER[width]
    return -(-count // together) * together * width // 8


def pack_words(words: Tensor, width: int) -> Tensor:
    """Return flat int64 ``words``, of ``width`` bits each, packed into uint8."""
    together = _TOGETHER[width]
    groups = F.pad(words, (0, -words.numel() % together)).view(-1, together)
    starts = torch.arange(0, together * width, width, device=words.device)
    return (groups << starts).sum(dim=1).view(torch.uint8).view(-1, 8)[:, : together * width // 8].reshape(-1)


def unpack_words(packed: Tensor, count: int, width: int) -> Tensor:
    """Return ``count`` words from each row of bytes ``packed``: int64 [rows, count]."""
    together = _TOGETHER[width]
    nbytes = together * width // 8
    groups = F.pad(packed.reshape(-1, nbytes), (0, 8 - nbytes)).view(torch.int64)
    starts = torch.arange(0, together * width, width, device=packed.device)
    return (groups >> starts & ((1 << width) - 1)).view(len(packed), -1)[:, :count]


# ---- top k
#
# TopK: a codec that sends, of each block, only the few values of largest magnitude; the others decode to zero.
#
# Source: SparseLoCo (arXiv 2508.15706, section 3), which sends 1 to 3 % of a chunk of 4096 changes in 2 bits. Most of a
# change is left out, so error feedback must send it later.
#
# A row has two fp32 numbers for each block, and a word of 12 + ``bits`` bits for each kept value; the words of a block
# are in ascending order::
#
#     | smallest magnitude and ratio of a block, fp32 each | words: place in the block, sign, step | zeros to 16 bytes |
#
# [Note: Levels of few bits]
# A word decodes to ``± smallest * ratio ** step``, one of the levels. No level is zero, since no kept value is near it,
# and levels are dense where values are: most lie just above the threshold, and a few far beyond it. So with 4 and 8
# bits, levels are geometric, from the smallest to the largest kept value; with 2 bits, they are the means of the
# smaller and of the larger ones (Lloyd's levels). For 82 of 4096 changes of 32 AdamW steps, squared errors are 0.0005
# (4 bits) and 0.0056 (2 bits) of squared values; with equal steps from zero to the largest, 0.0032 and 0.150.
#
# Values below 1 / REACH of the largest would move the levels of all others apart, and zeros have no level: such values
# are not kept. All payloads have the same size, so the largest value is sent again in place of each of them.
#
# Powers are products of squares, each rounded once, so that all processors decode the same values from the same bytes.

PLACE_BITS = 12
"""Bits of a place in a block."""
MIN_BLOCK, MAX_BLOCK = 128, 1 << PLACE_BITS
ALIGNMENT = 16
"""Bytes: the length of a payload is a multiple."""
REACH = 256.0
"""Ratio of the largest to the smallest magnitude that is kept."""
MIN_LARGEST = 2.0**-100
"""A block whose largest magnitude is below this is sent as zeros, so that no level is subnormal."""
_LLOYD_STEPS = 4

Bits = Literal[2, 4, 8]


@dataclass(frozen=True)
class TopK(Codec):
    """Sends the values of largest magnitude of each block, in few bits; 0.042 bytes per value by default.

    It suits only exchanges of local steps with error feedback, which sends later what is left out now (SparseLoCo,
    arXiv 2508.15706). A block with a NaN or an infinity decodes to NaN.

    Args:
        fraction: Share of a block's values that is kept, in (0, 1]; at least one value is.
        bits: Width of a kept value's code, 2, 4 or 8; its place takes 12 bits more.
        block: Number of values among which the largest are kept, a power of two from 128 to 4096.

    Raises:
        ValueError: If an argument is out of range.
    """

    fraction: float = 0.02
    bits: Bits = 4
    block: int = 4096
    places: ClassVar = ("exchanges",)
    reason: ClassVar[str] = "it leaves out most values, which only error feedback over many exchanges makes up for"
    needs_feedback: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not MIN_BLOCK <= self.block <= MAX_BLOCK or self.block & (self.block - 1):
            raise ValueError(f"TopK's block must be a power of two from {MIN_BLOCK} to {MAX_BLOCK}, got {self.block}")
        if isinstance(self.fraction, bool) or not isinstance(self.fraction, (int, float)) or not 0 < self.fraction <= 1:
            raise ValueError(f"TopK's fraction must be a number in (0, 1], such as 0.02, got {self.fraction!r}")
        if not isinstance(self.bits, int) or self.bits not in get_args(Bits):
            raise ValueError(f"TopK's bits must be 2, 4 or 8, got {self.bits!r}")

    def __str__(self) -> str:
        return f"top {self.fraction:.3g} of {self.block} in {self.bits} bits"

    @property
    def block_numel(self) -> int:
        return self.block

    def kept(self, numel: int) -> int:
        """Return how many of a block's ``numel`` values are kept: as many of a chunk's last, short block as of others.

        So what follows a block's values does not change how they are encoded.
        """
        return min(numel, max(1, round(self.fraction * self.block)))

    def for_sum_of(self, peers: int) -> Codec:
        sparse = TopKOfSum(self.fraction, self.bits, self.block, peers)
        dense = Int8(MIN_BLOCK) if self.bits == 8 else Int4(MIN_BLOCK)
        return min(sparse, dense, key=lambda codec: codec.nbytes(self.block))

    # ---- sizes

    @property
    def _width(self) -> int:
        return PLACE_BITS + self.bits

    def _words(self, numel: int) -> int:
        """Return how many values of a chunk are kept."""
        whole, rest = divmod(numel, self.block)
        return whole * self.kept(self.block) + self.kept(rest)

    def _levels_nbytes(self, numel: int) -> int:
        return 8 * -(-numel // self.block)

    def _words_nbytes(self, numel: int) -> int:
        return packed_nbytes(self._words(numel), self._width)

    def nbytes(self, numel: int) -> int:
        return -(-(self._levels_nbytes(numel) + self._words_nbytes(numel)) // ALIGNMENT) * ALIGNMENT

    # ---- encoding

    def encode(self, values: Tensor, rows: int, cols: int) -> Tensor:
        chunks = values.view(rows * cols, -1)
        numel = chunks.shape[1]
        payload = values.new_zeros((rows * cols, self.nbytes(numel)), dtype=torch.uint8)
        if numel:
            # One after the other, so that temporaries are as small as a chunk.
            for row, chunk in zip(payload, chunks, strict=True):
                words, levels = self._encode_chunk(chunk)
                start = self._levels_nbytes(numel)
                row[:start] = levels.view(torch.uint8)
                row[start : start + self._words_nbytes(numel)] = pack_words(words, self._width)
        return payload.view(rows, cols, -1).transpose(0, 1).reshape(rows * cols, -1)

    def _encode_chunk(self, chunk: Tensor) -> tuple[Tensor, Tensor]:
        """Return the words of a chunk, int64, and its levels, fp32, both flat."""
        whole = chunk.numel() // self.block * self.block
        rest = chunk[whole:].float()
        padded = F.pad(rest, (0, self.block - len(rest)))
        words, levels = self._encode_blocks(chunk[:whole].view(-1, self.block).float(), self.block)
        if not len(rest):
            return words.flatten(), levels.flatten()
        last_words, last_levels = self._encode_blocks(padded.view(1, -1), len(rest))
        return torch.cat((words.flatten(), last_words[0])), torch.cat((levels.flatten(), last_levels[0]))

    def _encode_blocks(self, blocks: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return the words and levels of fp32 blocks, of whose values all after the first ``numel`` are padding.

        Returns:
            Words, int64 [blocks, kept(numel)], and the smallest magnitude and ratio of each block, [blocks, 2].
        """
        magnitudes, places = blocks.abs().topk(self.kept(self.block))  # NaN counts as the largest
        largest = magnitudes[:, :1].clone()
        finite, live = largest.isfinite(), largest >= MIN_LARGEST
        usable = finite & live
        # The level of all other blocks is NaN or 0, whatever their words.
        magnitudes = torch.where(usable & (magnitudes * REACH >= largest), magnitudes, 0)
        is_kept = magnitudes > 0
        steps, smallest, ratio = (_means if self.bits == 2 else _geometric)(magnitudes, is_kept, self._last_step)
        codes = steps.long() + ((blocks.gather(1, places) < 0).long() << (self.bits - 1))
        words = torch.where(is_kept, places << self.bits | codes, 0)
        # Kept values come first, and there are no more of them than values.
        words = torch.where(is_kept, words, words[:, :1])[:, : self.kept(numel)]
        smallest = torch.where(usable, smallest, torch.where(finite, 0.0, torch.nan))
        return words.sort().values, torch.cat((smallest, torch.where(usable, ratio, 1.0)), dim=1)

    @property
    def _last_step(self) -> int:
        return (1 << (self.bits - 1)) - 1

    # ---- decoding

    def decode(self, payload: Tensor, out: Tensor, rows: int, cols: int) -> None:
        numel = out.numel() // (rows * cols)
        if not numel:
            return
        places, values, zeros = self._decoded(_transposed(payload, rows, cols), numel)
        chunks = out.view(rows * cols, numel).zero_()
        self._add_to_blocks(chunks, zeros)
        chunks.scatter_(1, places, values.to(out.dtype))

    def decode_sum(self, payload: Tensor, out: Tensor, rows: int, cols: int, scale: float) -> None:
        numel = out.numel() // (rows * cols)
        if not numel:
            return
        chunks = out.view(rows * cols, numel)
        sums = chunks.zero_() if out.dtype == torch.float32 else torch.zeros_like(chunks, dtype=torch.float32)
        # One peer after the other: sums depend on the order. What is sent twice has one value, so places may repeat.
        for peer in payload:
            places, values, zeros = self._decoded(_transposed(peer, rows, cols), numel)
            self._add_to_blocks(sums, zeros)
            sums.scatter_(1, places, sums.gather(1, places) + values)
        chunks.copy_(sums.mul_(scale))

    def _decoded(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor, Tensor]:
        """Decode rows [chunks, nbytes(numel)].

        Returns:
            The places of kept values in their chunk, and these values, both [chunks, words]; and what all other values
            of each block are, [chunks, blocks]: 0, or NaN if the block had a NaN or an infinity.
        """
        start, count = self._levels_nbytes(numel), self._words(numel)
        levels = payload[:, :start].contiguous().view(torch.float32).view(len(payload), -1, 2)
        words = unpack_words(payload[:, start : start + self._words_nbytes(numel)], count, self._width)
        # The block of each word: those of whole blocks first.
        block = torch.arange(count, device=payload.device) // self.kept(self.block)
        block.clamp_(max=levels.shape[1] - 1)
        smallest, ratio = levels[:, block].unbind(-1)
        values = smallest
        for bit in range(self.bits - 1):
            values = torch.where((words >> bit & 1).bool(), values * ratio, values)
            ratio = ratio * ratio
        values = torch.where((words >> (self.bits - 1) & 1).bool(), -values, values)
        return (words >> self.bits) + block * self.block, values, levels[..., 0] * 0

    def _add_to_blocks(self, chunks: Tensor, summands: Tensor) -> None:
        """Add to all values of each block in ``chunks`` [chunks, numel] its summand in [chunks, blocks]."""
        whole = chunks.shape[1] // self.block
        split = whole * self.block
        chunks[:, :split].unflatten(1, (whole, self.block)).add_(summands[:, :whole, None])
        chunks[:, split:].add_(summands[:, whole:])


@dataclass(frozen=True)
class TopKOfSum(TopK):
    """:class:`TopK` for a sum over peers, each of which keeps other values: it keeps as many as all peers together.

    Args:
        fraction: As in :class:`TopK`, of one peer.
        bits: As in :class:`TopK`.
        block: As in :class:`TopK`.
        peers: The number of peers.
    """

    peers: int = field(default=1)

    def __str__(self) -> str:
        return f"top {self.fraction:.3g} x {self.peers} of {self.block} in {self.bits} bits"

    def kept(self, numel: int) -> int:
        return min(numel, self.peers * super().kept(self.block))


def _geometric(magnitudes: Tensor, is_kept: Tensor, last: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return steps, smallest level and ratio of levels: from the smallest to the largest that is kept.

    Args:
        magnitudes: [blocks, kept], descending.
        is_kept: Which of them are.
        last: The step of the largest.
    """
    largest = magnitudes[:, :1]
    smallest = torch.where(is_kept, magnitudes, largest).amin(dim=1, keepdim=True)
    span = (largest / smallest).log()  # NaN in a block of zeros, of which nothing is kept
    ratio = (span / last).exp()
    steps = ((magnitudes / smallest).log() * torch.where(span > 0, last / span, 0)).round()
    return torch.where(is_kept, steps, 0), smallest, ratio


def _means(magnitudes: Tensor, is_kept: Tensor, last: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what :func:`_geometric` does, of two levels that are means of the values nearest to them."""
    largest = magnitudes[:, :1]
    smallest = torch.where(is_kept, magnitudes, largest).amin(dim=1, keepdim=True)
    threshold = (smallest * largest).sqrt()
    for _ in range(_LLOYD_STEPS):
        is_high = magnitudes > threshold
        high, low = (_mean(magnitudes, of, largest) for of in (is_high, is_kept & ~is_high))
        threshold = (low + high) / 2
    return is_high.float(), low, high / low


def _mean(values: Tensor, of: Tensor, default: Tensor) -> Tensor:
    """Return the means of some values of each row, or ``default``, the largest of all, where there are none."""
    count = of.sum(dim=1, keepdim=True)
    shares = torch.where(of, values / default, 0)  # whose sum does not overflow
    # Halves are added up, since torch's sums depend on the number of rows.
    shares = F.pad(shares, (0, (1 << (shares.shape[1] - 1).bit_length()) - shares.shape[1]))
    while shares.shape[1] > 1:
        half = shares.shape[1] // 2
        shares = shares[:, :half] + shares[:, half:]
    return torch.where(count > 0, shares / count.clamp(min=1) * default, default)


def _transposed(payload: Tensor, rows: int, cols: int) -> Tensor:
    """Return the rows of a payload [rows * cols, nbytes] in the order of the transposed grid."""
    return payload.view(rows, cols, -1).transpose(0, 1).reshape(rows * cols, -1)


def main() -> None:
    """Encode and decode changes of weights."""
    changes = torch.randn(2**20) ** 3
    for codec in (TopK(), TopK(bits=2), Int4(128)):
        decoded = torch.empty_like(changes)
        codec.decode(codec.encode(changes, 1, 1), decoded, 1, 1)
        arrived = 1 - ((changes - decoded).square().sum() / changes.square().sum()).item()
        nbytes = codec.nbytes(changes.numel()) / changes.numel()
        print(f"{codec}: {nbytes:.3f} bytes a value, which hold {arrived:.0%} of the sum of squares")


if __name__ == "__main__":
    main()
