"""One group of parameters under a strategy: what gathers it, what reduces it, and what it has sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .at_work import at_work
from .error_feedback import senders
from .gradient_reduce import GradientReduce
from .hop import Traffic
from .strategy import Strategy
from .topology import ProcessMesh, Topology
from .unit_errors import UnitErrors
from .weight_gather import WeightGather


class Levels(NamedTuple):
    """A strategy's letters."""

    parameters: str
    gradients: str
    optimizer: str


class StrategyUnit:
    """A group of parameters that is gathered together and whose gradients are reduced together.

    Args:
        strategy: Its strategy. What of it does nothing on the mesh is left off; see [Note: One node] in at_work.py.
        mesh: Its ranks.

    Attributes:
        levels: The strategy's letters as they work out on the mesh.
        traffic: What it has sent.
        gather: Gathers its weights; None where torch's own all-gather does just that, or nothing is to be gathered.
        keep_unsharded: Whether the weights stay gathered until they change.
        reduce: Reduces its gradients; None where there is one rank.
        when_stale: Called with every :meth:`invalidate`, for what the adapter itself has to forget.
        when_cleared: Called with every :meth:`discard_gradients`, likewise.
    """

    def __init__(self, strategy: Strategy, mesh: ProcessMesh) -> None:
        self.strategy = strategy
        self.mesh = mesh
        self._at_work = at_work(strategy, mesh.topology)
        self.levels = levels_on(strategy, mesh.topology)
        self.traffic = Traffic()
        self.when_stale: Callable[[], None] = lambda: None
        self.when_cleared: Callable[[], None] = lambda: None
        self.gather = self._make_gather()
        self.keep_unsharded = self.gather is not None and self.levels.parameters == "N"
        self.reduce = self._make_reduce()

    def _make_gather(self) -> WeightGather | None:
        if self.levels.optimizer == "N":
            return None
        within_node = self.levels.optimizer == "I"
        mesh = self.mesh.own_node() if within_node else self.mesh
        ours_on_one_level = self._at_work.weights is not None or self.levels.parameters == "N" or within_node
        if mesh.inter is None and not (mesh.intra is not None and ours_on_one_level):
            return None
        return WeightGather(mesh, self._at_work.weights, self.levels.parameters == "I", self.traffic)

    def _make_reduce(self) -> GradientReduce | None:
        intra, inter = self._at_work.gradient_codecs
        if self.mesh.intra is None and self.mesh.inter is None:
            return None
        return GradientReduce(
            self.mesh,
            intra,
            inter,
            self.traffic,
            accumulate=self.levels.gradients,
            keep=self.levels.optimizer,
            error_feedback=self._at_work.error_feedback,
            native=True,
        )

    @property
    def keeps_first_hop(self) -> bool:
        """Whether weights go between nodes once after a change, and what is left of that is kept in some form."""
        return self.gather is not None and self.gather.has_first_hop and self.levels.parameters != "G"

    def invalidate(self, *, by_step: bool = False) -> None:
        """Declare the secondary shard, and what else is kept of the old weights, stale; see :class:`WeightGather`."""
        if self.gather is not None:
            self.gather.invalidate(by_step=by_step)
        self.when_stale()

    def discard_gradients(self) -> None:
        """Forget the gradients of micro-batches that wait for the last one of their step."""
        if self.reduce is not None:
            self.reduce.discard()
        self.when_cleared()

    @property
    def errors(self) -> UnitErrors | None:
        """What feeds the errors of gradient codecs back, if the strategy does."""
        return None if self.reduce is None else self.reduce.errors

    def rename(self, name: str) -> None:
        """Set the name in profiles and errors."""
        for part in (self.gather, self.reduce):
            if part is not None:
                part.label = name


def levels_on(strategy: Strategy, topology: Topology) -> Levels:
    """A strategy's letters as they work out on ``topology``: a level of the network that isn't there shards nothing.

    On one node, inside of it is everywhere. On nodes of one GPU, inside of a node is on one rank, where a state can't
    be sharded; but a secondary shard (parameters ``I`` beside a ``G``) is there the whole, still encoded, as no ``N``
    is.

    Error feedback is to see the sum of all micro-batches, so they wait for the last one before the first hop that has
    it: on the rank or in the node, if the gradient letter does not say so anyway.
    """
    levels = strategy.levels
    on = Levels(*levels)
    if topology.nodes == 1:
        on = Levels(*levels.replace("I", "G"))
    elif topology.gpus_per_node == 1:
        on = Levels(*levels.replace("I", "N"))
        on = on._replace(parameters="I") if levels[0] == "I" and levels[2] == "G" else on
    working = at_work(strategy, topology)
    fed_back = senders(working.error_feedback, working.gradient_codecs, on.optimizer, topology, 0)
    if "intra" in fed_back or ("inter" in fed_back and topology.gpus_per_node == 1):
        return on._replace(gradients="N")
    if "inter" in fed_back and on.gradients == "G":
        return on._replace(gradients="I")
    return on
