"""``plan``: torch's strategies, presets and all 14 letters for one model and cluster, and the choice."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from fsdp_zpp.codecs.as_stored import FrozenName
from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.config.error_feedback import LoCo
from fsdp_zpp.config.local_steps import LocalSteps
from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.config.topology import Topology
from fsdp_zpp.suggestions import explains_arguments

from .activations import activation_volumes
from .axes import Axes
from .candidates import lettered, of_torch, presets as with_presets
from .choice import choose, reason
from .config import Cluster, MemoryBudget, Precision, StepConfig
from .figures import estimate_of
from .hardware import Hardware
from .levels import with_levels
from .link_notes import notes_on_links
from .model_size import ModelSize, equal_units
from .notes import notes_on, notes_on_experts, notes_on_local_steps
from .offload_notes import ANY_HOST, hint_at_offload, notes_on_offload
from .parts import parts_of
from .report import Plan


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
    utilization: float | None = None,
    micro_batches: int = 1,
    tokens: int | None = None,
    tflops: float | None = None,
    launch_ms: float | None = None,
    gpu_memory: float | None = None,
    activations: float = MemoryBudget.activations,
    reserve: float = MemoryBudget.reserve,
    weights: Codec | None = None,
    gradients: Codec | None = None,
    intra_gradients: Codec | Literal["auto"] | None = "auto",
    error_feedback: LoCo | None = None,
    frozen: Codec | FrozenName | None = None,
    local_steps: LocalSteps | None = None,
    compute: torch.dtype = Precision.compute,
    reduce: torch.dtype = Precision.reduce,
    storage: torch.dtype = Precision.storage,
    frozen_storage: torch.dtype | None = None,
    optimizer_bytes: int = Precision.optimizer_bytes,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    experts_strategy: Strategy | str | None = None,
    presets: bool | None = None,
    cpu_offload: bool = False,
    host_gbps: float | None = None,
    host_memory: float | None = None,
    optimizer_gbs: float | None = None,
) -> Plan:
    """Predict memory, traffic and step time of torch's strategies, presets and all 14 letters, and choose one.

    Args:
        params: Number of parameters of the model, or its units (``fsdp_zpp.planner.model_size``).
        trainable: Number of trainable parameters; None means all, or those of the units.
        units: Number of equal FSDP units that the parameters are wrapped in; None means 32.
        nodes: Number of nodes.
        gpus_per_node: GPUs of each node.
        inter_gbps: Gbit/s of a whole node to the others, all its network cards together.
        intra_gbps: Gbit/s of one GPU to the others of its node.
        gpu: Name of the GPU in ``fsdp_zpp.planner.catalog``, such as ``"a100"``: its memory, the links that it usually
            has and, with ``tokens``, its TFLOP/s. Numbers that are given override names.
        link: Name of the link between the GPUs of a node, such as ``"nvlink4"`` or ``"pcie4"``. Over PCIe, each GPU of
            a single machine is a node to strategies with codecs and optimizer scope G, as in training.
        net: Name of a node's network cards, such as ``"100gbe"`` or ``"8xib-ndr"``.
        slow_links: Whether the GPUs of a node have no NVLink; None asks the name of the link, and without one takes
            links to be fast.
        utilization: Share of the GPU's peak at which it computes; None takes 0.4.
        micro_batches: Number of micro-batches that an optimizer step accumulates.
        tokens: Number of tokens on a GPU in a micro-batch. Computation time needs this and ``tflops`` or ``gpu``;
            otherwise it is left out.
        tflops: TFLOP/s that a GPU achieves.
        launch_ms: Milliseconds in which the CPU launches forward and backward of one unit. None takes 5 with ``gpu``
            and ``tokens``, and leaves it out otherwise.
        gpu_memory: GiB of a GPU (80 for an A100-80GB); None sets no limit.
        activations: GiB of activations on a GPU.
        reserve: GiB of a GPU that no tensor can use.
        weights: As in ``Strategy``.
        gradients: As in ``Strategy``.
        intra_gradients: As in ``Strategy``.
        error_feedback: As in ``Strategy``.
        frozen: As in ``Strategy``.
        local_steps: Adds strategies with these local steps, for each of the letters that can have them. They change
            the mathematics, so the choice is one of them only where it saves time. Traffic and time
            are those of local steps in the last segment of their schedule; memory also suffices for synchronous steps.
        compute: Dtype of forward and backward.
        reduce: Dtype of gradients on the wire without a codec.
        storage: Dtype of the shards that the optimizer updates.
        frozen_storage: Dtype of the shards of frozen weights; None takes ``storage``, or ``compute`` with ``presets``.
        optimizer_bytes: Bytes of optimizer state per trainable parameter; 8 is Adam.
        tp: Ranks of tensor parallelism, which are neighbours. They share the ``tokens``.
        pp: Stages of a pipeline, which are neighbouring ranks each.
        cp: Ranks of context parallelism. They are data-parallel ranks to a strategy.
        ep: Ranks of expert parallelism, which are neighbours. Experts are then sharded over the ranks of a stage that
            have the same ones.
        experts_strategy: The strategy of experts, or its letters, to go with the codecs given here. By default, experts
            have the same letters as dense parameters.
        presets: Whether presets are planned, with codecs of their own, beside letters with the codecs given here, and
            torch's strategies. None does if no codec of what is sent is given; then frozen weights are taken to be
            stored in ``compute``, as LoRA's are.
        cpu_offload: Whether FSDP offloads parameters, gradients and optimizer state to the host's memory.
        host_gbps: With ``cpu_offload``, Gbit/s at which a GPU copies from the host's memory, or to it. None takes 0.8
            of the peak of the link that the ``gpu`` has to its host.
        host_memory: With ``cpu_offload``, GiB of a node's host that the training may take; None sets no limit.
        optimizer_gbs: With ``cpu_offload``, GB/s at which all CPUs of a node read and write memory in the optimizer's
            step; None takes 200.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, missing or contradicts another.

    Examples:
        >>> print(plan(70e9, nodes=16, gpus_per_node=8, inter_gbps=100, intra_gbps=2400, gpu_memory=80))
    """
    hardware = Hardware(gpu, link, net, utilization)
    cluster = hardware.cluster(nodes, gpus_per_node, inter_gbps, intra_gbps, slow_links)
    codecs = Strategy(
        "IGG",  # which takes any codec, Int4Delta included
        weights=weights,
        gradients=gradients,
        intra_gradients=intra_gradients,
        error_feedback=error_feedback,
        frozen=frozen,
    )
    if presets is None:
        presets = codecs == Strategy("IGG", frozen=frozen)
    if frozen is not None and frozen_storage is not None:
        raise ValueError(
            f"frozen={frozen} keeps frozen weights as codes only, so frozen_storage={frozen_storage} has no meaning; "
            "remove one of the two"
        )
    axes = Axes(tp, pp, cp, ep)
    axes.check(cluster)
    _check_local_steps(local_steps, axes, experts_strategy)
    if presets and frozen_storage is None:  # of rows whose base is not quantized
        frozen_storage = compute
    return make_plan(
        _size_of(params, trainable, units),
        cluster,
        axes,
        hardware.work(micro_batches, tokens, tflops, launch_ms),
        hardware.budget(
            gpu_memory,
            activations,
            reserve,
            hardware.offload(cpu_offload, host_gbps, host_memory, optimizer_gbs),
        ),
        Precision(compute, reduce, storage, frozen_storage, optimizer_bytes),
        codecs,
        _experts_strategy(experts_strategy, codecs, axes.expert_ranks(cluster).topology(cluster)),
        local_steps,
        presets,
    )


def _check_local_steps(local_steps: LocalSteps | None, axes: Axes, experts_strategy: Strategy | str | None) -> None:
    own = getattr(experts_strategy, "local_steps", None)
    if own is not None or (local_steps is not None and (experts_strategy is not None or axes.splits_parameters)):
        raise ValueError("local steps are not planned beside tp, pp, ep or experts_strategy; leave one of the two out")


def _experts_strategy(asked: Strategy | str | None, codecs: Strategy, topology: Topology) -> Strategy | None:
    if isinstance(asked, str):
        return with_levels(codecs, asked)
    if asked is None:
        return None
    if not isinstance(asked, Strategy):
        raise TypeError(f"experts_strategy must be a Strategy, three letters such as 'IGG', or None, got {asked!r}")
    if asked.gpus_per_node not in (None, topology.gpus_per_node):
        raise ValueError(
            f"experts_strategy has gpus_per_node={asked.gpus_per_node}, but {topology.gpus_per_node} of the ranks that "
            "experts are sharded over lie on a node; leave it out"
        )
    return asked


def make_plan(
    size: ModelSize,
    cluster: Cluster,
    axes: Axes,
    work: StepConfig,
    budget: MemoryBudget,
    precision: Precision,
    codecs: Strategy,
    experts: Strategy | None = None,
    local_steps: LocalSteps | None = None,
    presets: bool = False,
) -> Plan:
    """Return the plan of arguments that are checked already. The letters of ``codecs`` do not matter."""
    parts = parts_of(size, cluster, axes, experts)
    letters = lettered(codecs, cluster, local_steps)
    named = [*of_torch(cluster, work), *with_presets(size, cluster, work, codecs.frozen)] if presets else []
    asked = size, cluster, axes, work, budget, precision
    estimates = tuple(estimate_of(candidate, parts, *asked) for candidate in letters)
    rows = (*(estimate_of(candidate, parts, *asked) for candidate in named), *estimates)
    choice = choose(rows, cluster.slow_links)
    hints = notes_on_offload(budget)
    if choice is None and budget.offload is None:
        offloading = replace(budget, offload=ANY_HOST)
        hints = hint_at_offload(
            [estimate_of(each, parts, size, cluster, axes, work, offloading, precision) for each in (*named, *letters)]
        )
    topologies = [part.topology for part in parts if part.strategy is None]
    notes = [*notes_on(size, cluster, work, budget, codecs, topologies), *notes_on_links(cluster, rows)]
    notes += [note for part in parts[1:] for note in notes_on_experts(size.routing, axes, part.topology)]
    return Plan(
        size,
        cluster,
        work,
        budget,
        precision,
        estimates,
        choice,
        reason(rows, choice, budget, cluster),
        (*notes, *notes_on_local_steps(cluster, codecs, local_steps), *hints),
        local_steps if cluster.nodes > 1 else None,
        axes,
        tuple(activation_volumes(size, parts, cluster, axes, work, precision).items()),
        rows,
    )


def _size_of(params: float | ModelSize, trainable: float | None, units: int | None) -> ModelSize:
    if not isinstance(params, ModelSize):
        return equal_units(params, trainable, units)
    if units is not None:
        raise ValueError(f"units={units} was given, but the model has its own {params.count} units; leave units out")
    return params if trainable is None else params.with_trainable(trainable)
