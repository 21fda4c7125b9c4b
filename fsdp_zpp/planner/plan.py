"""``plan``: torch's strategies, presets and all 14 letters for one model and cluster, and the choice."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from fsdp_zpp.codecs import Codec, FrozenName
from fsdp_zpp.comm.agreement import agree, check_agreement
from fsdp_zpp.comm.mesh import topology_of
from fsdp_zpp.names import explains_arguments
from fsdp_zpp.strategy.error_feedback import LoCo, Topology
from fsdp_zpp.strategy.local_steps import LocalSteps
from fsdp_zpp.strategy.strategy import ResolvedStrategy, Strategy

from .choice import (
    Candidate,
    Estimate,
    PartEstimate,
    choose,
    lettered,
    of_torch,
    presets as with_presets,
    reason,
    with_levels,
)
from .cluster import (
    GIB,
    Cluster,
    MemoryBudget,
    Precision,
    StepConfig,
    least_of_job,
    links_are_slow,
    measure_bandwidth,
    measure_host_link,
    named_figures,
    offload_to,
    whole,
    world,
)
from .memory import Memory, Volume, memory_beside, memory_of_units, step_volume
from .model_size import Axes, Case, ModelSize, Part, Units, equal_units, module_size
from .report import ANY_HOST, Plan, hint_at_offload, notes_on
from .step_time import (
    HostWork,
    activation_volumes,
    exchanges,
    host_work,
    on_machines,
    per_step,
    splits_machine,
    step_time,
    strategy_topology,
    with_exchanges,
    with_offload,
)

# ---- figures
#
# Figures of one row: memory, traffic and time, summed over the parts of a model.


def estimate_of(candidate: Candidate, case: Case) -> Estimate:
    """Return the figures of ``candidate``.

    With local steps, there is one part, of whole layers. Traffic and time are those of local steps, and memory is that
    of whichever steps take most.

    Figures of one of torch's are as torch runs it, and the strategy is one that fits here if any does.
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
    experts = as_torchs.experts
    if experts is not None and own.experts is not None:
        experts = replace(experts, strategy=own.experts.strategy)
    return replace(as_torchs, strategy=own.strategy, experts=experts)


def _estimate(candidate: Candidate, case: Case) -> Estimate:
    strategy, cluster, budget = candidate.strategy, case.cluster, case.budget
    dense, *others = (_of_part(part, strategy, case) for part in case.parts)
    experts = next(iter(others), None)
    volume, memory, on_host = dense.volume, dense.memory + memory_beside(budget), dense.host_work
    if experts is not None:
        volume, memory = volume + experts.volume, memory + experts.memory
        on_host += experts.host_work
    resolved = strategy.resolve(dense.topology)
    time = step_time(volume, resolved, case)
    if budget.offload is not None:
        time = with_offload(time, on_host, budget.offload, cluster.gpus_per_node)
    local_steps = strategy.local_steps
    if local_steps is not None:
        exchanged = exchanges(case.size, resolved, local_steps, case.precision)
        time = with_exchanges(time, exchanged, cluster, local_steps)
        volume += per_step(exchanged, local_steps)
        memory += exchanged.memory
        if local_steps.has_synchronous_steps:
            plain = replace(strategy, local_steps=None)
            in_step = _of_part(case.parts[0], plain, case)
            # At the end there is no outer state any more, nor memory of an exchange in any synchronous step.
            outer = exchanged.memory.outer if local_steps.start else 0
            synchronous = in_step.memory + memory_beside(budget) + Memory(outer=outer)
            memory = max(memory, synchronous, key=lambda each: each.total)
    return Estimate(
        strategy=dense.strategy,
        topology=dense.topology,
        volume=volume,
        inter_node_bytes=cluster.gpus_per_node * volume.inter,
        memory=memory,
        time=time,
        fits=budget.allows(memory.total) and budget.host_allows(cluster.gpus_per_node * memory.host),
        experts=experts,
        candidate=candidate,
    )


def _of_part(part: Part, strategy: Strategy, case: Case) -> PartEstimate:
    cluster, offloads = case.cluster, case.budget.offload is not None
    strategy = part.strategy or strategy
    topology = strategy_topology(strategy, part.topology, cluster)
    resolved = strategy.resolve(topology)
    in_step = resolved if strategy.local_steps is None else resolved.within_node()

    def figures(units: Units, of: ResolvedStrategy) -> tuple[Volume, Memory, HostWork]:
        asked = units, of, case.work.micro_batches, case.precision, case.axes.pp > 1
        sent = on_machines(step_volume(*asked), of.topology, part.topology)
        return sent, memory_of_units(*asked, offloads), host_work(*asked) if offloads else HostWork()

    if strategy.frozen is not None and splits_machine(strategy, cluster):
        # Said explicitly, a node size would hold for the base, too.
        trained, base = _without(part.units, "frozen"), _without(part.units, "trainable")
        over_machine = strategy.resolve(part.topology)
        (sent, kept, moved), (sent_of_base, base_kept, _) = figures(trained, in_step), figures(base, over_machine)
        return PartEstimate(strategy, topology, sent + sent_of_base, kept + base_kept, moved)
    strategy = replace(strategy, gpus_per_node=topology.gpus_per_node)
    return PartEstimate(strategy, topology, *figures(part.units, in_step))


def _without(units: Units, kind: str) -> Units:
    zeros: dict[str, Any] = {kind: 0, f"expert_{kind}": 0}
    return Units(tuple(replace(unit, **zeros) for unit in units.units))


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
        slow_links: True if the GPUs of a node have no NVLink; by default, as the name of the link says, and without one
            they have.
        utilization: Share of the peak of ``gpu`` at which it computes, in place of ``tflops``; by default 0.4.
        micro_batches: Number of micro-batches that an optimizer step accumulates.
        tokens: Number of tokens on a GPU in a micro-batch. Computation time needs this and ``tflops`` or ``gpu``;
            otherwise it is left out.
        tflops: TFLOP/s that a GPU achieves.
        launch_ms: Milliseconds in which the CPU launches forward and backward of one unit; by default 5 with ``gpu``
            and ``tokens``, otherwise left out.
        gpu_memory: GiB of a GPU (80 for an A100-80GB); by default those of ``gpu``, or no limit.
        activations: GiB of activations on a GPU.
        reserve: GiB of a GPU that no tensor can use: CUDA context, NCCL, gaps.
        weights: Codec of the weight gather, as in ``Strategy``.
        gradients: Codec of the gradient reduction between nodes, as in ``Strategy``.
        intra_gradients: Codec of the gradient reduction inside nodes, as in ``Strategy``.
        error_feedback: Error feedback of LoCo, on the hop between nodes or on both, as in ``Strategy``.
        frozen: Codec of frozen weights, which stay encoded, as in ``Strategy``.
        local_steps: Adds strategies with these local steps, for each of the letters that can have them. They change
            the mathematics, so the choice is one of them only where it saves time. Traffic and time
            are those of local steps in the last segment of their schedule; memory also suffices for synchronous steps.
        compute: Dtype of forward and backward.
        reduce: Dtype of gradients on the wire without a codec.
        storage: Dtype of the shards that the optimizer updates.
        frozen_storage: Dtype of the shards of frozen weights; by default ``storage``, or ``compute`` with ``presets``.
        optimizer_bytes: Bytes of optimizer state per trainable parameter; 8 is Adam.
        tp: Ranks of tensor parallelism, which are neighbours. They share the ``tokens``.
        pp: Stages of a pipeline, which are neighbouring ranks each.
        cp: Ranks of context parallelism. They are data-parallel ranks to a strategy.
        ep: Ranks of expert parallelism, which are neighbours. Experts are then sharded over the ranks of a stage that
            have the same ones.
        experts_strategy: Strategy of experts, or its letters, to go with the codecs given here; by default, that of
            dense parameters.
        presets: True if presets are planned, with codecs of their own, beside letters with the codecs given here, and
            torch's strategies; by default if no codec of what is sent is given. Frozen weights are then taken to be
            stored in ``compute``, as LoRA's are.
        cpu_offload: True if FSDP offloads parameters, gradients and optimizer state to the host's memory.
        host_gbps: Gbit/s at which a GPU copies from the host's memory, or to it, with ``cpu_offload``; by default 0.8
            of the peak of the link that ``gpu`` has to its host.
        host_memory: GiB of a node's host that the training may take, with ``cpu_offload``; by default, no limit.
        optimizer_gbs: GB/s at which all CPUs of a node read and write memory in the optimizer's step, with
            ``cpu_offload``; by default 200.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, missing or contradicts another.

    Examples:
        >>> print(plan(70e9, nodes=16, gpus_per_node=8, inter_gbps=100, intra_gbps=2400, gpu_memory=80))
    """
    named = named_figures(gpu, link, net, utilization)
    # Numbers say more than a name: who gives TFLOP/s may have measured them.
    given = {"inter_gbps": inter_gbps, "intra_gbps": intra_gbps, "slow_links": slow_links, "gpu_memory": gpu_memory}
    given |= {"tflops": tflops, "launch_ms": launch_ms}
    figures = {name: named.get(name) if value is None else value for name, value in given.items()}
    speed = figures if tokens is not None else given
    cluster = Cluster(nodes, gpus_per_node, figures["inter_gbps"], figures["intra_gbps"], bool(figures["slow_links"]))
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
    host = {"host_gbps": host_gbps, "host_memory": host_memory, "optimizer_gbs": optimizer_gbs}
    offload = offload_to(cpu_offload, host, named.get("host_gbps"))
    case = Case(
        _size_of(params, trainable, units),
        cluster,
        StepConfig(micro_batches, tokens, speed["tflops"], 0.0 if speed["launch_ms"] is None else speed["launch_ms"]),
        MemoryBudget(figures["gpu_memory"], activations, reserve, offload),
        Precision(compute, reduce, storage, frozen_storage, optimizer_bytes),
        axes,
        _experts_strategy(experts_strategy, codecs, axes.expert_ranks(cluster).topology(cluster)),
    )
    return _plan(case, codecs, local_steps, presets)


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


def _plan(case: Case, codecs: Strategy, local_steps: LocalSteps | None, presets: bool) -> Plan:
    letters = lettered(case, codecs, local_steps)
    named = [*of_torch(case), *with_presets(case, codecs.frozen)] if presets else []
    estimates = tuple(estimate_of(candidate, case) for candidate in letters)
    rows = (*(estimate_of(candidate, case) for candidate in named), *estimates)
    choice = choose(rows, case.cluster.slow_links)
    hints: list[str] = []
    if choice is None and case.budget.offload is None:
        offloading = replace(case, budget=replace(case.budget, offload=ANY_HOST))
        hints = hint_at_offload([estimate_of(each, offloading) for each in (*named, *letters)])
    return Plan(
        **{each.name: getattr(case, each.name) for each in fields(case)},
        estimates=estimates,
        choice=choice,
        reason=reason(rows, choice, case),
        notes=(*notes_on(case, codecs, local_steps, rows), *hints),
        local_steps=local_steps if case.cluster.nodes > 1 else None,
        activations=tuple(activation_volumes(case).items()),
        rows=rows,
    )


def _size_of(params: float | ModelSize, trainable: float | None, units: int | None) -> ModelSize:
    if not isinstance(params, ModelSize):
        return equal_units(params, trainable, units)
    if units is not None:
        raise ValueError(f"units={units} was given, but the model has its own {params.count} units; leave units out")
    return params if trainable is None else params.with_trainable(trainable)


# ---- running job
#
# ``choose_strategy``: the strategy for a given model on the cluster of the running job.


def choose_strategy(
    model: nn.Module,
    *,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    inter_gbps: float | None = None,
    intra_gbps: float | None = None,
    gpu_memory: float | None = None,
    slow_links: bool | None = None,
    **options: Any,
) -> Strategy:
    """Return the strategy that :func:`plan` chooses; for one of torch's, that which does the same here.

    Without codecs among the options, presets with their codecs are compared with torch's strategies.

    If a process group is initialized, all ranks must call this with the same arguments; they get the same strategy.

    Args:
        model: The model, not wrapped yet. Its trainable and frozen parameters are counted layer by layer.
        nodes: Number of nodes. None takes it from the running job.
        gpus_per_node: GPUs of each node. None takes it from the running job.
        inter_gbps: Gbit/s of a whole node to the others. None measures it with all-gathers over the running job.
        intra_gbps: Gbit/s of one GPU to the others of its node. None measures it likewise.
        gpu_memory: GiB of a GPU. None asks the GPUs; without GPUs there is no limit.
        slow_links: True if the links inside a node are slow, as in ``plan``. None asks the machine, or the measurement
            if it does not say, unless ``gpus_per_node`` or hardware is named.
        **options: The other options of ``plan``. Names of hardware replace measurements. With ``cpu_offload``,
            ``host_gbps`` is measured on GPUs unless it or ``gpu`` is given. With experts on ranks of their own, the
            result is the strategy of the other parameters; ``plan`` has both.

    Raises:
        ValueError: If nothing fits, an argument is out of range, or one is missing and no process group is initialized.
        TypeError: If an argument has the wrong type.
    """
    group = dist.group.WORLD
    named = options.get("gpu") is not None or options.get("link") is not None
    asks_machine = gpus_per_node is None and slow_links is None and not named
    size, nodes, gpus_per_node = agree(group, lambda: _on_what(model, nodes, gpus_per_node))
    unknown_inter = inter_gbps is None and nodes > 1 and options.get("net") is None
    unknown_intra = intra_gbps is None and gpus_per_node > 1 and not named
    unknown_host = bool(options.get("cpu_offload")) and options.get("host_gbps") is None and options.get("gpu") is None
    facts: dict[str, object] = {
        "nodes": nodes,
        "gpus_per_node": gpus_per_node,
        # Each of these decides on a collective.
        "measured inter_gbps": unknown_inter,
        "measured intra_gbps": unknown_intra,
        "links asked of the machine": asks_machine,
        "memory of the GPU": gpu_memory is None,
        "measured host_gbps": unknown_host,
    }
    check_agreement(group, "choose_strategy", facts)
    if group is not None:
        measured = measure_bandwidth(group, gpus_per_node) if unknown_inter or unknown_intra else None
        if measured is not None:
            inter_gbps = measured.inter_gbps if unknown_inter else inter_gbps
            intra_gbps = measured.intra_gbps if unknown_intra else intra_gbps
        if asks_machine:
            slow_links = links_are_slow(group, measured if unknown_intra else None)
    on: dict[str, Any] = {"nodes": nodes, "gpus_per_node": gpus_per_node, "slow_links": slow_links}
    on |= {"inter_gbps": inter_gbps, "intra_gbps": intra_gbps}
    on["gpu_memory"] = device_memory() if gpu_memory is None else gpu_memory
    if unknown_host:
        options["host_gbps"] = measure_host_link()
    agreed = agree(group, lambda: plan(size, **on, **options))
    if agreed.choice is None:
        raise ValueError(agreed.reason)
    return agreed.choice.strategy


def _on_what(model: nn.Module, nodes: int | None, gpus_per_node: int | None) -> tuple[ModelSize, int, int]:
    size = module_size(model)
    if dist.is_initialized() and None in (nodes, gpus_per_node):
        running = topology_of(world(), gpus_per_node)
        gpus_per_node = running.gpus_per_node
        nodes = running.nodes if nodes is None else nodes
    if nodes is None or gpus_per_node is None:
        raise ValueError(
            f"got nodes={nodes} and gpus_per_node={gpus_per_node}, and no process group is initialized to take them "
            "from; pass both, or call torch.distributed.init_process_group first"
        )
    return size, whole("nodes", nodes), whole("gpus_per_node", gpus_per_node)


def device_memory() -> float | None:
    """Return the GiB of the current GPU, or of the smallest GPU of the running job; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    return least_of_job(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / GIB)
