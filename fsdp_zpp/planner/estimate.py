"""Predicted cost of a strategy, and the best one that fits.

Time is PaRO's (section 3): T = max(t_comm, t_comp).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_zpp.config.local_steps import LocalSteps
from fsdp_zpp.config.resolve import Scopes, resolve_scopes
from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.config.topology import Topology

from .axes import Axes
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
        exchange: Time of the exchanges of local steps, averaged over the steps; not included in ``inter`` and
            ``intra``.
        wait: The part of ``exchange`` for which training waits.
    """

    inter: float
    intra: float
    computation: float
    exchange: float = 0.0
    wait: float = 0.0

    @property
    def communication(self) -> float:
        """Return the time of all hops, their sum: they use different links, but each waits for the other's result."""
        return self.inter + self.intra + self.exchange

    @property
    def total(self) -> float:
        """Return the step's time: communication except exchanges overlaps fully with computation; waits are added."""
        return max(self.inter + self.intra, self.computation) + self.wait


def step_time(volume: Volume, size: ModelSize, cluster: Cluster, work: StepConfig, axes: Axes) -> StepTime:
    """Return the time that ``volume`` and the computation take.

    The GPUs of a node share its network, which therefore sends gpus_per_node * volume.inter bytes at inter_gbps. Tensor
    parallelism and a pipeline divide the computation; bubbles of the pipeline are left out.
    """
    return StepTime(
        inter=_seconds(cluster.gpus_per_node * volume.inter, cluster.inter_gbps),
        intra=_seconds(volume.intra, cluster.intra_gbps),
        computation=_computation(size, work) / (axes.tp * axes.pp),
    )


def with_exchanges(
    step: StepTime, exchange: Volume, fragments: int, cluster: Cluster, local_steps: LocalSteps
) -> StepTime:
    """Return the average time of local steps and their exchanges.

    Training waits for an exchange, less the ``overlap`` steps that it may take to arrive. Without an overlap, the
    average wait is the same whether fragments are spread or exchanged at once. Training always waits for the node's
    ranks to put their parts together afterwards.

    This assumes that all fragments have the same size and all steps take the same time, that spread fragments are due
    at equal intervals, and that those on their way take turns on the network between nodes, which the steps leave idle.
    It leaves out encoding, the outer optimizer, and copies from and to the CPU under ``offload``.

    Args:
        step: The time of a step inside a node.
        exchange: Bytes that one rank sends when each fragment is exchanged once.
        fragments: Number of fragments.
        cluster: The cluster.
        local_steps: When fragments are exchanged.
    """
    every = local_steps.every
    between = _seconds(cluster.gpus_per_node * exchange.inter, cluster.inter_gbps) / every
    inside = _seconds(exchange.intra, cluster.intra_gbps) / every
    starts = min(fragments, every) if local_steps.spread else 1
    # The share of all steps during which an exchange is on its way.
    hiding = min(1.0, local_steps.overlap * starts / every)
    wait = max(0.0, between - hiding * step.total) + inside
    return dataclasses.replace(step, exchange=between + inside, wait=wait)


def _seconds(nbytes: int, gbps: float | None) -> float:
    return 0.0 if gbps is None else nbytes * 8 / (gbps * 1e9)


def _computation(size: ModelSize, work: StepConfig) -> float:
    """Return the seconds of forward and backward.

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
class PartEstimate:
    """Figures of parameters that one strategy shards over the same ranks: dense ones, or experts.

    Attributes:
        strategy: The strategy. Its ``gpus_per_node`` counts those ranks of a node that it shards over.
        topology: The layout of the ranks that it shards over.
        volume: Bytes that one GPU sends for these parameters in an optimizer step.
        memory: Bytes of them on one GPU.
    """

    strategy: Strategy
    topology: Topology
    volume: Volume
    memory: Memory


@dataclass(frozen=True)
class Estimate:
    """Figures of one strategy.

    Attributes:
        strategy: The strategy of all parameters, or of those beside experts.
        topology: The layout of the ranks that it shards over.
        volume: Bytes that one GPU sends in an optimizer step, those of exchanges averaged over the steps.
        inter_node_bytes: Bytes that all GPUs of a node together send to other nodes in an optimizer step.
        memory: Bytes on one GPU.
        time: Seconds of an optimizer step.
        fits: Whether the memory suffices.
        experts: What of ``volume`` and ``memory`` is for experts with ranks or a strategy of their own; None if there
            are no such experts.
    """

    strategy: Strategy
    topology: Topology
    volume: Volume
    inter_node_bytes: int
    memory: Memory
    time: StepTime
    fits: bool
    experts: PartEstimate | None = None

    @property
    def dense_volume(self) -> Volume:
        """Return the part of ``volume`` that is not for ``experts``."""
        if self.experts is None:
            return self.volume
        experts = self.experts.volume
        return Volume(self.volume.inter - experts.inter, self.volume.intra - experts.intra)

    @property
    def levels(self) -> str:
        """Return the three scopes as letters."""
        return self.strategy.levels

    @property
    def name(self) -> str:
        """Return the letters, and the steps between exchanges if nodes step on their own: ``III every 64``."""
        local_steps = self.strategy.local_steps
        return self.levels if local_steps is None else f"{self.levels} every {local_steps.every}"


def choose(estimates: Sequence[Estimate]) -> Estimate | None:
    """Return the fastest that fits, or of equally fast ones the one with the least memory; None if nothing fits.

    Source of the rule: PaRO, section 3.4. Local steps change the mathematics, so they are chosen only if the fastest
    with them beats the fastest without.
    """
    fitting = [estimate for estimate in estimates if estimate.fits]
    if not fitting:
        return None
    in_step, local = _by_mathematics(fitting)
    gains = all(estimate.strategy.local_steps is not None for estimate in _least(fitting))
    # Where letters coincide, the usual name wins: False sorts before True.
    return min(
        _least(local if gains else in_step),
        key=lambda estimate: (estimate.memory.total, _goes_by_another_name(estimate)),
    )


def _by_mathematics(estimates: Sequence[Estimate]) -> tuple[list[Estimate], list[Estimate]]:
    """Return the estimates without local steps, and those with them."""
    in_step = [estimate for estimate in estimates if estimate.strategy.local_steps is None]
    return in_step, [estimate for estimate in estimates if estimate.strategy.local_steps is not None]


def _goes_by_another_name(estimate: Estimate) -> bool:
    """Return whether other letters mean the same on this topology: on one node, I is G."""
    return "".join(resolve_scopes(Scopes(*estimate.levels), estimate.topology)) != estimate.levels


def _least(estimates: list[Estimate]) -> list[Estimate]:
    """Return the estimates with the least step time, within :data:`TOLERANCE`."""
    bound = min(estimate.time.total for estimate in estimates) * (1 + TOLERANCE)
    return [estimate for estimate in estimates if estimate.time.total <= bound]


def reason(estimates: Sequence[Estimate], choice: Estimate | None, budget: MemoryBudget) -> str:
    """Say in one sentence why ``choice`` is the choice, or why there is none."""
    if choice is None:
        smallest = min(estimates, key=lambda estimate: estimate.memory.total)
        return (
            f"Nothing fits in {budget.gpu_memory:g} GiB a GPU: the smallest, {smallest.name}, takes {_gib(smallest)}."
        )
    fitting = [estimate for estimate in estimates if estimate.fits]
    in_step, local = _by_mathematics(fitting)
    alike = in_step if choice.strategy.local_steps is None else local
    larger = [e.name for e in _least(alike) if e.memory.total > choice.memory.total]
    among = f"all {len(estimates)}" if len(fitting) == len(estimates) else f"the {len(fitting)} that fit"
    if len(fitting) == 1:
        takes = f"with {_gib(choice)} of {budget.gpu_memory:g} GiB a GPU"
        return f"{choice.name} is the only one that fits, {takes}{_on_mathematics(choice, in_step, local)}."
    is_fastest = choice in _least(fitting)
    place = f"the fastest of {among}" if is_fastest else f"the choice of {among}"
    sentence = f"{choice.name} is {place}, at {seconds(choice.time.total)} a step"
    if choice.time.computation > choice.time.communication and not choice.time.wait:
        sentence += ", where computation hides its communication"
    if larger:
        sentence += f", and takes less memory than {_listed(larger)}, as fast within {TOLERANCE:.0%}"
    sentence += _on_mathematics(choice, in_step, local)
    if choice.levels != "GGG":  # FSDP's default, with which a reader compares
        full_shard = next(estimate for estimate in estimates if estimate.levels == "GGG")
        sentence += f" (GGG: {seconds(full_shard.time.total)})"
    return sentence + "."


def _on_mathematics(choice: Estimate, in_step: list[Estimate], local: list[Estimate]) -> str:
    """Say how the choice compares with those that fit on the other side of local steps."""
    others = in_step if choice in local else local
    fastest = min(others, key=lambda estimate: estimate.time.total, default=None)
    if choice in local:
        if fastest is None:
            return "; it changes the mathematics, and without that nothing fits"
        figures = f"{fastest.name} is the fastest, at {seconds(fastest.time.total)}"
        return f"; it changes the mathematics, and of those that do not, {figures}"
    if fastest is None or fastest.time.total >= choice.time.total:
        return ""
    return f"; {fastest.name} takes {seconds(fastest.time.total)}, too small a gain to change the mathematics for"


def seconds(value: float) -> str:
    """Return a time as text, in seconds or milliseconds."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _gib(estimate: Estimate) -> str:
    return f"{estimate.memory.total / GIB:.1f} GiB"


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
