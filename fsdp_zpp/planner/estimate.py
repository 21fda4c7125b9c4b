"""The predicted cost of a strategy, and the best one that fits.

Time is PaRO's (section 3): T = max(t_comm, t_comp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_zpp.config.resolve import Scopes, resolve_scopes
from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.config.topology import Topology

from .config import GIB, Cluster, MemoryBudget, StepConfig
from .memory import Memory
from .model_size import ModelSize
from .volume import Volume


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        inter: Time on the network between nodes.
        intra: Time on the network inside a node.
        computation: Time of forward and backward; 0 if ``tokens`` and ``tflops`` were not given.
    """

    inter: float
    intra: float
    computation: float

    @property
    def communication(self) -> float:
        """Time of both hops. Their sum: they use different links, but each waits for the other's result."""
        return self.inter + self.intra

    @property
    def total(self) -> float:
        """Time of the step, with communication and computation overlapping fully."""
        return max(self.communication, self.computation)


def step_time(volume: Volume, size: ModelSize, cluster: Cluster, work: StepConfig) -> StepTime:
    """The time that ``volume`` and the computation take.

    The GPUs of a node share its network, which therefore sends gpus_per_node * volume.inter bytes at inter_gbps.
    """
    return StepTime(
        inter=_seconds(cluster.gpus_per_node * volume.inter, cluster.inter_gbps),
        intra=_seconds(volume.intra, cluster.intra_gbps),
        computation=_computation(size, work),
    )


def _seconds(nbytes: int, gbps: float | None) -> float:
    return 0.0 if gbps is None else nbytes * 8 / (gbps * 1e9)


def _computation(size: ModelSize, work: StepConfig) -> float:
    """Seconds of forward and backward.

    Per parameter and token they take 2 FLOPs for the output, 2 for the gradient of the input and, if the parameter is
    trainable, 2 for its own gradient. In a mixture of experts, only the experts that a token is routed to count.
    """
    if work.tokens is None or work.tflops is None:
        return 0.0
    flops = (6 * size.active_trainable + 4 * size.active_frozen) * work.tokens * work.micro_batches
    return flops / (work.tflops * 1e12)


TOLERANCE = 0.01
"""Times within this fraction of the least count as equal: predictions are no better, and memory is worth more."""


@dataclass(frozen=True)
class Estimate:
    """The figures of one strategy.

    Attributes:
        strategy: The strategy.
        topology: The layout of the ranks.
        volume: Bytes that one GPU sends in an optimizer step.
        inter_node_bytes: Bytes that all GPUs of a node together send to other nodes in an optimizer step.
        memory: Bytes on one GPU.
        time: Seconds of an optimizer step.
        fits: Whether the memory suffices.
    """

    strategy: Strategy
    topology: Topology
    volume: Volume
    inter_node_bytes: int
    memory: Memory
    time: StepTime
    fits: bool

    @property
    def levels(self) -> str:
        """The three scopes as letters."""
        return self.strategy.levels


def choose(estimates: Sequence[Estimate]) -> Estimate | None:
    """The fastest that fits, or None if nothing fits; among equally fast ones, that with the least memory.

    Source of the rule: PaRO, section 3.4.
    """
    fitting = [estimate for estimate in estimates if estimate.fits]
    if not fitting:
        return None
    # Where letters coincide, the usual name wins: False sorts before True.
    return min(_least(fitting), key=lambda estimate: (estimate.memory.total, _goes_by_another_name(estimate)))


def _goes_by_another_name(estimate: Estimate) -> bool:
    """Whether other letters mean the same on this topology: on one node, I is G."""
    return "".join(resolve_scopes(Scopes(*estimate.levels), estimate.topology)) != estimate.levels


def _least(estimates: list[Estimate]) -> list[Estimate]:
    """The estimates with the least step time, within :data:`TOLERANCE`."""
    bound = min(estimate.time.total for estimate in estimates) * (1 + TOLERANCE)
    return [estimate for estimate in estimates if estimate.time.total <= bound]


def reason(estimates: Sequence[Estimate], choice: Estimate | None, budget: MemoryBudget) -> str:
    """One sentence that says why ``choice`` is the choice, or why there is none."""
    if choice is None:
        smallest = min(estimates, key=lambda estimate: estimate.memory.total)
        return (
            f"Nothing fits in {budget.gpu_memory:g} GiB a GPU: the smallest, {smallest.levels}, takes {_gib(smallest)}."
        )
    fitting = [estimate for estimate in estimates if estimate.fits]
    larger = [e.levels for e in _least(fitting) if e.memory.total > choice.memory.total]
    among = "all 14" if len(fitting) == len(estimates) else f"the {len(fitting)} that fit"
    if len(fitting) == 1:
        return f"{choice.levels} is the only one that fits, with {_gib(choice)} of {budget.gpu_memory:g} GiB a GPU."
    sentence = f"{choice.levels} is the fastest of {among}, at {seconds(choice.time.total)} a step"
    if choice.time.computation > choice.time.communication:
        sentence += ", where computation hides its communication"
    if larger:
        sentence += f", and takes less memory than {_listed(larger)}, as fast within {TOLERANCE:.0%}"
    if choice.levels != "GGG":  # FSDP's default, so that is what a reader compares with
        full_shard = next(estimate for estimate in estimates if estimate.levels == "GGG")
        sentence += f" (GGG: {seconds(full_shard.time.total)})"
    return sentence + "."


def seconds(value: float) -> str:
    """A time as text, in seconds or milliseconds."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _gib(estimate: Estimate) -> str:
    return f"{estimate.memory.total / GIB:.1f} GiB"


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
