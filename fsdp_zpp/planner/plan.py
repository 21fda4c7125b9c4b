"""``plan``: the figures of all 14 strategies, and of local steps, for one model and cluster, and the choice."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.codecs.delta import Int4Delta
from fsdp_zpp.config.error_feedback import LoCo, error_buffer_specs
from fsdp_zpp.config.levels import LEGAL_LEVELS
from fsdp_zpp.config.local_steps import LocalSteps
from fsdp_zpp.config.strategy import Strategy

from .config import Cluster, MemoryBudget, Precision, StepConfig
from .estimate import Estimate, choose, reason, step_time, with_exchanges
from .exchange import exchange_memory, exchange_volume, fragment_count, per_step
from .memory import memory_per_gpu
from .model_size import ModelSize, equal_units
from .report import Plan
from .volume import step_volume


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
    activations: float = MemoryBudget.activations,
    reserve: float = MemoryBudget.reserve,
    weights: Codec | None = None,
    gradients: Codec | None = None,
    intra_gradients: Codec | Literal["auto"] | None = "auto",
    error_feedback: LoCo | None = None,
    frozen: Codec | None = None,
    local_steps: LocalSteps | None = None,
    compute: torch.dtype = Precision.compute,
    reduce: torch.dtype = Precision.reduce,
    storage: torch.dtype = Precision.storage,
    frozen_storage: torch.dtype | None = None,
    optimizer_bytes: int = Precision.optimizer_bytes,
) -> Plan:
    """Predict memory, traffic and step time of all 14 strategies, and choose one.

    Args:
        params: Number of parameters of the model, or its units (``fsdp_zpp.planner.model_size``).
        trainable: Number of trainable parameters; None means all, or those of the units.
        units: Number of equal FSDP units that the parameters are wrapped in; None means 32.
        nodes: Number of nodes.
        gpus_per_node: GPUs of each node.
        inter_gbps: Gbit/s of a whole node to the others, all its network cards together.
        intra_gbps: Gbit/s of one GPU to the others of its node.
        micro_batches: Number of micro-batches that an optimizer step accumulates.
        tokens: Number of tokens on a GPU in a micro-batch. Computation time needs this and ``tflops``; without both it
            is left out.
        tflops: TFLOP/s that a GPU achieves.
        gpu_memory: GiB of a GPU (80 for an A100-80GB); None sets no limit.
        activations: GiB of activations on a GPU.
        reserve: GiB of a GPU that no tensor can use.
        weights: As in ``Strategy``.
        gradients: As in ``Strategy``.
        intra_gradients: As in ``Strategy``.
        error_feedback: As in ``Strategy``.
        frozen: As in ``Strategy``.
        local_steps: Adds strategies with these local steps, for each of the letters that can have them. They change
            the mathematics, so the choice is one of them only where it saves time.
        compute: Dtype of forward and backward.
        reduce: Dtype of gradients on the wire without a codec.
        storage: Dtype of the shards that the optimizer updates.
        frozen_storage: Dtype of the shards of frozen weights; None takes ``storage``.
        optimizer_bytes: Bytes of optimizer state per trainable parameter; 8 is Adam.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, missing or contradicts another.

    Examples:
        >>> print(plan(70e9, nodes=16, gpus_per_node=8, inter_gbps=100, intra_gbps=2400, gpu_memory=80))
    """
    cluster = Cluster(nodes, gpus_per_node, inter_gbps, intra_gbps)
    codecs = Strategy(
        "IGG",  # which takes any codec, Int4Delta included
        weights=weights,
        gradients=gradients,
        intra_gradients=intra_gradients,
        error_feedback=error_feedback,
        frozen=frozen,
        gpus_per_node=cluster.gpus_per_node,
    )
    if frozen is not None and frozen_storage is not None:
        raise ValueError(
            f"frozen={frozen} keeps frozen weights as codes only, so frozen_storage={frozen_storage} has no meaning; "
            "remove one of the two"
        )
    return make_plan(
        _size_of(params, trainable, units),
        cluster,
        StepConfig(micro_batches, tokens, tflops),
        MemoryBudget(gpu_memory, activations, reserve),
        Precision(compute, reduce, storage, frozen_storage, optimizer_bytes),
        codecs,
        local_steps,
    )


def make_plan(
    size: ModelSize,
    cluster: Cluster,
    work: StepConfig,
    budget: MemoryBudget,
    precision: Precision,
    codecs: Strategy,
    local_steps: LocalSteps | None = None,
) -> Plan:
    """Return the plan of parts that are checked already. The letters of ``codecs`` do not matter."""
    strategies = [_with_levels(codecs, levels) for levels in LEGAL_LEVELS]
    if local_steps is not None:
        local = [_with_local_steps(each, local_steps) for each in strategies if each.optimizer != "G"]
        strategies += local if cluster.nodes > 1 else []
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
        (*notes_on(size, cluster, work, budget, codecs), *_notes_on_local_steps(cluster, codecs, local_steps)),
        local_steps if cluster.nodes > 1 else None,
    )


def _with_levels(codecs: Strategy, levels: str) -> Strategy:
    """Replace the letters of ``codecs``. Letters that keep no secondary shard send weights whole, not as deltas."""
    weights, keeps_secondary = codecs.weights, Strategy(levels).keeps_secondary
    if isinstance(weights, Int4Delta) and not keeps_secondary:
        weights = weights.whole
    return dataclasses.replace(codecs, levels=levels, weights=weights)


def _with_local_steps(strategy: Strategy, local_steps: LocalSteps) -> Strategy:
    """Add local steps to ``strategy``, without codecs that have no effect with them; see :class:`Strategy`."""
    feedback = strategy.error_feedback
    if feedback is not None and (feedback.hops == "inter" or not isinstance(strategy.intra_gradients, Codec)):
        feedback = None
    return dataclasses.replace(strategy, gradients=None, error_feedback=feedback, local_steps=local_steps)


def _size_of(params: float | ModelSize, trainable: float | None, units: int | None) -> ModelSize:
    if not isinstance(params, ModelSize):
        return equal_units(params, trainable, units)
    if units is not None:
        raise ValueError(f"units={units} was given, but the model has its own {params.count} units; leave units out")
    return params if trainable is None else params.with_trainable(trainable)


def _estimate(
    strategy: Strategy, size: ModelSize, cluster: Cluster, work: StepConfig, budget: MemoryBudget, precision: Precision
) -> Estimate:
    resolved, local_steps = strategy.resolve(cluster.topology), strategy.local_steps
    in_step = resolved if local_steps is None else resolved.within_node()
    volume = step_volume(size, in_step, work.micro_batches, precision)
    memory = memory_per_gpu(size, in_step, work.micro_batches, precision, budget)
    time = step_time(volume, size, cluster, work)
    if local_steps is not None:
        exchange = exchange_volume(size, resolved, local_steps, precision)
        time = with_exchanges(time, exchange, fragment_count(size), cluster, local_steps)
        volume += per_step(exchange, local_steps)
        memory += exchange_memory(size, resolved, local_steps, precision)
    return Estimate(
        strategy=strategy,
        topology=cluster.topology,
        volume=volume,
        inter_node_bytes=cluster.gpus_per_node * volume.inter,
        memory=memory,
        time=time,
        fits=budget.allows(memory.total),
    )


def notes_on(
    size: ModelSize, cluster: Cluster, work: StepConfig, budget: MemoryBudget, codecs: Strategy
) -> tuple[str, ...]:
    """Return notes on a plan, one sentence each."""
    notes = [
        f"Activations are assumed to take {budget.activations:g} GiB a GPU, and {budget.reserve:g} GiB are in reserve."
    ]
    if budget.gpu_memory is None:
        notes.append("No memory limit was given, so everything fits.")
    if work.tokens is None:
        notes.append("Computation is left out (tokens and tflops were not given): the step is communication alone.")
    if cluster.nodes == 1:
        notes.append("A single node sends nothing to other nodes.")
    if cluster.gpus_per_node == 1:
        notes.append("Nodes of one GPU send nothing inside.")
    return (*notes, *_idle_codecs(size, cluster, codecs))


def _notes_on_local_steps(cluster: Cluster, codecs: Strategy, local_steps: LocalSteps | None) -> list[str]:
    if local_steps is None:
        return []
    if cluster.nodes == 1:
        return ["Local steps have no effect: there is only one node."]
    kept = _with_local_steps(_with_levels(codecs, "III"), local_steps)
    idle = [
        f"{name}={requested}"
        for name, requested in (("gradients", codecs.gradients), ("error_feedback", codecs.error_feedback))
        if requested is not None and getattr(kept, name) is None
    ]
    if not idle:
        return []
    unencoded = ", unencoded unless intra_gradients names a codec" * (kept.gradient_codecs[0] is None)
    return [f"Local steps ignore {' and '.join(idle)}: gradients stay inside nodes{unencoded}."]


def _idle_codecs(size: ModelSize, cluster: Cluster, codecs: Strategy) -> list[str]:
    idle = []
    if codecs.frozen is not None and size.frozen == 0:
        idle.append(f"frozen={codecs.frozen} has no effect: all parameters are trainable.")
    for name, codec in (("weights", codecs.weights), ("gradients", codecs.gradients)):
        if codec is not None and cluster.nodes == 1:
            idle.append(f"{name}={codec} has no effect: it encodes what is sent between nodes.")
    resolved = codecs.resolve(cluster.topology)
    if (resolved.weights, resolved.gradient_codecs) != (codecs.weights, codecs.gradient_codecs):
        idle.append(
            "If the links inside the node are slow (PCIe), plan nodes of one GPU: gpus_per_node=1 activates the codecs."
        )
    intra = codecs.gradient_codecs[0]
    if intra is not None and cluster.gpus_per_node == 1:
        idle.append(f"intra_gradients={intra} has no effect: it encodes what is sent inside a node.")
    feedback = codecs.error_feedback
    hops = {"inter": "between nodes", "intra": "inside a node"} if feedback is not None else {}
    if feedback is not None and feedback.hops == "inter":
        del hops["intra"]
    # Which of the two hops have errors does not depend on the optimizer scope or the size.
    fed_back = error_buffer_specs(feedback, resolved.gradient_codecs, "G", cluster.topology, 0)
    idle += [
        f"error_feedback has no effect {where}: nothing encoded is sent there."
        for hop, where in hops.items()
        if hop not in fed_back
    ]
    return idle
