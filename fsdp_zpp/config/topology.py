"""Layout of ranks on nodes x GPUs, without process groups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Topology:
    """``world`` ranks on nodes of ``gpus_per_node``: rank = node * gpus_per_node + local.

    Args:
        world: Number of ranks.
        gpus_per_node: Ranks on each node.

    Raises:
        ValueError: If ``world`` is not divisible by ``gpus_per_node``.
    """

    world: int
    gpus_per_node: int

    def __post_init__(self) -> None:
        if self.gpus_per_node < 1 or self.world % self.gpus_per_node:
            divisors = [d for d in range(1, self.world + 1) if self.world % d == 0]
            raise ValueError(
                f"the world size must be divisible by gpus_per_node, got a world of {self.world} and "
                f"gpus_per_node={self.gpus_per_node}; allowed are {divisors}"
            )

    @cached_property
    def nodes(self) -> int:
        """Return the number of nodes."""
        return self.world // self.gpus_per_node

    def shard_count(self, scope: str) -> int:
        """Return the number of shards into which a scope cuts a state: D(scope) in PaRO (arXiv 2310.06003)."""
        return {"N": 1, "I": self.gpus_per_node, "G": self.world}[scope]

    def intra_partition(self) -> list[list[int]]:
        """Return the ranks of each node, ordered by local index."""
        starts = range(0, self.world, self.gpus_per_node)
        return [list(range(start, start + self.gpus_per_node)) for start in starts]

    def inter_partition(self) -> list[list[int]]:
        """Return the ranks of each local index, one per node, ordered by node."""
        return [list(range(local, self.world, self.gpus_per_node)) for local in range(self.gpus_per_node)]

    def __str__(self) -> str:
        return f"{self.nodes} node{'s' * (self.nodes > 1)} x {self.gpus_per_node}"
