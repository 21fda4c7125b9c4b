"""Predicted time of an optimizer step (PaRO, section 3: T = max(t_comm, t_comp))."""

from __future__ import annotations

from dataclasses import dataclass

from .conditions import Cluster, Work
from .model_size import ModelSize
from .volume import Volume


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        inter: On the network between nodes.
        intra: On the network inside a node.
        computation: Of forward and backward; 0 if the plan was not told about it.
    """

    inter: float
    intra: float
    computation: float

    @property
    def communication(self) -> float:
        """Of both hops: they take different links, but each waits for the other's result."""
        return self.inter + self.intra

    @property
    def total(self) -> float:
        """Of the step, communication and computation overlapping fully."""
        return max(self.communication, self.computation)


def step_time(volume: Volume, size: ModelSize, cluster: Cluster, work: Work) -> StepTime:
    """The time that ``volume`` and the computation take.

    The GPUs of a node share its network, so that takes gpus_per_node * volume.inter bytes at inter_gbps.
    """
    return StepTime(
        inter=_seconds(cluster.gpus_per_node * volume.inter, cluster.inter_gbps),
        intra=_seconds(volume.intra, cluster.intra_gbps),
        computation=_computation(size, work),
    )


def _seconds(nbytes: int, gbps: float | None) -> float:
    return 0.0 if gbps is None else nbytes * 8 / (gbps * 1e9)


def _computation(size: ModelSize, work: Work) -> float:
    """2 FLOPs a parameter and token each for the output, its input's gradient, and, if trainable, its weight's.

    Of a mixture of experts, a token computes with those that it is routed to.
    """
    if work.tokens is None or work.tflops is None:
        return 0.0
    flops = (6 * size.active_trainable + 4 * size.active_frozen) * work.tokens * work.micro_batches
    return flops / (work.tflops * 1e12)
