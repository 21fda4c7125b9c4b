"""Weights sent in the inter-node hop as deltas: the change since the last gather, in 4 bits.

A step changes weights only slightly. So the delta ``W - R`` from the base R, which the receivers hold, takes far fewer
bits than W for the same error (SDP4Bit's qWD, arXiv 2410.15526, section 3.1). Receivers add the delta to their base,
the secondary shard, which is therefore the sum of everything sent so far. Errors do not build up: the sender holds the
same base, bit for bit, and its next delta is taken against it, so that delta includes what this one left out.

Weights that do not come from a step (from a checkpoint, for example) are far from R. They are sent whole, encoded as R
is, and so is the first gather. To resume a training exactly, its checkpoint must contain R (runtime/checkpoint.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from fsdp_zpp.suggestions import explains_keywords
from fsdp_zpp_kernels import add_delta, quantize_delta

from .base import Codec, Place
from .blockwise import Int4, Int8


@explains_keywords
@dataclass(frozen=True)
class Int4Delta(Codec):
    """Codec of weights whose inter-node hop sends changes in 4 bits: half the bytes of ``Int8`` at nearly its error.

    For strategies that keep a secondary shard in each node (first letter ``I``, third ``G``): a change is
    encoded against what the other nodes hold already, so errors do not build up (SDP4Bit, arXiv 2410.15526, qWD).

    Args:
        block: Number of deltas that share a scale, a power of two from 32 to 4096.
        whole: Codec of whole weights, of the secondary shard, and of the intra-node hop.

    Raises:
        ValueError: If ``block`` is not a power of two in that range.
        TypeError: If ``block`` is not an int, or ``whole`` is not an ``Int8``.
    """

    block: int = 256
    whole: Int8 = field(default_factory=Int8)
    places: ClassVar[tuple[Place, ...]] = ("weights",)
    reason: ClassVar[str] = "a delta needs a base that its receivers hold, and only weights have one"

    def __post_init__(self) -> None:
        Int4(self.block)  # raises if the block is not valid
        if not isinstance(self.whole, Int8):
            raise TypeError(f"Int4Delta's whole must be an Int8(...), got {self.whole!r}")

    def __str__(self) -> str:
        return f"{self.whole}, changes as {self.changes}"

    @cached_property
    def changes(self) -> Int4:
        """Return the codec of the deltas."""
        return Int4(self.block)

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

    def encode_delta(self, base: Tensor, values: Tensor) -> Tensor:
        """Encode the delta that the other ranks of a hop add to their copies of this rank's part of the base.

        Args:
            base: This rank's part of the base, uint8 [rows, nbytes(numel)].
            values: The values that the rows are to hold, flat [rows * numel].

        Returns:
            uint8 [rows, changes.nbytes(numel)].
        """
        codec, changes = self.whole, self.changes
        return quantize_delta(values, base, codec.bits, codec.block, changes.bits, changes.block)

    def apply_delta(self, base: Tensor, deltas: Tensor, numel: int) -> Tensor:
        """Add every rank's ``encode_delta`` to ``base``.

        Args:
            base: The parts of all ranks, uint8 [rows, nbytes(numel)].
            deltas: uint8 [rows, changes.nbytes(numel)].
            numel: Number of values in a row.

        Returns:
            The new base, uint8 in the shape of ``base``.
        """
        codec, changes = self.whole, self.changes
        return add_delta(base, deltas, numel, codec.bits, codec.block, changes.bits, changes.block)
