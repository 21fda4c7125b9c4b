"""Small parameters among those of a unit: which they are, and where they lie in what a hop sends.

[Note: Small parameters]
A block's scale is that of its largest value. A bias or a norm has so few values on a rank that it shares its blocks
with a matrix, whose gradients may be a hundred times larger, and would be rounded to zero. So parameters of one
dimension, and the smallest others (routers, for example), travel in fp32 in the tail of a payload's row, while the
codec encodes zeros in their places. They are well under a hundredth of a model, so this costs next to no bytes.

[Note: Copies]
Another parallelism shards some parameters of a unit over its ranks and leaves copies of others on them (tensor
parallelism: matrices, and norms, routers or latent projections). Copies must stay equal bit for bit, but their unit has
other neighbours on each of these ranks, and what shares a block with a neighbour is rounded as that demands. So copies
come first in a unit, in the same places on all of these ranks, and no block has values of parameters that are placed
differently: those that precede such a boundary in its block travel in the tail, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fsdp_zpp.codecs.base import Codec

from .flat_layout import FlatLayout, keep_recent
from .mesh import ProcessMesh

SMALLEST = 128
"""Parameters of several dimensions are sent exactly as long as, together, they are this part of a unit at most."""

_MULTIPLE = 4  # of which a tail's length must be one, so that rows stay aligned to 16 bytes


def sent_exactly(shapes: Sequence[Sequence[int]]) -> list[bool]:
    """Tell, for each of a unit's parameters, whether codecs leave it as it is. See [Note: Small parameters].

    Args:
        shapes: Those of all parameters of the unit, sharded or not by anything else than FSDP.
    """
    numels = [math.prod(shape) for shape in shapes]
    exact = [len(shape) < 2 for shape in shapes]
    left = sum(numels) // SMALLEST
    # Of equal sizes the last ones, so that the choice stays the same once those that are chosen have been put last.
    for index in sorted(range(len(shapes)), key=lambda index: (numels[index], -index)):
        if not exact[index] and numels[index] <= left:
            exact[index] = True
            left -= numels[index]
    return exact


class ExactPlaces:
    """Places of the values that travel in the tails of some rows.

    Args:
        indices: Indices in a flat tensor of the values of each row's tail, int64 [rows, tail]. If a chunk has fewer
            small values than the tail, some of its values are in it twice, or one that is not small is.

    Attributes:
        indices: As given.
        flat: The same, one row after the other: int64 [rows * tail].
        tail: Length of a tail.
    """

    def __init__(self, indices: Tensor) -> None:
        self.indices, self.flat = indices, indices.view(-1)
        self.tail = indices.shape[1]

    @cached_property
    def key(self) -> Hashable:
        """Return a value that is equal for equal places."""
        return tuple(self.flat.tolist())


class PlacesInChunks:
    """Computes the places of small values in chunks that a hop encodes, once for each of the last few layouts.

    Args:
        mesh: The ranks.
        codecs: What encodes the chunks, one at a time.
    """

    def __init__(self, mesh: ProcessMesh, codecs: Iterable[Codec | None]) -> None:
        self._codecs = [codec for codec in codecs if codec is not None]
        self._nodes, self._gpus = mesh.topology.nodes, mesh.topology.gpus_per_node
        self._node, self._local = divmod(mesh.rank, self._gpus)
        self._computed: dict[int, _Computed] = {}  # by the layout's id, of the last few

    def _cached(
        self, layout: FlatLayout | None, numel: int, which: str, device: torch.device, rows: Callable[[], _Rows]
    ) -> ExactPlaces | None:
        if layout is None or not (layout.exact or layout.boundaries) or not numel:
            return None
        computed = self._computed.get(id(layout)) or keep_recent(self._computed, id(layout), _Computed(layout))
        entry = computed.places.get((which, numel))
        if entry is None or entry[0] != device:
            entry = device, _places(layout, numel, rows(), device, self._block())
            computed.places[which, numel] = entry
        return entry[1]

    def _block(self) -> int:
        """Return a number of values whose multiples no block of any codec spans; 0 if codecs don't tell."""
        blocks = [codec.block_numel for codec in self._codecs]
        return max(blocks, default=1) if all(blocks) else 0  # powers of two

    # ---- of tensors that have a chunk for each rank

    def of_all_ranks(self, layout: FlatLayout | None, numel: int, device: torch.device) -> ExactPlaces | None:
        """Return the places in all ranks' chunks, by local index, then node: the order in which hops exchange them."""

        def rows() -> _Rows:
            order = [node * self._gpus + local for local in range(self._gpus) for node in range(self._nodes)]
            return self._ranks(numel, order, order)

        return self._cached(layout, numel, "all", device, rows)

    def of_own_local_index(self, layout: FlatLayout | None, numel: int, device: torch.device) -> ExactPlaces | None:
        """Return the places in the chunks of the ranks of all nodes with this local index."""

        def rows() -> _Rows:
            order = [node * self._gpus + self._local for node in range(self._nodes)]
            return self._ranks(numel, order, range(self._nodes))

        return self._cached(layout, numel, "own index", device, rows)

    def of_own_rank(self, layout: FlatLayout | None, numel: int, device: torch.device) -> ExactPlaces | None:
        """Return the places in this rank's chunk alone."""
        rank = self._node * self._gpus + self._local
        return self._cached(layout, numel, "own", device, lambda: self._ranks(numel, [rank], [0]))

    def _ranks(self, numel: int, chunks: Sequence[int], places: Sequence[int]) -> _Rows:
        starts = [rank * numel for rank in range(self._nodes * self._gpus)]
        return _Rows(starts, chunks, [place * numel for place in places])

    # ---- of tensors that replicas share: a part for each local index, and in it a chunk for each node

    def of_parts(self, layout: FlatLayout | None, part: int, device: torch.device) -> ExactPlaces | None:
        """Return the places in the parts of all local indices."""
        return self._cached(layout, part, "parts", device, lambda: self._parts(layout, part, range(self._gpus)))

    def of_own_part(self, layout: FlatLayout | None, part: int, device: torch.device) -> ExactPlaces | None:
        """Return the places in this local index's part alone."""
        return self._cached(layout, part, "own part", device, lambda: self._parts(layout, part, [self._local]))

    def _parts(self, layout: FlatLayout | None, part: int, locals_: Sequence[int]) -> _Rows:
        return _Rows(self.part_starts(layout, part), locals_, [row * part for row in range(len(locals_))])

    def part_starts(self, layout: FlatLayout | None, part: int) -> list[int]:
        """Return where each local index's part begins in the layout, of which it may be one chunk of several."""
        step = 0 if layout is None or layout.numel == part else part
        return [local * step for local in range(self._gpus)]

    def of_nodes(
        self, layout: FlatLayout | None, part: int, chunk: int, which: str, device: torch.device
    ) -> ExactPlaces | None:
        """Return the places in the chunks of nodes.

        Args:
            layout: The gradient's layout.
            part: Number of values of a local index's part.
            chunk: Number of values of a node's chunk of it.
            which: ``"own"`` for this rank's chunk, ``"part"`` for all chunks of its part, ``"all"`` for those of all
                parts.
            device: Where the values are.
        """
        locals_ = range(self._gpus) if which == "all" else [self._local]
        nodes = [self._node] if which == "own" else range(self._nodes)

        def rows() -> _Rows:
            starts = [start + node * chunk for start in self.part_starts(layout, part) for node in range(self._nodes)]
            chunks = [local * self._nodes + node for local in locals_ for node in nodes]
            return _Rows(starts, chunks, [row * chunk for row in range(len(chunks))])

        return self._cached(layout, chunk, f"{which} of {part}", device, rows)


@dataclass
class _Computed:
    """Places that were computed for a layout.

    Args:
        layout: The layout, which must live as long as its id stands for it.

    Attributes:
        places: By kind and number of values in a chunk, of which a layout has a handful, with their device.
    """

    layout: FlatLayout
    places: dict[tuple[str, int], tuple[torch.device, ExactPlaces | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Rows:
    """Rows of a payload.

    Args:
        starts: Where each chunk of any rank begins in the layout.
        chunks: Which of them the rows are.
        places: Where each of these lies in the flat tensor that is encoded or decoded into.
    """

    starts: Sequence[int]
    chunks: Sequence[int]
    places: Sequence[int]


def _places(layout: FlatLayout, numel: int, rows: _Rows, device: torch.device, block: int) -> ExactPlaces | None:
    # Where each chunk has parts of all parameters, all begin where the layout does.
    starts = [0] * len(rows.starts) if layout.numel == numel else rows.starts
    in_chunks = {start: _in_chunk(layout, start, numel, block) for start in dict.fromkeys(starts)}
    longest = max(map(len, in_chunks.values()))
    if not longest:
        return None
    tail = -(-longest // _MULTIPLE) * _MULTIPLE
    indices = [
        _padded(in_chunks[starts[chunk]], tail) + place for chunk, place in zip(rows.chunks, rows.places, strict=True)
    ]
    return ExactPlaces(torch.stack(indices).to(device))


def _in_chunk(layout: FlatLayout, first: int, numel: int, block: int) -> Tensor:
    """Return the places of small values in the chunk at ``first``, counted from there: int64, in order."""
    runs = [(start - first, stop - first) for start, stop in layout.exact]
    for boundary in layout.boundaries:
        if 0 < (place := boundary - first) < numel:
            runs.append((place - place % block if block else 0, place))
    parts: list[Tensor] = []
    end = 0
    for start, stop in sorted(runs):  # which may overlap
        start, stop = max(start, end), min(stop, numel)
        if start < stop:
            parts.append(torch.arange(start, stop))
            end = stop
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def _padded(indices: Tensor, length: int) -> Tensor:
    filler = indices[:1] if len(indices) else torch.zeros(1, dtype=torch.int64)
    return torch.cat([indices, filler.expand(length - len(indices))])
