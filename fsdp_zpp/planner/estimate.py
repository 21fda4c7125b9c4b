"""Figures of one row of a plan: what a strategy sends and keeps, and how long its step takes."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.config.topology import Topology

from .candidates import Candidate
from .config import GIB
from .memory import Memory
from .offload import HostWork
from .paste import line_of, line_of_torch
from .step_time import StepTime
from .volume import Volume


@dataclass(frozen=True)
class PartEstimate:
    """Figures of parameters that one strategy shards over the same ranks: dense ones, or experts.

    Attributes:
        strategy: The strategy. Its ``gpus_per_node`` counts those ranks of a node that it shards over.
        topology: The layout of the ranks that it shards over.
        volume: Bytes that one GPU sends for these parameters in an optimizer step.
        memory: Bytes of them on one GPU.
        host_work: With CPU offload, bytes of them that one GPU and its host move in an optimizer step.
    """

    strategy: Strategy
    topology: Topology
    volume: Volume
    memory: Memory
    host_work: HostWork = field(default_factory=HostWork)


@dataclass(frozen=True)
class Estimate:
    """Figures of one row: a strategy of this package, or one of torch's.

    Attributes:
        strategy: The strategy of all parameters, or of those beside experts. If each GPU counts as a node without being
            asked to, and there is a quantized base, ``gpus_per_node`` is None, so that the base is sharded over the
            machine. For a row of torch's, the strategy here that sends the same or, if that does not fit since it
            accumulates gradients in fp32, one that reduces each micro-batch.
        topology: The layout of the ranks that it shards over.
        volume: Bytes that one GPU sends in an optimizer step, out of its node (of the cluster) and inside it; those of
            exchanges are averaged over the steps.
        inter_node_bytes: Bytes that all GPUs of a node together send to other nodes in an optimizer step.
        memory: Bytes on one GPU.
        time: Seconds of an optimizer step.
        fits: Whether the memory suffices, that of the host, too.
        experts: What of ``volume`` and ``memory`` is for experts with ranks or a strategy of their own; None if there
            are no such experts.
        candidate: What the row is of.
    """

    strategy: Strategy
    topology: Topology
    volume: Volume
    inter_node_bytes: int
    memory: Memory
    time: StepTime
    fits: bool
    experts: PartEstimate | None = None
    candidate: Candidate | None = None

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
        """Return the row's name: of a preset or a strategy of torch's; letters, with the steps between exchanges."""
        if self.title is not None:
            return self.title
        local_steps = self.strategy.local_steps
        return self.levels if local_steps is None else f"{self.levels} every {local_steps.last_every}"

    @property
    def title(self) -> str | None:
        """Return the name of a preset or a strategy of torch's; None for a row that has letters alone."""
        return None if self.candidate is None else self.candidate.title

    @property
    def torch(self) -> str | None:
        """Return the name of torch's ``ShardingStrategy``; None for a strategy of this package."""
        return None if self.candidate is None else self.candidate.torch

    @property
    def paste(self) -> str:
        """Return a line of Python that makes the strategy, with its imports."""
        if self.torch is not None:
            return line_of_torch(self.torch)
        asked = None if self.candidate is None else self.candidate.strategy.gpus_per_node
        return line_of(self.strategy, gpus_per_node=asked)

    @property
    def gib(self) -> float:
        """Return the GiB on one GPU."""
        return self.memory.total / GIB
