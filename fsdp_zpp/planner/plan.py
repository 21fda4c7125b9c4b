"""``plan``: figures of torch's strategies, presets and all scope letters for a model and cluster, and the choice."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Literal

import torch

from fsdp_zpp.codecs import Codec, FrozenName
from fsdp_zpp.names import explains_arguments
from fsdp_zpp.strategy.error_feedback import LoCo
from fsdp_zpp.strategy.strategy import ResolvedStrategy, Strategy

from .choice import Candidate, Estimate, choose, lettered, of_torch, presets as with_presets, reason
from .cluster import GIB, Cluster, MemoryBudget, Precision, StepConfig, named_figures
from .memory import Memory, Volume, memory_of_units, step_volume
from .model_size import Case, ModelSize, Units, equal_units
from .report import Plan, notes_on
from .step_time import on_machines, splits_machine, step_time, strategy_topology

# ---- figures
#
# Figures of one row: memory, traffic and time.


def estimate_of(candidate: Candidate, case: Case) -> Estimate:
    """Return the figures of ``candidate``.

    For one of torch's strategies, these are torch's, but name the first equivalent ``Strategy`` that fits, or the last.
    """
    if candidate.torch is None:
        return _estimate(candidate, case)
    # Torch's FSDP accumulates in the dtype in which it reduces.
    precision = replace(case.precision, accumulation=case.precision.reduce)
    as_torchs = _estimate(candidate, replace(case, precision=precision))
    for strategy in (candidate.strategy, *candidate.instead):
        own = _estimate(replace(candidate, strategy=strategy), case)
        if own.fits:
            break
    return replace(as_torchs, strategy=own.strategy)


def _estimate(candidate: Candidate, case: Case) -> Estimate:
    strategy, cluster = candidate.strategy, case.cluster
    topology = strategy_topology(strategy, cluster)
    resolved = strategy.resolve(topology)

    def figures(units: Units, of: ResolvedStrategy) -> tuple[Volume, Memory]:
        asked = units, of, case.work.micro_batches, case.precision
        return on_machines(step_volume(*asked), of.topology, cluster.topology), memory_of_units(*asked)

    if strategy.frozen is None or not splits_machine(strategy, cluster):
        volume, memory = figures(case.size, resolved)
        # Only in this branch: in the other, an explicit node size would apply to the base, too.
        strategy = replace(strategy, gpus_per_node=topology.gpus_per_node)
    else:  # the base stays sharded over the machine
        sent, kept = figures(_without(case.size, "frozen"), resolved)
        sent_of_base, base_kept = figures(_without(case.size, "trainable"), strategy.resolve(cluster.topology))
        volume, memory = sent + sent_of_base, kept + base_kept
    memory += Memory(activations=round(case.budget.activations * GIB), reserve=round(case.budget.reserve * GIB))
    time = step_time(volume, resolved, case)
    return Estimate(
        strategy=strategy,
        topology=topology,
        volume=volume,
        inter_node_bytes=cluster.gpus_per_node * volume.inter,
        memory=memory,
        time=time,
        fits=case.budget.gpu_memory is None or memory.total <= case.budget.gpu_memory * GIB,
        candidate=candidate,
    )


def _without(units: Units, kind: str) -> Units:
    zero: dict[str, Any] = {kind: 0}
    return Units(tuple(replace(unit, **zero) for unit in units.units))


# ---- plan


@explains_arguments
def plan(
    params: float | ModelSize,
    *,
    trainable: float | None = None,
    units: int | None = None,
    nodes: int,
    gpus_per_node: int,
    inter_gbps: float | None = None,
    intra_gbps: float | None = None,
    gpu: str | None = None,
    link: str | None = None,
    net: str | None = None,
    slow_links: bool | None = None,
    micro_batches: int = 1,
    tokens: int | None = None,
    tflops: float | None = None,
    gpu_memory: float | None = None,
    activations: float = MemoryBudget.activations,
    weights: Codec | None = None,
    gradients: Codec | None = None,
    intra_gradients: Codec | Literal["auto"] | None = "auto",
    error_feedback: LoCo | None = None,
    frozen: Codec | FrozenName | None = None,
    compute: torch.dtype = Precision.compute,
    reduce: torch.dtype = Precision.reduce,
    storage: torch.dtype = Precision.storage,
    optimizer_bytes: int = Precision.optimizer_bytes,
    presets: bool | None = None,
) -> Plan:
    """Predict memory, traffic and step time of torch's strategies, presets and all 14 letters, and choose one.

    The command line takes its options from this signature, and their help from these lines.

    Args:
        params: Number of parameters of the model, or its units (``fsdp_zpp.planner.model_size``).
        trainable: Number of trainable parameters; by default all, or those of the units.
        units: Number of equal FSDP units that ``params`` are wrapped in; by default 32.
        nodes: Number of nodes.
        gpus_per_node: GPUs of each node.
        inter_gbps: Gbit/s of a whole node to the others, all its network cards together.
        intra_gbps: Gbit/s of one GPU to the others of its node.
        gpu: GPU by its name, for its memory, its usual links and, with ``tokens``, its TFLOP/s. Numbers that are given
            override names.
        link: Link between the GPUs of a node by its name; by default the GPU's. Over PCIe, each GPU of a single machine
            is a node to strategies with codecs and optimizer scope G, as in training.
        net: Network card of a node by its name, several as 8xib-ndr.
        slow_links: True if the GPUs of a node have no NVLink; by default, the name of the link decides. Without a name,
            GPUs count as having NVLink.
        micro_batches: Number of micro-batches that an optimizer step accumulates.
        tokens: Number of tokens on a GPU in a micro-batch. Computation time needs this and ``tflops`` or ``gpu``;
            otherwise it is left out.
        tflops: TFLOP/s that a GPU achieves; by default 0.4 of the peak of ``gpu``.
        gpu_memory: GiB of a GPU (80 for an A100-80GB); by default those of ``gpu``, or no limit.
        activations: GiB of activations on a GPU.
        weights: Codec of the weight gather, as in ``Strategy``.
        gradients: Codec of the gradient reduction between nodes, as in ``Strategy``.
        intra_gradients: Codec of the gradient reduction inside nodes, as in ``Strategy``.
        error_feedback: Error feedback of LoCo, on the hop between nodes or on both, as in ``Strategy``.
        frozen: Codec of frozen weights, which stay encoded, as in ``Strategy``.
        compute: Dtype of forward and backward, and of the shards of frozen weights.
        reduce: Dtype of gradients on the wire without a codec.
        storage: Dtype of the shards that the optimizer updates.
        optimizer_bytes: Bytes of optimizer state per trainable parameter; 8 is Adam.
        presets: True if presets are planned, with codecs of their own, beside letters with the codecs given here, and
            torch's strategies; by default if no codec of what is sent is given.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, missing or contradicts another.

    Examples:
        >>> print(plan(70e9, nodes=16, gpus_per_node=8, inter_gbps=100, intra_gbps=2400, gpu_memory=80))
    """
    named = named_figures(gpu, link, net)
    if tokens is None:  # computation is left out
        named |= {"tflops": None, "launch_ms": 0.0}
    # Given numbers override those of names, since they may be measured.
    given = {"inter_gbps": inter_gbps, "intra_gbps": intra_gbps, "slow_links": slow_links, "gpu_memory": gpu_memory}
    given |= {"tflops": tflops}
    figures = {name: named.get(name) if value is None else value for name, value in given.items()}
    cluster = Cluster(nodes, gpus_per_node, figures["inter_gbps"], figures["intra_gbps"], bool(figures["slow_links"]))
    codecs = Strategy(
        "IGG",  # takes any codec, Int4Delta included
        weights=weights,
        gradients=gradients,
        intra_gradients=intra_gradients,
        error_feedback=error_feedback,
        frozen=frozen,
    )
    if presets is None:
        presets = codecs == Strategy("IGG", frozen=frozen)
    case = Case(
        _size_of(params, trainable, units),
        cluster,
        StepConfig(micro_batches, tokens, figures["tflops"], named.get("launch_ms", 0.0)),
        MemoryBudget(figures["gpu_memory"], activations),
        Precision(compute, reduce, storage, optimizer_bytes),
    )
    candidates = [*of_torch(case), *with_presets(case, codecs.frozen)] if presets else []
    estimates = tuple(estimate_of(candidate, case) for candidate in lettered(codecs))
    rows = (*(estimate_of(candidate, case) for candidate in candidates), *estimates)
    choice = choose(rows, case.cluster.slow_links)
    letters = next(row for row in estimates if row.levels == "IGG")  # its scopes take any codec
    return Plan(
        **{each.name: getattr(case, each.name) for each in fields(case)},
        estimates=estimates,
        choice=choice,
        reason=reason(rows, choice, case),
        notes=tuple(notes_on(case, codecs, letters.strategy.resolve(letters.topology))),
        rows=rows,
    )


def _size_of(params: float | ModelSize, trainable: float | None, units: int | None) -> ModelSize:
    if not isinstance(params, ModelSize):
        params = equal_units(params, units)
    elif units is not None:
        raise ValueError(f"units={units} was given, but the model has its own {params.count} units; leave units out")
    return params if trainable is None else params.with_trainable(trainable)
