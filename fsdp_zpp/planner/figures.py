"""Figures of one strategy: memory, traffic and time, summed over the parts of a model."""

from __future__ import annotations

from dataclasses import replace

from fsdp_zpp.config.strategy import Strategy

from .axes import Axes
from .config import Cluster, MemoryBudget, Precision, StepConfig
from .estimate import Estimate, PartEstimate, step_time, with_exchanges
from .exchange import exchange_memory, exchange_volume, fragment_count, per_step
from .memory import memory_beside, memory_of_units
from .model_size import ModelSize
from .parts import Part
from .volume import step_volume


def estimate_of(
    strategy: Strategy,
    parts: tuple[Part, ...],
    size: ModelSize,
    cluster: Cluster,
    axes: Axes,
    work: StepConfig,
    budget: MemoryBudget,
    precision: Precision,
) -> Estimate:
    """Return the figures of ``strategy``. With local steps, there is one part, of whole layers."""
    dense, *others = (_of_part(part, strategy, axes, work, precision) for part in parts)
    experts = next(iter(others), None)
    volume, memory = dense.volume, dense.memory + memory_beside(budget)
    if experts is not None:
        volume, memory = volume + experts.volume, memory + experts.memory
    time = step_time(volume, size, cluster, work, axes)
    local_steps = strategy.local_steps
    if local_steps is not None:
        exchanged = size, strategy.resolve(dense.topology), local_steps, precision
        exchange = exchange_volume(*exchanged)
        time = with_exchanges(time, exchange, fragment_count(size), cluster, local_steps)
        volume += per_step(exchange, local_steps)
        memory += exchange_memory(*exchanged)
    return Estimate(
        strategy=dense.strategy,
        topology=dense.topology,
        volume=volume,
        inter_node_bytes=cluster.gpus_per_node * volume.inter,
        memory=memory,
        time=time,
        fits=budget.allows(memory.total),
        experts=experts,
    )


def _of_part(part: Part, strategy: Strategy, axes: Axes, work: StepConfig, precision: Precision) -> PartEstimate:
    strategy = replace(part.strategy or strategy, gpus_per_node=part.topology.gpus_per_node)
    resolved = strategy.resolve(part.topology)
    in_step = resolved if strategy.local_steps is None else resolved.within_node()
    asked = part.units, in_step, work.micro_batches, precision, axes.pp > 1
    return PartEstimate(strategy, part.topology, step_volume(*asked), memory_of_units(*asked))
