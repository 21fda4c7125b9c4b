"""Predicted time of a step: communication, computation, and the time in which the CPU launches them.

The rule is PaRO's (section 3), T = max(t_comm, t_comp), with the CPU's time as a third: the longest hides the others.
Computation takes 6 FLOPs for each trainable parameter and token, and 4 for each frozen one. Recomputation, the
optimizer, and the share of attention that grows with the sequence are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_zpp.strategy.error_feedback import Topology
from fsdp_zpp.strategy.strategy import ResolvedStrategy, Strategy

from .cluster import Cluster
from .memory import Volume
from .model_size import Case

# ---- node size
#
# The ranks that count as a node, and the links that a hop uses, if links inside a machine are slow.
#
# Training follows the same rule, [Note: Links] in strategy/strategy.py. On several machines with slow links, the
# planner compares two node sizes: a machine, and one GPU. A hop between nodes of one GPU uses two kinds of links:
# those inside the machine, and those out of it.


def strategy_topology(strategy: Strategy, cluster: Cluster) -> Topology:
    """Return the layout of ranks in the strategy's nodes, which may be parts of the cluster's nodes (machines)."""
    gpus = 1 if splits_machine(strategy, cluster) else strategy.gpus_per_node or cluster.gpus_per_node
    return Topology(cluster.topology.world, gpus)


def splits_machine(strategy: Strategy, cluster: Cluster) -> bool:
    """Return whether each GPU of a single machine counts as a node, though the strategy does not say so."""
    alone = cluster.slow_links and cluster.nodes == 1 and cluster.gpus_per_node > 1
    return alone and strategy.gpus_per_node is None and strategy.follows_links


def on_machines(hops: Volume, seen: Topology, ranks: Topology) -> Volume:
    """Return the bytes that leave a rank's machine (``inter``), and those that do not (``intra``).

    ``hops`` counts them by the strategy's nodes (``seen``). A machine (a node of ``ranks``) has one or more of these.
    """
    if seen.nodes == 1 or seen == ranks:
        return hops
    # A hop between nodes sends to one rank of every other node, and equally much to each.
    beside = ranks.gpus_per_node // seen.gpus_per_node - 1
    inside = hops.inter * beside // (seen.nodes - 1)
    return Volume(hops.inter - inside, hops.intra + inside)


# ---- step time

OF_CODECS = 0.08
"""Share by which codecs lengthen a unit's launch. Over NVLink, where only launches differ, a step with zeropp takes
1.06 (FSDP) to 1.14 (FSDP2) times that of FULL_SHARD (1.35B-2x1-fast in benchmarks/step/results/1.35B-h200.json)."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Args:
        inter: Time on the network between nodes.
        intra: Time on the network inside a node.
        computation: Time of forward and backward; 0 if ``tokens`` and ``tflops`` were not given.
        launch: Time in which the CPU launches all units; 0 if no GPU was named.
    """

    inter: float
    intra: float
    computation: float
    launch: float = 0.0

    @property
    def communication(self) -> float:
        """Return the sum of both hops' times, since each waits for the other's result."""
        return self.inter + self.intra

    @property
    def total(self) -> float:
        """Return the time of the step, in which communication, computation and launches overlap fully."""
        return max(self.communication, self.computation, self.launch)


def step_time(volume: Volume, resolved: ResolvedStrategy, case: Case) -> StepTime:
    """Return the time that ``volume``, the computation and its launch take.

    The GPUs of a node share its network, which therefore sends gpus_per_node * volume.inter bytes at inter_gbps.
    """
    cluster = case.cluster
    # A quantized base leaves few weights to encode in a step, so codecs do not lengthen its launches.
    encodes = resolved.frozen is None and (resolved.weights, *resolved.gradient_codecs) != (None, None, None)
    launches = case.size.count * case.work.micro_batches
    return StepTime(
        inter=_seconds(cluster.gpus_per_node * volume.inter, cluster.inter_gbps),
        intra=_seconds(volume.intra, cluster.intra_gbps),
        computation=_computation(case),
        launch=case.work.launch_ms / 1e3 * launches * (1 + OF_CODECS * encodes),
    )


def _seconds(nbytes: int, gbps: float | None) -> float:
    return 0.0 if gbps is None else nbytes * 8 / (gbps * 1e9)


def _computation(case: Case) -> float:
    """Return the seconds of forward and backward.

    A parameter takes, per token, 2 FLOPs for the output, 2 for the gradient of the input and, if it is trainable,
    2 for its own gradient. In a mixture of experts, only the experts that a token is routed to count.
    """
    size, work = case.size, case.work
    if work.tokens is None or work.tflops is None:
        return 0.0
    flops = (6 * size.active_trainable + 4 * size.active_frozen) * work.tokens * work.micro_batches
    return flops / (work.tflops * 1e12)
