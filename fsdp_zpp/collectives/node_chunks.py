"""Chunks of parameters, one for each node, as a fragment's exchange sends them.

Each parameter is cut into chunks by itself, so that its chunk has the same owner whatever else is exchanged.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from .flat_layout import FlatLayout, Piece


@dataclass(frozen=True)
class NodeChunks:
    """Cuts what a rank holds of parameters into chunks.

    Args:
        nodes: The number of nodes.
        block: What is placed differently begins at a multiple of so many values in a chunk.
    """

    nodes: int
    block: int

    def numel(self, shard: Tensor) -> int:
        """Return the values in each node's chunk of a parameter, those that pad the last one included."""
        return -(-shard.numel() // self.nodes)

    def layout(self, held: Mapping[str, Tensor], placements: Mapping[str, Hashable]) -> FlatLayout:
        """Return where parameters lie in a node's chunk.

        Args:
            held: What this rank holds of them, by FQN.
            placements: How another parallelism has placed each parameter of the fragment, by FQN, in order.
        """
        order = {name: place for place, name in enumerate(placements)}
        pieces = [Piece(order[name], name, self.numel(each)) for name, each in held.items()]
        return FlatLayout.aligned(pieces, [placements[name] for name in held], self.block)

    def places(
        self, chunks: Tensor, layout: FlatLayout, held: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, slice, Tensor]]:
        """Yield for each parameter in ``chunks`` [nodes, numel]: its FQN, a slice of it, and ``chunks`` there."""
        if len(held) == 1:  # in one go
            ((name, kept),) = held.items()
            yield name, slice(0, kept.numel()), chunks.view(-1)[: kept.numel()]
            return
        for piece, part in layout.split(chunks).items():
            for row, start in zip(part, range(0, held[piece.name].numel(), piece.numel), strict=False):
                stop = min(start + piece.numel, held[piece.name].numel())
                yield piece.name, slice(start, stop), row[: stop - start]
