"""Weights between nodes as differences: what has changed since the last time, in 4 bits.

[Note: Weight differences]
A step changes weights by little, so ``W - R``, with R what the receivers hold, takes far fewer bits than W for the same
error (SDP4Bit's qWD, arXiv 2410.15526, section 3.1). Receivers add it to what they hold, which is the secondary shard,
so that R is at any time the sum of all that was sent. Errors do not build up: R is at the sender, too, bit for bit, and
the next difference is against it and so contains what this one left out.

Weights that come from elsewhere than a step (a checkpoint, say) are far from R. They are sent whole, as R is kept; so
is the first time. To go on exactly where a training was left, R belongs into its checkpoint (codec_state.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from fsdp_zpp.kernels.difference import add_difference, quantize_difference

from .codecs import Codec, Int4, Int8


@dataclass(frozen=True)
class Int4Delta(Codec):
    """Codec of weights whose changes go between nodes in 4 bits: half the bytes of ``Int8``, for nearly its error.

    For strategies that keep a secondary shard in each node (first letter ``I``, third ``G``). See
    [Note: Weight differences] in weight_difference.py.

    Args:
        block: Differences that share a scale; a power of two from 32 to 4096.
        resident: How whole weights travel and the secondary shard is kept, and what goes inside a node.

    Raises:
        ValueError: If ``block`` is not a power of two in that range.
        TypeError: If ``block`` is not an int, or ``resident`` not an :class:`Int8`.
    """

    block: int = 256
    resident: Int8 = field(default_factory=Int8)

    def __post_init__(self) -> None:
        Int4(self.block)
        if not isinstance(self.resident, Int8):
            raise TypeError(f"Int4Delta's resident must be an Int8(...), got {self.resident!r}")

    def __str__(self) -> str:
        return f"{self.resident}, changes as {self.changes}"

    @property
    def changes(self) -> Int4:
        """The codec of differences."""
        return Int4(self.block)

    def nbytes(self, numel: int) -> int:
        return self.resident.nbytes(numel)

    def encode(self, values: Tensor, rows: int, cols: int) -> Tensor:
        return self.resident.encode(values, rows, cols)

    def decode(self, payload: Tensor, out: Tensor, rows: int, cols: int) -> None:
        self.resident.decode(payload, out, rows, cols)

    def decode_sum(self, payload: Tensor, out: Tensor, rows: int, cols: int, scale: float) -> None:
        self.resident.decode_sum(payload, out, rows, cols, scale)

    def difference(self, held: Tensor, own: int, shard: Tensor) -> Tensor:
        """What brings the other ranks of a hop up to date on this one's row.

        Args:
            held: uint8 [ranks, nbytes(numel)], the same on all of them.
            own: This rank's row.
            shard: What this rank's row is to stand for, flat [numel].

        Returns:
            uint8 [1, changes.nbytes(numel)].
        """
        resident, changes = self.resident, self.changes
        row = held[own : own + 1]
        return quantize_difference(shard, row, resident.bits, resident.block, changes.bits, changes.block)

    def renewed(self, held: Tensor, differences: Tensor, numel: int) -> Tensor:
        """``held`` with the :meth:`difference` of every rank in it.

        Args:
            held: As there.
            differences: uint8 [ranks, changes.nbytes(numel)].
            numel: Values of a row.
        """
        resident, changes = self.resident, self.changes
        return add_difference(held, differences, numel, resident.bits, resident.block, changes.bits, changes.block)
