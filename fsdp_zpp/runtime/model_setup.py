"""Set-up of a model under strategies: its units are compared between ranks and named, and its events watched."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from fsdp_zpp.collectives.agreement import check_agreement, from_each_rank, shard_signature
from fsdp_zpp.collectives.prefetch import SecondaryShardPrefetcher
from fsdp_zpp.collectives.replicas import check_replicas
from fsdp_zpp.collectives.weight_gather import WeightGather

from .elastic_fragment import ElasticFragment
from .elastic_training import ElasticTraining
from .lifecycle import LifecycleHooks
from .local_training import LocalTraining
from .mistakes import MistakeWatch
from .moments import OptimizerMoments
from .outer_watch import OuterWatch
from .overrides import warn_of_unmatched
from .summary import Groups, log_summaries
from .unit import StrategyUnit
from .weight_changes import IN_OPTIMIZER, WeightChanges, too_small_units


def set_up_model(
    root: nn.Module, model: str, units: Sequence[StrategyUnit], others: Sequence[int] = ()
) -> LifecycleHooks:
    """Compare the units of a model between ranks, name them, log what is active, and watch for events. Collective.

    Args:
        root: Its outermost part.
        model: The model's name in errors and in the log line.
        units: Its units.
        others: The numbers of values of the units below ``root`` that torch alone manages.

    Raises:
        ValueError: If ranks have different units, or if ranks that hold the same part of the model hold different
            values.
    """
    # First: the collectives below hang if ranks have different units.
    _check_agreement(model, units)
    groups: Groups = defaultdict(list)
    for unit in units:
        unit.rename(unit.sharded.name)
        groups[unit.strategy, unit.ranks].append(unit)
    for (_, ranks), members in groups.items():
        # Nodes that have trained on their own hold different weights.
        if not any(unit.fragment is not None and unit.fragment.progress.apart for unit in members):
            shards = (shard for unit in members for shard in unit.sharded.shards())
            check_replicas(shards, ranks, members[0].scopes.optimizer, model)
    _check_before_forwards(root, units)
    _prefetch_secondary_shards([unit.gather for unit in units if unit.can_prefetch])
    with_weights = [unit for unit in units if unit.sharded.parameters()]  # FSDP may have left all to inner units
    changes = WeightChanges(with_weights, too_small_units(with_weights))
    hooks = LifecycleHooks(units, _train_locally(root, model, units), changes, MistakeWatch(root, model, units))
    log_summaries(model, groups, others)  # after all that may raise
    if all(unit.ranks.rank == 0 for unit in units):
        warn_of_unmatched(root, model, (pattern for unit in units for pattern in unit.patterns))
    return hooks


@contextmanager
def repeated_if_failed(root: nn.Module, set_up: Callable[[nn.Module], None]) -> Iterator[None]:
    """Call ``set_up(root)`` before the next forward if the block, which sets up a model, raises.

    After a first forward that failed, torch counts the model as initialized, and would train it unchecked.
    """

    def before_forward(root: nn.Module, inputs: object) -> None:
        handle.remove()
        set_up(root)

    try:
        yield
    except Exception:
        handle = root.register_forward_pre_hook(before_forward, prepend=True)
        raise


def _train_locally(root: nn.Module, model: str, units: Sequence[StrategyUnit]) -> LocalTraining | None:
    """Let nodes exchange the fragments of a model before forwards; return None if it has none. Collective."""
    # What is frozen now may be trained later.
    concerned = [unit for unit in units if unit.fragment is not None or unit.sharded.is_trained()]
    configurations = dict.fromkeys(unit.strategy.local_steps for unit in concerned)
    if len(configurations) > 1:
        arguments = " and ".join(f"local_steps={each!r}" for each in configurations)
        raise ValueError(
            f"{model}: its parts were given {arguments}, but steps are counted for the whole model; pass the same to "
            "all parts"
        )
    fragments = {unit.fragment: unit for unit in units if unit.fragment is not None}
    if not fragments:
        return None

    def steps_are_announced() -> bool:
        return any(getattr(p, IN_OPTIMIZER, False) for unit in units for p in unit.sharded.parameters())

    reductions = [unit.reductions for unit in fragments.values()]
    ranks = next(iter(fragments.values())).ranks
    outer = OuterWatch(
        model, ranks, lambda: dict.fromkeys(axis for unit in fragments.values() for axis in unit.sharded.other_axes())
    )
    moments = OptimizerMoments(model, fragments, ranks)
    how = reductions, ranks, steps_are_announced, outer, moments
    elastic = [fragment for fragment in fragments if isinstance(fragment, ElasticFragment)]
    if elastic:
        training: LocalTraining = ElasticTraining(
            model, elastic, *how, lambda: [p for unit in units for p in unit.sharded.parameters()]
        )
    else:
        training = LocalTraining(model, [*fragments], *how)
    root.register_forward_pre_hook(training.before_forward, prepend=True)
    # FSDP sets up its model in a forward, of which hooks have been run, or for a state dict that is to be loaded.
    if all(unit.loaded_state is None for unit in fragments.values()):
        training.before_forward(root)
    for unit in fragments.values():
        unit.local_training = training
    return training


def _check_before_forwards(root: nn.Module, units: Sequence[StrategyUnit]) -> None:
    """Under FSDP_ZPP_CHECK, raise on every rank before a forward that would reuse changed weights on any rank."""
    gathers = [unit.gather for unit in units if unit.gather is not None and unit.keeps_weights]
    gathers = [gather for gather in gathers if (of := gather.secondary.source) is not None and of.compares_contents()]

    def before_forward(root: nn.Module, inputs: object) -> None:
        outdated = {gather.label for gather in gathers if gather.secondary.is_outdated}
        # The smallest groups first, so that findings on units inside a node reach all ranks of the other units.
        for group in sorted({gather.group: None for gather in gathers if gather.group}, key=dist.get_world_size):
            outdated.update(*from_each_rank(outdated, group))
        for gather in gathers:
            if gather.label in outdated:
                gather.secondary.raise_written()

    if gathers:
        root.register_forward_pre_hook(torch.compiler.disable(before_forward), prepend=True)


def _prefetch_secondary_shards(gathers: Sequence[WeightGather | None]) -> None:
    """Let one prefetcher make the secondary shards of all units whose weights can be read before their gather."""
    readable = [gather for gather in gathers if gather is not None and gather.secondary.source is not None]
    prefetcher = SecondaryShardPrefetcher(gather.secondary for gather in readable)
    for gather in readable:
        gather.prefetcher = prefetcher


def _check_agreement(model: str, units: Sequence[StrategyUnit]) -> None:
    """Raise on every rank if ranks have different units: in strategy, order, dtype or size."""
    # A dict, not a set: ranks must go through the groups in the same order, and a set's order differs by process.
    for group in dict.fromkeys(unit.ranks.group for unit in units):
        facts = {}
        for unit in units:
            if unit.ranks.group is group:
                # A node size that was left to the launcher and the same one given explicitly are no difference.
                strategy = replace(unit.strategy, gpus_per_node=unit.ranks.topology.gpus_per_node)
                facts[unit.sharded.name] = (
                    f"{strategy}, {shard_signature(unit.sharded.shards())}{', packed' * unit.packed}"
                )
        check_agreement(group, f"the first forward of {model}", facts)
