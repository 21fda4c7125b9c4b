"""The plan: all 14 strategies on one model and cluster, and the choice."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch

from ..at_work import at_work
from ..codecs import Codec
from ..error_feedback import LoCo
from ..strategy import LEGAL_LEVELS, Strategy
from ..weight_difference import Int4Delta
from .choice import Estimate, choose, reason
from .conditions import Budget, Cluster, Precision, Work
from .memory import memory_per_gpu
from .model_size import ModelSize, equal_units
from .notes import notes_on
from .step_time import step_time
from .volume import step_volume


@dataclass(frozen=True)
class Plan:
    """What :func:`plan` found.

    Attributes:
        size: The model.
        cluster: Where it trains.
        work: The work of a step.
        budget: The memory of a GPU.
        precision: The dtypes.
        estimates: All 14 strategies, in the order of ``LEGAL_LEVELS``.
        choice: The best that fits, or None if nothing does.
        reason: Why, in a sentence.
        notes: What to know when reading the figures.
    """

    size: ModelSize
    cluster: Cluster
    work: Work
    budget: Budget
    precision: Precision
    estimates: tuple[Estimate, ...]
    choice: Estimate | None
    reason: str
    notes: tuple[str, ...]

    def __getitem__(self, levels: str) -> Estimate:
        """The estimate of a strategy by its letters.

        Raises:
            KeyError: If they are not one of the 14.
        """
        for estimate in self.estimates:
            if estimate.levels == levels:
                return estimate
        raise KeyError(f"{levels!r}; there are {', '.join(LEGAL_LEVELS)}")

    @property
    def at_work(self) -> Strategy:
        """What the strategies encode on this cluster, with letters that go with any codec."""
        return at_work(self["IGG"].strategy, self.cluster.topology)

    def __str__(self) -> str:
        from .table import format_plan

        return format_plan(self)


def plan(
    params: float | ModelSize,
    *,
    trainable: float | None = None,
    units: int | None = None,
    nodes: int,
    gpus_per_node: int,
    inter_gbps: float | None = None,
    intra_gbps: float | None = None,
    micro_batches: int = 1,
    tokens: int | None = None,
    tflops: float | None = None,
    gpu_memory: float | None = None,
    activations: float = Budget.activations,
    reserve: float = Budget.reserve,
    weights: Codec | None = None,
    gradients: Codec | None = None,
    intra_gradients: Codec | Literal["auto"] | None = "auto",
    error_feedback: LoCo | None = None,
    frozen: Codec | None = None,
    compute: torch.dtype = Precision.compute,
    reduce: torch.dtype = Precision.reduce,
    storage: torch.dtype = Precision.storage,
    frozen_storage: torch.dtype | None = None,
    optimizer_bytes: int = Precision.optimizer_bytes,
) -> Plan:
    """Memory, traffic and step time of all 14 strategies, and the choice.

    Args:
        params: Parameters of the model, or its units (``fsdp_zpp.planner.model_size``).
        trainable: How many of them are trainable; None is all, or those of the units.
        units: Into how many FSDP units of equal size the parameters are wrapped; None is 32.
        nodes: Number of nodes.
        gpus_per_node: GPUs of each.
        inter_gbps: Gbit/s of a whole node to the others, all its network cards together.
        intra_gbps: Gbit/s of one GPU inside its node.
        micro_batches: Accumulated in an optimizer step.
        tokens: Of a GPU in a micro-batch. With ``tflops`` it gives the time of the computation, else that is left out.
        tflops: TFLOP/s that a GPU achieves.
        gpu_memory: GiB of a GPU (80 for an A100-80GB); None sets no limit.
        activations: GiB of them on a GPU.
        reserve: GiB of a GPU that no tensor can use.
        weights: As of :class:`Strategy`, like the next four.
        gradients: See there.
        intra_gradients: See there.
        error_feedback: See there.
        frozen: See there.
        compute: Dtype of forward and backward.
        reduce: Dtype of gradients on the wire without a codec.
        storage: Dtype of the shards that the optimizer updates.
        frozen_storage: Dtype of the shards of frozen weights; None is as ``storage``.
        optimizer_bytes: Optimizer state per trainable parameter; 8 is Adam.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If one is out of range, missing or contradicts another.

    Example:
        >>> print(plan(70e9, nodes=16, gpus_per_node=8, inter_gbps=100, intra_gbps=2400, gpu_memory=80))
    """
    cluster = Cluster(nodes, gpus_per_node, inter_gbps, intra_gbps)
    codecs = Strategy(
        "IGG",  # with which any codec goes
        weights=weights,
        gradients=gradients,
        intra_gradients=intra_gradients,
        error_feedback=error_feedback,
        frozen=frozen,
        gpus_per_node=cluster.gpus_per_node,
    )
    if frozen is not None and frozen_storage is not None:
        raise ValueError(
            f"frozen={frozen} keeps frozen weights as codes alone, so frozen_storage={frozen_storage} has no meaning"
        )
    return make_plan(
        _size_of(params, trainable, units),
        cluster,
        Work(micro_batches, tokens, tflops),
        Budget(gpu_memory, activations, reserve),
        Precision(compute, reduce, storage, frozen_storage, optimizer_bytes),
        codecs,
    )


def make_plan(
    size: ModelSize, cluster: Cluster, work: Work, budget: Budget, precision: Precision, codecs: Strategy
) -> Plan:
    """As :func:`plan`, from its parts; of ``codecs`` all but the letters counts."""
    strategies = (_with_levels(codecs, levels) for levels in LEGAL_LEVELS)
    estimates = tuple(_estimate(strategy, size, cluster, work, budget, precision) for strategy in strategies)
    choice = choose(estimates)
    return Plan(
        size,
        cluster,
        work,
        budget,
        precision,
        estimates,
        choice,
        reason(estimates, choice, budget),
        notes_on(size, cluster, work, budget, codecs),
    )


def _with_levels(codecs: Strategy, levels: str) -> Strategy:
    """``codecs`` under other letters; where no secondary shard is kept, differences of weights are whole weights."""
    weights, keeps_secondary = codecs.weights, Strategy(levels).keeps_secondary
    if isinstance(weights, Int4Delta) and not keeps_secondary:
        weights = weights.resident
    return dataclasses.replace(codecs, levels=levels, weights=weights)


def _size_of(params: float | ModelSize, trainable: float | None, units: int | None) -> ModelSize:
    if not isinstance(params, ModelSize):
        return equal_units(params, trainable, units)
    if units is not None:
        raise ValueError(f"units={units} was given, but the model has its own {params.count}")
    return params if trainable is None else params.with_trainable(trainable)


def _estimate(
    strategy: Strategy, size: ModelSize, cluster: Cluster, work: Work, budget: Budget, precision: Precision
) -> Estimate:
    topology = cluster.topology
    volume = step_volume(size, strategy, topology, work.micro_batches, precision)
    memory = memory_per_gpu(size, strategy, topology, work.micro_batches, precision, budget)
    return Estimate(
        strategy=strategy,
        topology=topology,
        volume=volume,
        inter_node_bytes=cluster.gpus_per_node * volume.inter,
        memory=memory,
        time=step_time(volume, size, cluster, work),
        fits=budget.allows(memory.total),
    )
