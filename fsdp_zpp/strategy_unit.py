"""One group of parameters under a strategy: what gathers it, what reduces it, and what it has sent."""

from __future__ import annotations

from collections.abc import Callable

from .gradient_reduce import GradientReduce
from .hop import Traffic
from .strategy import Strategy
from .topology import ProcessMesh
from .weight_gather import WeightGather


class StrategyUnit:
    """A group of parameters that is gathered together and whose gradients are reduced together.

    Args:
        strategy: Its strategy.
        mesh: Its ranks.

    Attributes:
        traffic: What it has sent.
        gather: Gathers its weights; None where torch's own all-gather does just that.
        reduce: Reduces its gradients; None where torch's own reduce-scatter does just that.
        when_stale: Called with every :meth:`invalidate`, for what the adapter itself has to forget.
    """

    def __init__(self, strategy: Strategy, mesh: ProcessMesh) -> None:
        self.strategy = strategy
        self.mesh = mesh
        self.traffic = Traffic()
        self.gather: WeightGather | None = None
        self.reduce: GradientReduce | None = None
        self.when_stale: Callable[[], None] = lambda: None
        intra, inter = strategy.gradient_codecs
        if mesh.inter is not None or (mesh.intra is not None and strategy.weights is not None):
            self.gather = WeightGather(mesh, strategy.weights, strategy.parameters == "I", self.traffic)
        if mesh.inter is not None or (mesh.intra is not None and intra is not None):
            self.reduce = GradientReduce(mesh, intra, inter, self.traffic)

    def invalidate(self) -> None:
        """Declare the secondary shard, and what else is kept of the old weights, stale."""
        if self.gather is not None:
            self.gather.invalidate()
        self.when_stale()

    def rename(self, name: str) -> None:
        """Set the name in profiles and errors."""
        for part in (self.gather, self.reduce):
            if part is not None:
                part.label = name
