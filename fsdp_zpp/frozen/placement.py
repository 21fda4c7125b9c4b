"""Where a frozen weight lives: into how many chunks it is cut, and which of them this rank holds.

[Note: Frozen chunks]
A weight is cut into chunks of its own flat values, as many as ranks share it: one for the letter ``N``, one for each
rank of a node for ``I``, one for each rank for ``G``. Chunks are multiples of the codec's block long, so the blocks are
the same however many chunks there are: what is decoded does not depend on the world. Under ``G``, rank (node, local)
holds chunk ``local * nodes + node``. The first hop of a gather then leaves neighbouring chunks on a rank, the second
hop all of them in order, and nothing needs to be transposed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..codecs import Codec
from ..topology import ProcessMesh

LETTERS = ("N", "I", "G")


@dataclass(frozen=True)
class Placement:
    """A letter on a mesh. See [Note: Frozen chunks].

    Args:
        letter: ``N`` replicated on every rank, ``I`` sharded inside a node, ``G`` sharded over all ranks.
        mesh: The ranks.
        by_name: Whether the user said how large nodes are; see [Note: Who says how large a node is] in wrapped.py.

    Raises:
        ValueError: If the letter is none of these.
    """

    letter: str
    mesh: ProcessMesh
    by_name: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if self.letter not in LETTERS:
            raise ValueError(f"a frozen base is placed by one of the letters {', '.join(LETTERS)}, got {self.letter!r}")

    @property
    def chunks(self) -> int:
        """Into how many chunks a weight is cut."""
        topology = self.mesh.topology
        return {"N": 1, "I": topology.gpus_per_node, "G": topology.world}[self.letter]

    @property
    def own_chunk(self) -> int:
        """The chunk that this rank holds."""
        node, local = divmod(self.mesh.rank, self.mesh.topology.gpus_per_node)
        return {"N": 0, "I": local, "G": local * self.mesh.topology.nodes + node}[self.letter]

    @property
    def replicas(self) -> str:
        """The letter by which :func:`check_replicas` knows who holds the same: ``I`` other nodes, ``N`` all ranks."""
        topology = self.mesh.topology
        if self.letter == "I" and topology.gpus_per_node == 1:
            return "N"
        return "G" if topology.world == 1 or (self.letter == "I" and topology.nodes == 1) else self.letter

    def chunk_numel(self, numel: int, codec: Codec) -> int:
        """Values in a chunk of a weight of ``numel`` values; the last chunks may lie partly or wholly past its end."""
        block = block_of(codec)
        return -(-numel // (self.chunks * block)) * block


def block_of(codec: Codec) -> int:
    """Values that must not be cut apart; for codecs without blocks, what keeps rows of any dtype aligned."""
    return int(getattr(codec, "block", 16))
