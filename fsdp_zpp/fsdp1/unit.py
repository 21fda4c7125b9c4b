"""What gathers and reduces one FullyShardedDataParallel instance."""

from __future__ import annotations

from ..gradient_reduce import GradientReduce
from ..hop import Traffic
from ..strategy import Strategy
from ..topology import ProcessMesh
from ..weight_gather import WeightGather
from ._torch import StrategyHandle


class StrategyUnit:
    """An FSDP instance under a strategy.

    Attributes:
        strategy: Its strategy.
        mesh: Its ranks.
        traffic: What it has sent.
        gather: Gathers its weights; None where torch's own all-gather does just that.
        handle: Its flat parameter's handle, if ``gather`` has one to gather for.
        reduce: Reduces its gradients; None where torch's own reduce-scatter does just that.
    """

    def __init__(self, strategy: Strategy, mesh: ProcessMesh) -> None:
        self.strategy = strategy
        self.mesh = mesh
        self.traffic = Traffic()
        self.gather: WeightGather | None = None
        self.handle: StrategyHandle | None = None
        self.reduce: GradientReduce | None = None
        intra, inter = strategy.gradient_codecs
        if mesh.inter is not None or (mesh.intra is not None and strategy.weights is not None):
            self.gather = WeightGather(mesh, strategy.weights, strategy.parameters == "I", self.traffic)
        if mesh.inter is not None or (mesh.intra is not None and intra is not None):
            self.reduce = GradientReduce(mesh, intra, inter, self.traffic)

    def invalidate(self) -> None:
        """Declare the secondary shard, and what is still unsharded of it, stale."""
        if self.gather is not None:
            self.gather.invalidate()
        if self.handle is not None:
            self.handle.drop_unsharded()

    def rename(self, name: str) -> None:
        """Set the name in profiles and errors."""
        for part in (self.gather, self.reduce):
            if part is not None:
                part.label = name


class HookedUnit:
    """An FSDP instance of a stock strategy with a :class:`QuantizedReduceState`, which counts its traffic."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic

    def invalidate(self) -> None:
        """Stock FSDP keeps no secondary shard."""
