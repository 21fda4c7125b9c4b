"""Parallelisms beside data parallelism: their degrees, and where the ranks of each axis lie.

Ranks are laid out as torchtitan does it, and Megatron: pipeline stages outermost, then data-parallel ranks, then those
of context and of tensor parallelism. So the ranks of a tensor-parallel group are neighbours. Context-parallel ranks
have all parameters of their stage's tensor-parallel rank, so a strategy takes them for data-parallel ranks.

Expert parallelism takes neighbouring ranks of a stage, whatever their place in tensor or context parallelism. Experts
are not split by tensor parallelism then.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from fsdp_zpp.config.topology import Topology

from .config import Cluster, whole


@dataclass(frozen=True)
class Axes:
    """Degrees of the parallelisms beside data parallelism; 1 is none.

    Args:
        tp: Ranks of tensor parallelism, which split dense parameters.
        pp: Stages of a pipeline, which split layers.
        cp: Ranks of context parallelism, which split sequences.
        ep: Ranks of expert parallelism, which split experts.

    Raises:
        TypeError: If a degree is not a number.
        ValueError: If a degree is not a whole number of at least 1.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp", "ep"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))

    @property
    def splits_parameters(self) -> bool:
        """Return whether any axis leaves a rank with a part of the parameters."""
        return (self.tp, self.pp, self.ep) != (1, 1, 1)

    def check(self, cluster: Cluster) -> None:
        """Raise unless the ranks of ``cluster`` can be laid out along these axes.

        Raises:
            ValueError: If the degrees do not divide the ranks, or if nodes would have unequal shares of an axis.
        """
        world, together = cluster.topology.world, self.tp * self.pp * self.cp
        if world % together:
            raise ValueError(
                f"tp={self.tp} x pp={self.pp} x cp={self.cp} is {together} ranks, which does not divide the {world} of "
                f"the cluster; the product must be one of {_divisors(world)}"
            )
        stage = world // self.pp
        if stage % self.ep:
            raise ValueError(
                f"ep={self.ep} does not divide the {stage} ranks of a pipeline stage; allowed are {_divisors(stage)}"
            )
        for ranks in (*self.others(cluster).values(), self.dense_ranks(cluster), self.expert_ranks(cluster)):
            ranks.check(cluster)

    def dense_ranks(self, cluster: Cluster) -> AxisRanks:
        """Return the ranks that a strategy shards dense parameters over: data- and context-parallel ones."""
        return AxisRanks("data-parallel", cluster.topology.world // (self.tp * self.pp), self.tp)

    def expert_ranks(self, cluster: Cluster) -> AxisRanks:
        """Return the ranks that a strategy shards experts over. Without expert parallelism, they are as for others."""
        if self.ep == 1:
            return self.dense_ranks(cluster)
        return AxisRanks("data-parallel (experts)", cluster.topology.world // (self.pp * self.ep), self.ep)

    def others(self, cluster: Cluster) -> dict[str, AxisRanks]:
        """Return the ranks of each other axis that is longer than 1."""
        axes = {
            "tp": AxisRanks("tensor-parallel", self.tp, 1),
            "cp": AxisRanks("context-parallel", self.cp, self.tp),
            "ep": AxisRanks("expert-parallel", self.ep, 1),
            "pp": AxisRanks("pipeline-parallel", self.pp, cluster.topology.world // self.pp),
        }
        return {name: ranks for name, ranks in axes.items() if ranks.size > 1}


@dataclass(frozen=True)
class AxisRanks:
    """Ranks of a mesh dimension.

    Attributes:
        name: What they are, in errors.
        size: Number of ranks along the dimension.
        stride: How far they are apart: the product of the dimensions inside of it.
    """

    name: str
    size: int
    stride: int

    def on_a_node(self, gpus_per_node: int) -> int:
        """Return how many of them lie on one node."""
        return max(1, min(self.size, gpus_per_node // self.stride))

    def topology(self, cluster: Cluster) -> Topology:
        """Return their layout on nodes, in which a node has those of its GPUs that are among these ranks."""
        return Topology(self.size, self.on_a_node(cluster.gpus_per_node))

    def check(self, cluster: Cluster) -> None:
        """Raise unless all nodes that have any of them have equally many.

        Raises:
            ValueError: If they do not.
        """
        gpus, span = cluster.gpus_per_node, self.size * self.stride
        # Blocks of ``stride`` and of ``span`` neighbours must tile the nodes, or nodes the blocks.
        if self.size == 1 or all(gpus % block == 0 or block % gpus == 0 for block in (self.stride, span)):
            return
        raise ValueError(
            f"{self.size} {self.name} ranks at a distance of {self.stride} do not lie on nodes of {gpus} GPUs in equal "
            f"shares; choose degrees whose products divide {gpus} or are multiples of it"
        )


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
