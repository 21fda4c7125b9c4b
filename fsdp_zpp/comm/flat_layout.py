"""Parameters of a unit as FSDP has sharded them, and their places in the tensors that hops carry."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from fsdp_zpp.codecs import Codec

# ---- flat layout
#
# [Note: Identity]
# State that outlives a backward (accumulated gradients, errors that are fed back) belongs to parameters, not to
# positions in a flat tensor: the parameters of a gradient change whenever one of them is frozen, unfrozen or not used.
# So each tensor of this state carries its layout, and is translated before use with another layout. Parameters that a
# new layout lacks are kept separately, or the layout is widened to hold them.
#
# Every step may use different parameters, such as one of several heads, or some experts. So values derived from layouts
# are kept only for the last few layouts (:func:`keep_recent`).

K = TypeVar("K")
V = TypeVar("V")

MOST_KEPT = 4
"""The number of layouts for which derived values are kept."""


class Piece(NamedTuple):
    """The ``numel`` values of a parameter in each chunk; ``order`` is the parameter's place in the unit."""

    order: int
    name: str
    numel: int


@dataclass(frozen=True)
class FlatLayout:
    """Layout of the parameters in each chunk of a flat tensor. See [Note: Identity].

    fully_shard puts a part of every parameter into each rank's chunk, so that all chunks have one layout. A flat
    parameter of FullyShardedDataParallel counts as one chunk: ranks cut it anywhere, even inside a parameter.

    Args:
        pieces: The parts of the parameters, in order.
        starts: The offset of each piece in a chunk.
        numel: Number of values in a chunk; values between the pieces belong to no parameter.
        exact: The bounds of small parameters in a chunk, in order; codecs leave these values as they are.
        is_fixed: True if the flat tensor has the same size and order no matter which parameters train (under FSDP1).
        boundaries: The offsets, in order, of parameters that another parallelism places differently from their
            predecessors. See [Note: Copies].
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

        ``placements`` say how another parallelism has placed each parameter; by default all in the same way.
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
        """Make the layout in which each run of pieces of equal ``placements`` starts at a multiple of ``multiple``."""
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
        return frozenset(piece.name for piece in self.pieces)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Return the bounds in a chunk of the values between the pieces."""
        ends = (0, *(start + piece.numel for piece, start in zip(self.pieces, self.starts, strict=True)))
        bounds = zip(ends, (*self.starts, self.numel), strict=True)
        return tuple((end, start) for end, start in bounds if start > end)

    def runs(self, names: Collection[str]) -> list[tuple[int, int]]:
        """Return the bounds of the parameters ``names`` in a chunk; neighbours are one run, gaps included."""
        runs: list[tuple[int, int]] = []
        is_neighbour = False
        for piece, start in zip(self.pieces, self.starts, strict=True):
            if is_named := piece.name in names:
                first = runs.pop()[0] if is_neighbour else start
                runs.append((first, start + piece.numel))
            is_neighbour = is_named
        return runs

    def __or__(self, other: FlatLayout) -> FlatLayout:
        return FlatLayout.dense(sorted({*self.pieces, *other.pieces}))

    def split(self, flat: Tensor) -> dict[Piece, Tensor]:
        """Return views of each parameter in a flat tensor of whole chunks: [chunks, numel]."""
        chunks = flat.view(-1, self.numel)
        return {p: chunks[:, start : start + p.numel] for p, start in zip(self.pieces, self.starts, strict=True)}

    def join(self, parts: Mapping[Piece, Tensor], chunks: int, like: Tensor) -> Tensor:
        """Make the flat tensor whose views :meth:`split` returns, with zeros for parameters that ``parts`` lacks."""
        flat = like.new_zeros(chunks * self.numel)
        for piece, place in self.split(flat).items():
            if (part := parts.get(piece)) is not None:
                place.copy_(part)
        return flat

    def translate(self, flat: Tensor, to: FlatLayout) -> Tensor:
        """Return whole chunks of this layout in the layout ``to``, with zeros for parameters that only ``to`` has."""
        return flat if self == to else to.join(self.split(flat), flat.numel() // self.numel, flat)


@dataclass(frozen=True)
class Extent:
    """Chunks of ``numel`` values of a flat tensor, as a hop encodes them; ``layout`` is None if it never changes."""

    numel: int
    starts: tuple[int, ...]
    layout: FlatLayout | None = None

    @property
    def chunks(self) -> int:
        return len(self.starts)

    @property
    def is_whole(self) -> bool:
        """Return whether each chunk is a whole chunk of the layout, with its parts of all parameters."""
        return self.layout is not None and self.numel == self.layout.numel

    @property
    def firsts(self) -> tuple[int, ...]:
        return (0,) * self.chunks if self.is_whole else self.starts

    def marked(self, names: Collection[str], device: torch.device) -> Tensor | None:
        """Return a mask of the parameters ``names``, bool [chunks * numel]; None if the chunks have none of them."""
        if self.layout is None:
            return None
        runs = [
            (chunk, max(start - first, 0), min(stop - first, self.numel))
            for start, stop in self.layout.runs(names)
            for chunk, first in enumerate(self.firsts)
            if max(start, first) < min(stop, first + self.numel)
        ]
        if not runs:
            return None
        marks = torch.zeros(self.chunks, self.numel, dtype=torch.bool, device=device)
        for chunk, start, stop in runs:
            marks[chunk, start:stop] = True
        return marks.view(-1)

    def embed(self, values: Tensor) -> Tensor:
        """Return the extent's values in whole chunks of the layout, with zeros around them."""
        if self.is_whole or self.layout is None:
            return values
        flat = values.new_zeros(self.layout.numel)
        for chunk, start in zip(values.view(self.chunks, self.numel), self.starts, strict=True):
            place = flat[start : start + self.numel]
            place.copy_(chunk[: place.numel()])
        return flat

    def cut(self, flat: Tensor) -> Tensor:
        """Return the extent's values from whole chunks of the layout, with zeros where the extent goes past them."""
        if self.is_whole:
            return flat
        values = flat.new_zeros(self.chunks, self.numel)
        for chunk, start in zip(values, self.starts, strict=True):
            place = flat[start : start + self.numel]
            chunk[: place.numel()] = place
        return values.view(-1)


def boundaries_between(placed: Iterable[tuple[int, Hashable]]) -> tuple[int, ...]:
    """Return the offset of each parameter that is placed differently from the parameter before."""
    pairs = pairwise(placed)
    return tuple(start for (_, before), (start, after) in pairs if before != after)


def keep_recent(kept: dict[K, V], key: K, value: V) -> V:
    """Add ``value`` to ``kept`` and return it; a full ``kept`` drops its oldest entry first."""
    # A few entries suffice for tasks or heads that take turns. More would not help experts, since hardly any
    # two steps use the same experts, and entries take device memory.
    if len(kept) >= MOST_KEPT:
        del kept[next(iter(kept))]
    kept[key] = value
    return value


NO_PARAMETERS = FlatLayout.dense(())


# ---- exact places
#
# This section finds the small parameters of a unit, and their places in the tensors that a hop sends.
#
# [Note: Small parameters]
# A block's largest value sets its scale. A bias or a norm has few values on a rank, so it shares blocks with a
# matrix. If the matrix's gradients are a hundred times larger, those of the bias round to zero. So parameters of one
# dimension, and the smallest others (routers, for example), travel in fp32 in the tail of a payload's row, while the
# codec encodes zeros in their places. They are well under a hundredth of a model, so this costs next to no bytes.
#
# [Note: Copies]
# Another parallelism shards some parameters of a unit over its ranks and leaves copies of others on each: tensor
# parallelism shards matrices, and leaves copies of norms, routers or latent projections. Copies must stay equal bit for
# bit, but their neighbours differ between these ranks, and rounding depends on all values of a block. So copies come
# first in a unit, in the same places on all of these ranks, and no block mixes parameters of different placements:
# if a boundary between such parameters is inside a block, the block's values before it travel in the tail, too. A codec
# that mixes values has the bounds of all parameters treated so: gradients that no rank has, and padding, must stay 0.

SMALLEST = 128
"""The smallest parameters of several dimensions are sent exactly, up to a total of 1/SMALLEST of a unit's values."""

_MULTIPLE = 4  # a tail's length is a multiple of it, so that rows stay aligned to 16 bytes


def sent_exactly(shapes: Sequence[Sequence[int]]) -> list[bool]:
    """Return, for each parameter of a unit, whether codecs leave it as it is. See [Note: Small parameters]."""
    numels = [math.prod(shape) for shape in shapes]
    exact = [len(shape) < 2 for shape in shapes]
    left = sum(numels) // SMALLEST
    # Prefer the last of several equal sizes, so that moving the chosen parameters to the end keeps the choice.
    for index in sorted(range(len(shapes)), key=lambda index: (numels[index], -index)):
        if not exact[index] and numels[index] <= left:
            exact[index] = True
            left -= numels[index]
    return exact


def sharded_along(tensors: Iterable[tuple[DeviceMesh, Sequence[Placement]] | None]) -> list[tuple[str, ...]]:
    """Return the names of the mesh dimensions along which each tensor is sharded; None is a tensor on no mesh."""
    along: list[tuple[str, ...]] = []
    for tensor in tensors:
        mesh, placements = (None, ()) if tensor is None else tensor
        names = () if mesh is None else mesh.mesh_dim_names or [str(dim) for dim in range(mesh.ndim)]
        pairs = zip(names, placements, strict=True)
        along.append(tuple([name for name, placement in pairs if not placement.is_replicate()]))
    return along


class ExactPlaces:
    """Places of the values that travel in the tails of some rows: indices in a flat tensor, int64 [rows, tail].

    If a chunk has fewer small values than the tail holds, its row repeats the place of the first small value, or of the
    chunk's first value if none is small.

    Under fully_shard these values lie at the end of each chunk. A strided view of them costs the CPU half as much as
    indexing: ``values.as_strided(shape, strides, values.storage_offset() + start)``. Elsewhere ``strides`` is None.
    """

    def __init__(self, indices: Tensor, device: torch.device) -> None:
        self.indices = indices.to(device)
        self.flat, self.tail = self.indices.view(-1), indices.shape[1]
        self.start = int(indices[0, 0])
        self.shape, self.strides = _as_view(indices - self.start)

    @cached_property
    def key(self) -> Hashable:
        return tuple(self.flat.tolist())


def _as_view(indices: Tensor) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return shape and strides of the view that reaches ``indices``, a grid of rows; no strides if none does."""
    rows, tail = indices.shape
    offsets = indices[:, 0].tolist()
    step = max(offsets[:2])
    inner = next((row for row in range(rows) if offsets[row] != row * step), rows)
    stride = max([0, *offsets[inner : inner + 1]])
    grid = torch.tensor([row // inner * stride + row % inner * step for row in range(rows)])
    if rows % inner or not torch.equal(indices, grid[:, None] + torch.arange(tail)):
        return (rows, tail), None
    return (rows // inner, inner, tail), (stride, step, 1)


def boundaries_of(layout: FlatLayout, codecs: Iterable[Codec | None]) -> list[tuple[int, int]]:
    """Return the offsets that no block of ``codecs`` may span, each with the codecs' block; 0 is a whole chunk."""
    present = [codec for codec in codecs if codec is not None]
    pairs = [(boundary, _block_of(present)) for boundary in layout.boundaries]
    if mixing := [codec for codec in present if codec.mixes_values]:
        block = _block_of(mixing)
        pairs += [(start, block) for start in (*layout.starts, *(gap[0] for gap in layout.gaps))]
    return pairs


def _block_of(codecs: list[Codec]) -> int:
    """Return a common multiple of the codecs' block sizes; 0 if all values of a chunk depend on each other."""
    blocks = [codec.block_numel for codec in codecs]
    return math.lcm(*blocks) if all(blocks) else 0


def exact_places(
    extent: Extent,
    boundaries: Iterable[tuple[int, int]],
    of_all: Iterable[int],
    device: torch.device,
    at: Sequence[int] | None = None,
) -> ExactPlaces | None:
    """Return the places of small values in the chunks that are rows of a payload; None if there are none.

    Args:
        extent: The chunks.
        boundaries: Offsets in the layout that no block may span, as :func:`boundaries_of` returns them.
        of_all: The offsets of all ranks' chunks in the layout; the chunk that needs the longest tail sets the length.
        at: The offsets of the chunks in the tensor to encode, or to decode into; by default they are adjacent.
    """
    layout, numel = extent.layout, extent.numel
    if layout is None or not numel:
        return None
    firsts = {0} if extent.is_whole else of_all
    in_chunks = {first: _in_chunk(layout.exact, boundaries, first, numel) for first in firsts}
    longest = max(map(len, in_chunks.values()))
    if not longest:
        return None
    tail = -(-longest // _MULTIPLE) * _MULTIPLE
    places = range(0, extent.chunks * numel, numel) if at is None else at
    rows = [_padded(in_chunks[first], tail) + place for first, place in zip(extent.firsts, places, strict=True)]
    return ExactPlaces(torch.stack(rows), device)


def _in_chunk(
    exact: Iterable[tuple[int, int]], boundaries: Iterable[tuple[int, int]], first: int, numel: int
) -> Tensor:
    """Return the places of small values in the chunk at ``first``, counted from there: int64, in order."""
    runs = [(start - first, stop - first) for start, stop in exact]
    for boundary, block in boundaries:
        if 0 < (place := boundary - first) < numel:
            runs.append((place - place % block if block else 0, place))
    parts: list[Tensor] = []
    end = 0
    for start, stop in sorted(runs):  # runs may overlap
        start, stop = max(start, end), min(stop, numel)
        if start < stop:
            parts.append(torch.arange(start, stop))
            end = stop
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def _padded(indices: Tensor, length: int) -> Tensor:
    filler = indices[:1] if len(indices) else torch.zeros(1, dtype=torch.int64)
    return torch.cat([indices, filler.expand(length - len(indices))])


# ---- sharded


class Sharded:
    """Parameters of a unit as FSDP has sharded them; adapters derive from this base class, which has none.

    Each call looks up everything again: ``load_state_dict(assign=True)``, a move of the model, or FSDP itself may
    replace parameters and shards, and a reference to the old ones would keep their memory.
    """

    _name = "unit"

    @property
    def name(self) -> str:
        """Return the unit's name in profiles, errors and log lines."""
        return self._name

    def rename(self, name: str) -> None:
        self._name = name

    def numel(self) -> int:
        """Return the number of values of the parameters, on all ranks together."""
        return 0

    def parameters(self) -> Sequence[nn.Parameter]:
        """Return the parameters, as an optimizer holds them."""
        return ()

    def parameter_owners(self) -> Sequence[Sequence[nn.Module]]:
        """Return each parameter's modules; empty if modules hold the optimizer's parameters even while unsharded."""
        return ()

    def model_parallel_groups(self) -> Sequence[dist.ProcessGroup]:
        """Return a group per axis of another parallelism: its ranks have copies of what the axis does not shard."""
        return ()

    def is_trained(self) -> bool:
        """Return whether a parameter requires a gradient, in its sharded or unsharded form; equal on all ranks."""
        return False

    def trained_names(self) -> Collection[str]:
        """Return the FQNs of the parameters that require a gradient or have one."""
        return ()

    def shards(self) -> Sequence[Tensor]:
        """Return this rank's shards of the parameters, padding included."""
        return ()

    def named_shards(self) -> Mapping[str, Tensor]:
        """Return this rank's shard of each parameter, by FQN, ready to be read and written to."""
        return {}

    def named_parts(self, parameter: nn.Parameter, of: Tensor) -> Mapping[str, Tensor]:
        """Split ``of``, contiguous and laid out as this rank's shard of ``parameter``; return its parts by FQN.

        An optimizer's parameter may consist of several of the model's parameters.
        """
        return {}

    def placements(self) -> Mapping[str, Hashable]:
        """Return how FSDP and other parallelisms have placed each parameter, by FQN, in the order of the shards."""
        return {}

    def weights_changed(self, by_step: bool) -> None:
        """Drop caches of the old weights; after a step (``by_step``), only the weights' values have changed."""

    def drop_gradients(self) -> None:
        """Drop the gradients accumulated from earlier micro-batches of the step."""
