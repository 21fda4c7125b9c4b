"""Tensors of a rank in chunks, one for each node, to be exchanged between nodes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

from torch import Tensor

from .flat_layout import FlatLayout, Piece


class NodeChunks:
    """Cuts what a rank holds of some parameters into a chunk for each node.

    Each parameter is cut by itself, so that its chunk has the same owner whatever else is exchanged.

    Args:
        numels: The number of values that this rank holds of each parameter, by name: at least one.
        placements: How another parallelism has placed each parameter, by name, in an order that is always the same.
            It may have more parameters than ``numels``.
        nodes: The number of nodes.
        block: What parameters that are placed differently begin at multiples of, so that no block of a codec spans
            them; see [Note: Copies] in exact_places.py.

    Attributes:
        layout: Where the parameters lie in a node's chunk.
    """

    def __init__(self, numels: Mapping[str, int], placements: Mapping[str, Hashable], nodes: int, block: int) -> None:
        self._numels = numels
        order = {name: place for place, name in enumerate(placements)}
        pieces = [Piece(order[name], name, chunk_numel(numel, nodes)) for name, numel in numels.items()]
        self.layout = FlatLayout.aligned(pieces, [placements[name] for name in numels], block)

    def places(self, flat: Tensor) -> Iterator[tuple[str, slice, Tensor]]:
        """Yield, for each parameter in ``flat`` [nodes, numel]: its name, a slice of it, and ``flat`` there."""
        if len(self._numels) == 1:  # in one go
            ((name, numel),) = self._numels.items()
            yield name, slice(0, numel), flat.view(-1)[:numel]
            return
        for piece, part in self.layout.split(flat).items():
            numel = self._numels[piece.name]
            for row, start in zip(part, range(0, numel, piece.numel), strict=False):
                stop = min(start + piece.numel, numel)
                yield piece.name, slice(start, stop), row[: stop - start]


def chunk_numel(numel: int, nodes: int) -> int:
    """Return the number of values in a node's chunk of ``numel`` values."""
    return -(-numel // nodes)
