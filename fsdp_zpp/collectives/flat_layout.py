"""Layouts: where the parameters of a unit lie in a flat tensor.

[Note: Identity]
What outlives a backward (accumulated gradients, errors that are fed back) belongs to parameters, not to positions in a
flat tensor: which parameters a gradient consists of changes whenever one of them is frozen, unfrozen or not used. So
each such tensor carries its layout, and is translated when it meets a tensor of another layout. Parameters that a new
layout lacks are kept apart, or the layout is widened to hold them.

Every step may use other parameters, such as one of several heads, or other experts. So what is derived from layouts is
kept for the last few layouts alone (:func:`keep_recent`).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

from torch import Tensor

K = TypeVar("K")
V = TypeVar("V")

MOST_KEPT = 4
"""The number of layouts for which derived values are kept."""


class Piece(NamedTuple):
    """A parameter's part of each chunk of a flat tensor.

    Attributes:
        order: The parameter's place among all of the unit's.
        name: The parameter's FQN.
        numel: Its number of values in a chunk.
    """

    order: int
    name: str
    numel: int


@dataclass(frozen=True)
class FlatLayout:
    """Layout of the parameters in each chunk of a flat tensor. See [Note: Identity].

    fully_shard puts a part of every parameter into each rank's chunk, so that all chunks have one layout. In a flat
    parameter of FullyShardedDataParallel, parameters follow one another and ranks cut it anywhere: it is one chunk.

    Args:
        pieces: The parts of the parameters, in order.
        starts: Where each piece begins in a chunk.
        numel: Number of values in a chunk; values between the pieces belong to no parameter.
        exact: Where small parameters begin and end in a chunk, which codecs leave as they are, in order.
        is_fixed: Whether the flat tensor is the same whatever the pieces are, as in a flat parameter.
        boundaries: Where a parameter ends and the next is one that another parallelism shards differently, in order.
            See [Note: Copies] in exact_places.py.
    """

    pieces: tuple[Piece, ...]
    starts: tuple[int, ...]
    numel: int
    exact: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    is_fixed: bool = field(default=False, compare=False)
    boundaries: tuple[int, ...] = field(default=(), compare=False)

    @classmethod
    def dense(
        cls, pieces: Iterable[Piece], exact: Sequence[bool] = (), placements: Sequence[Hashable] = ()
    ) -> FlatLayout:
        """Make the layout of ``pieces`` that lie one after the other.

        Args:
            pieces: The parts of the parameters.
            exact: Whether each is a part of a small parameter; by default none is.
            placements: How another parallelism has placed each parameter; by default all alike.
        """
        pieces = tuple(pieces)
        bounds = (0, *accumulate(piece.numel for piece in pieces))
        starts = bounds[:-1]
        small = tuple(bound for is_exact, bound in zip(exact, pairwise(bounds), strict=False) if is_exact)
        placed = zip(starts, placements, exact, strict=False)
        boundaries = boundaries_between((start, placement) for start, placement, is_exact in placed if not is_exact)
        return cls(pieces, starts, bounds[-1], small, boundaries=boundaries)

    @classmethod
    def aligned(cls, pieces: Iterable[Piece], placements: Iterable[Hashable], multiple: int) -> FlatLayout:
        """Make the layout of ``pieces`` in which those that are placed alike lie together, away from all others.

        Args:
            pieces: The parts of the parameters.
            placements: How another parallelism has placed each parameter.
            multiple: What each run of pieces that are placed alike begins at a multiple of.
        """
        runs: dict[Hashable, list[Piece]] = {}
        for piece, placement in zip(pieces, placements, strict=True):
            runs.setdefault(placement, []).append(piece)
        starts: list[int] = []
        stop = 0
        for run in runs.values():
            stop = -(-stop // multiple) * multiple
            for piece in run:
                starts.append(stop)
                stop += piece.numel
        return cls(tuple(piece for run in runs.values() for piece in run), tuple(starts), stop)

    @cached_property
    def names(self) -> frozenset[str]:
        """Return the parameters' FQNs."""
        return frozenset(piece.name for piece in self.pieces)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Return where the values between the pieces begin and end in a chunk."""
        ends = (0, *(start + piece.numel for piece, start in zip(self.pieces, self.starts, strict=True)))
        bounds = zip(ends, (*self.starts, self.numel), strict=True)
        return tuple((end, start) for end, start in bounds if start > end)

    def runs(self, names: Collection[str]) -> list[tuple[int, int]]:
        """Return where the parameters ``names`` begin and end in a chunk; neighbours are one run, gaps included."""
        runs: list[tuple[int, int]] = []
        is_neighbour = False
        for piece, start in zip(self.pieces, self.starts, strict=True):
            if is_named := piece.name in names:
                first = runs.pop()[0] if is_neighbour else start
                runs.append((first, start + piece.numel))
            is_neighbour = is_named
        return runs

    def __or__(self, other: FlatLayout) -> FlatLayout:
        """Return the dense layout of all parameters of both."""
        return FlatLayout.dense(sorted({*self.pieces, *other.pieces}))

    def split(self, flat: Tensor) -> dict[Piece, Tensor]:
        """Return views of each parameter in a flat tensor of whole chunks: [chunks, numel]."""
        chunks = flat.view(-1, self.numel)
        return {p: chunks[:, start : start + p.numel] for p, start in zip(self.pieces, self.starts, strict=True)}

    def join(self, parts: Mapping[Piece, Tensor], chunks: int, like: Tensor) -> Tensor:
        """Make the flat tensor that :meth:`split` gives views of, with zeros for parameters that ``parts`` lacks.

        Args:
            parts: The values of each parameter, [chunks, numel].
            chunks: Number of chunks.
            like: A tensor of the same dtype and device.
        """
        flat = like.new_zeros(chunks * self.numel)
        for piece, place in self.split(flat).items():
            if (part := parts.get(piece)) is not None:
                place.copy_(part)
        return flat

    def translate(self, flat: Tensor, to: FlatLayout) -> Tensor:
        """Translate a tensor of this layout to another one, with zeros for what this one lacks and without the rest.

        Args:
            flat: A flat tensor of whole chunks.
            to: The other layout.
        """
        return flat if self == to else to.join(self.split(flat), flat.numel() // self.numel, flat)


def boundaries_between(placed: Iterable[tuple[int, Hashable]]) -> tuple[int, ...]:
    """Return where parameters begin that are placed differently from those before them.

    Args:
        placed: Where each parameter begins, in order, and how another parallelism has placed it.
    """
    pairs = pairwise(placed)
    return tuple(start for (_, before), (start, after) in pairs if before != after)


def keep_recent(kept: dict[K, V], key: K, value: V) -> V:
    """Add ``value`` to ``kept``, in place of the oldest entry if there are too many, and return it.

    A few tasks or heads that take turns find their entries again. Hardly any two steps use the same experts, and
    entries for them take memory of the device.
    """
    if len(kept) >= MOST_KEPT:
        del kept[next(iter(kept))]
    kept[key] = value
    return value


NO_PARAMETERS = FlatLayout.dense(())
"""Layout of nothing."""
