"""Parts of a model that are sharded over different ranks: dense parameters, and experts.

A rank has one pipeline stage's share of the layers, and of each unit there what tensor and expert parallelism leave it.
Three things are simplified. Of the layers, sorted by size, the stage has every pp-th, from the largest on. The root
unit is half an embedding, which the first stage has, and half a head, which the last one has. And tensor parallelism
splits all dense parameters, although it leaves copies of norms and routers, which are well under a hundredth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.config.topology import Topology

from .axes import Axes
from .config import Cluster
from .model_size import ModelSize, Unit, Units


@dataclass(frozen=True)
class Part:
    """Parameters that are sharded over the same ranks by one strategy, as one rank has them.

    Attributes:
        units: What the rank has of each unit beside other parallelisms: the elements that its strategy shards.
        topology: Layout of the ranks that it shards them over.
        strategy: A strategy of their own; None if they have that of the dense parameters.
    """

    units: Units
    topology: Topology
    strategy: Strategy | None = None


def parts_of(size: ModelSize, cluster: Cluster, axes: Axes, experts: Strategy | None) -> tuple[Part, ...]:
    """Return the dense parameters, then the experts if they have ranks or a strategy of their own.

    Args:
        size: The size of the model.
        cluster: The cluster.
        axes: The other parallelisms, which fit it.
        experts: The strategy of the experts, if they have one of their own.

    Raises:
        ValueError: If the planner knows of no experts in the model, if ``ep`` does not divide their number, or if there
            are fewer layers than stages.
    """
    dense_topology = axes.dense_ranks(cluster).topology(cluster)
    stage = _stage(size, axes.pp)
    if axes.ep == 1 and experts is None:
        return (Part(_shared(stage, axes.tp, _whole), dense_topology),)
    _check_experts(size, axes)
    split_by = axes.tp if axes.ep == 1 else axes.ep
    return (
        Part(_shared(stage, axes.tp, _without_experts), dense_topology),
        Part(_shared(stage, split_by, _experts_alone), axes.expert_ranks(cluster).topology(cluster), experts),
    )


def _check_experts(size: ModelSize, axes: Axes) -> None:
    if size.experts == 0:
        raise ValueError(
            "ep and experts_strategy are for experts, and the model has none that the planner knows of: give --model a "
            "config of a mixture of experts, or units with expert_trainable"
        )
    if size.routing is not None and size.routing.experts % axes.ep:
        raise ValueError(
            f"ep={axes.ep} does not divide the {size.routing.experts} experts of a layer; choose a divisor of them"
        )


def _stage(size: ModelSize, stages: int) -> tuple[Unit, ...]:
    """Return the units of the stage that has most; see the rules at the top of this file."""
    if stages == 1:
        return size.units
    layers = sorted((unit for unit in size.units if unit.reshard_after_forward), key=lambda unit: -unit.numel)
    if (count := sum(unit.count for unit in layers)) < stages:
        raise ValueError(f"pp={stages} must be at most the number of layers, {count}")
    units, before = [_divided(unit, 2) for unit in size.units if not unit.reshard_after_forward], 0
    for unit in layers:
        after = before + unit.count
        if (taken := -(-after // stages) - -(-before // stages)) > 0:
            units.append(replace(unit, count=taken))
        before = after
    return tuple(units)


def _shared(units: tuple[Unit, ...], ranks: int, part: Callable[[Unit], Unit]) -> Units:
    """Return the share of one of ``ranks`` in a part of each unit, without units that have nothing of it."""
    return Units(tuple(_divided(part(unit), ranks) for unit in units if part(unit).numel))


def _whole(unit: Unit) -> Unit:
    return unit


def _without_experts(unit: Unit) -> Unit:
    return replace(
        unit,
        trainable=unit.trainable - unit.expert_trainable,
        frozen=unit.frozen - unit.expert_frozen,
        expert_trainable=0,
        expert_frozen=0,
    )


def _experts_alone(unit: Unit) -> Unit:
    return replace(unit, trainable=unit.expert_trainable, frozen=unit.expert_frozen)


def _divided(unit: Unit, ranks: int) -> Unit:
    """Return a rank's share of the elements of ``unit``, rounded up."""
    names = ("trainable", "frozen", "expert_trainable", "expert_frozen")
    return replace(unit, **{name: -(-getattr(unit, name) // ranks) for name in names})
