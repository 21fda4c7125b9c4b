"""Where the parameters of a unit lie in a flat tensor.

[Note: Identity]
What outlives a backward (accumulated gradients, errors that are fed back) belongs to parameters, not to positions in a
flat tensor: which parameters a gradient consists of changes whenever one of them is frozen, unfrozen or not used. So
each such tensor carries its layout, and is translated when it meets a tensor of another one. What a new layout lacks is
kept apart, or the layout is widened to hold it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class Piece(NamedTuple):
    """A parameter's part of each chunk of a flat tensor.

    Attributes:
        order: The parameter's place among all of the unit's; pieces lie in this order.
        name: The parameter's FQN.
        numel: Its number of values in a chunk, padding included.
    """

    order: int
    name: str
    numel: int


@dataclass(frozen=True)
class FlatLayout:
    """The parameters that each chunk of a flat tensor consists of. See [Note: Identity].

    Args:
        pieces: Their parts, sorted.
    """

    pieces: tuple[Piece, ...]

    @cached_property
    def numel(self) -> int:
        """Number of values in a chunk."""
        return sum(piece.numel for piece in self.pieces)

    @cached_property
    def names(self) -> frozenset[str]:
        """The parameters' FQNs."""
        return frozenset(piece.name for piece in self.pieces)

    @cached_property
    def _numels(self) -> list[int]:
        return [piece.numel for piece in self.pieces]

    def __or__(self, other: FlatLayout) -> FlatLayout:
        """The layout of all parameters of both."""
        return FlatLayout(tuple(sorted({*self.pieces, *other.pieces})))

    def split(self, flat: Tensor) -> dict[Piece, Tensor]:
        """Views of a flat tensor of whole chunks: of each parameter [chunks, numel]."""
        parts = flat.view(-1, self.numel).split(self._numels, dim=1)
        return dict(zip(self.pieces, parts, strict=True))

    def join(self, parts: Mapping[Piece, Tensor], like: Tensor) -> Tensor:
        """The flat tensor that :meth:`split` gives views of, with zeros for parameters that ``parts`` lacks.

        Args:
            parts: Of each parameter [chunks, numel].
            like: A tensor of their dtype, device and number of chunks (dimension 0).
        """
        of_all = [
            part if (part := parts.get(piece)) is not None else like.new_zeros(like.shape[0], piece.numel)
            for piece in self.pieces
        ]
        return torch.cat(of_all, dim=1).flatten()

    def translate(self, flat: Tensor, to: FlatLayout) -> Tensor:
        """A tensor of this layout in another one, with zeros for what this one lacks, and without what that one lacks.

        Args:
            flat: A flat tensor of whole chunks.
            to: The other layout.
        """
        if self == to:
            return flat
        return to.join(self.split(flat), flat.view(-1, self.numel))
