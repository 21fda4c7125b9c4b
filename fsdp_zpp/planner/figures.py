"""Figures of one row: memory, traffic and time, summed over the parts of a model."""

from __future__ import annotations

from dataclasses import replace

from fsdp_zpp.config.resolve import ResolvedStrategy
from fsdp_zpp.config.strategy import Strategy

from .axes import Axes
from .candidates import Candidate
from .config import Cluster, MemoryBudget, Precision, StepConfig
from .estimate import Estimate, PartEstimate
from .exchange import exchange_memory, exchange_volume, fragment_count, moment_volume, per_step
from .memory import Memory, memory_beside, memory_of_units
from .model_size import ModelSize, Units
from .node_size import on_machines, splits_machine, strategy_topology
from .offload import HostWork, host_work, with_offload
from .parts import Part
from .step_time import step_time, with_exchanges
from .volume import Volume, step_volume


def estimate_of(
    candidate: Candidate,
    parts: tuple[Part, ...],
    size: ModelSize,
    cluster: Cluster,
    axes: Axes,
    work: StepConfig,
    budget: MemoryBudget,
    precision: Precision,
) -> Estimate:
    """Return the figures of ``candidate``.

    With local steps, there is one part, of whole layers. Traffic and time are those of local steps, and memory is that
    of whichever steps take most.

    Figures of one of torch's are as torch runs it, and the strategy is one that fits here if any does.
    """
    on = parts, size, cluster, axes, work, budget
    if candidate.torch is None:
        return _estimate(candidate, *on, precision)
    # Torch's FSDP accumulates in the dtype in which it reduces.
    as_torchs = _estimate(candidate, *on, replace(precision, accumulation=precision.reduce))
    for strategy in (candidate.strategy, *candidate.instead):
        own = _estimate(replace(candidate, strategy=strategy), *on, precision)
        if own.fits:
            break
    experts = as_torchs.experts
    if experts is not None and own.experts is not None:
        experts = replace(experts, strategy=own.experts.strategy)
    return replace(as_torchs, strategy=own.strategy, experts=experts)


def _estimate(
    candidate: Candidate,
    parts: tuple[Part, ...],
    size: ModelSize,
    cluster: Cluster,
    axes: Axes,
    work: StepConfig,
    budget: MemoryBudget,
    precision: Precision,
) -> Estimate:
    strategy, offloads = candidate.strategy, budget.offload is not None
    dense, *others = (_of_part(part, strategy, cluster, axes, work, precision, offloads) for part in parts)
    experts = next(iter(others), None)
    volume, memory, on_host = dense.volume, dense.memory + memory_beside(budget), dense.host_work
    if experts is not None:
        volume, memory = volume + experts.volume, memory + experts.memory
        on_host += experts.host_work
    resolved = strategy.resolve(dense.topology)
    time = step_time(volume, size, cluster, work, axes, resolved)
    if budget.offload is not None:
        time = with_offload(time, on_host, budget.offload, cluster.gpus_per_node)
    local_steps = strategy.local_steps
    if local_steps is not None:
        exchanged = size, resolved, local_steps, precision
        exchange, moments = exchange_volume(*exchanged), moment_volume(*exchanged)
        time = with_exchanges(time, exchange, fragment_count(size), cluster, local_steps, moments)
        volume += per_step(exchange, moments, local_steps)
        added = exchange_memory(*exchanged)
        memory += added
        if local_steps.has_synchronous_steps:
            plain = replace(strategy, local_steps=None)
            in_step = _of_part(parts[0], plain, cluster, axes, work, precision, offloads)
            # At the end there is no outer state any more, nor memory of an exchange in any synchronous step.
            outer = added.outer if local_steps.start else 0
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


def _of_part(
    part: Part,
    strategy: Strategy,
    cluster: Cluster,
    axes: Axes,
    work: StepConfig,
    precision: Precision,
    offloads: bool,
) -> PartEstimate:
    strategy = part.strategy or strategy
    topology = strategy_topology(strategy, part.topology, cluster)
    resolved = strategy.resolve(topology)
    in_step = resolved if strategy.local_steps is None else resolved.within_node()
    pipelined = axes.pp > 1

    def figures(units: Units, of: ResolvedStrategy) -> tuple[Volume, Memory, HostWork]:
        asked = units, of, work.micro_batches, precision, pipelined
        sent = on_machines(step_volume(*asked), of.topology, part.topology)
        return sent, memory_of_units(*asked, offloads), host_work(*asked) if offloads else HostWork()

    if strategy.frozen is not None and splits_machine(strategy, cluster):
        # Said explicitly, a node size would hold for the base, too.
        trained, base = _without_frozen(part.units), _without_trainable(part.units)
        over_machine = strategy.resolve(part.topology)
        (sent, kept, moved), (sent_of_base, base_kept, _) = figures(trained, in_step), figures(base, over_machine)
        return PartEstimate(strategy, topology, sent + sent_of_base, kept + base_kept, moved)
    strategy = replace(strategy, gpus_per_node=topology.gpus_per_node)
    return PartEstimate(strategy, topology, *figures(part.units, in_step))


def _without_frozen(units: Units) -> Units:
    return Units(tuple(replace(unit, frozen=0, expert_frozen=0) for unit in units.units))


def _without_trainable(units: Units) -> Units:
    return Units(tuple(replace(unit, trainable=0, expert_trainable=0) for unit in units.units))
