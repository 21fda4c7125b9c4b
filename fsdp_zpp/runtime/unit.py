"""One group of parameters under a strategy: how it is gathered, how it is reduced, what it has sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from fsdp_zpp.collectives.elastic_outer_step import ElasticOuterStep
from fsdp_zpp.collectives.error_state import ErrorFeedbackState
from fsdp_zpp.collectives.gradient_reduce import GradientReduce
from fsdp_zpp.collectives.hops import Traffic
from fsdp_zpp.collectives.mesh import ProcessMesh, as_launched, with_own_hop
from fsdp_zpp.collectives.node_share import NodeShare
from fsdp_zpp.collectives.outer_step import OuterStep
from fsdp_zpp.collectives.weight_gather import WeightGather
from fsdp_zpp.config.local_steps import LocalSteps
from fsdp_zpp.config.strategy import Strategy

from ._torch_checkpoint_load import hear_of_loads
from .elastic_fragment import ElasticFragment, active_local_steps
from .fragment import Fragment
from .full_shard import FullShardUnit
from .sharded import Sharded
from .step_reductions import StepReductions

if TYPE_CHECKING:
    from .local_training import LocalTraining

_ATTRIBUTE = "_fsdp_zpp_unit"
COMMUNICATORS = "_fsdp_zpp_parts"
"""Attribute in which a module lists what communicates for it besides its unit: its frozen base."""


class Communicator(Protocol):
    """A part of a model that communicates."""

    traffic: Traffic

    def invalidate(self) -> None:
        """Declare the secondary shard stale."""

    def full_shard_units(self, is_outermost: bool) -> Sequence[FullShardUnit] | None:
        """Return what FULL_SHARD would communicate; None if torch sends something of this part itself, uncounted."""

    def compute_device(self) -> torch.device | None:
        """Return the device on which it communicates; None if it has nothing to send."""


Checksums = Mapping[str, tuple[str, int]]
"""Dtypes and checksums of what a rank holds of parameters, by name."""


class Loaded(Protocol):
    """Codec state from a checkpoint that is not known yet to belong to the weights; see loaded_state.py."""

    @property
    def saved_with(self) -> Mapping[Unit, Checksums]:
        """Return, by unit, the checksums of the weights that it was saved with."""

    def forget(self) -> None:
        """Leave the state as it is."""


class Unit(Communicator, Protocol):
    """One group of parameters that is gathered and reduced together.

    Attributes:
        sharded: What FSDP has sharded of it.
        loads: Number of times that weights were loaded from a state dict.
        loaded_state: Its codec state from a checkpoint, until the next forward.
    """

    sharded: Sharded
    loads: int
    loaded_state: Loaded | None

    @property
    def errors(self) -> ErrorFeedbackState | None:
        """Return the error state of the unit's gradient codecs; None without error feedback."""

    @property
    def ranks(self) -> ProcessMesh:
        """Return the unit's ranks."""

    @property
    def keeps_weights(self) -> bool:
        """Return whether weights are kept from one gather to the next, which a change makes stale."""

    def invalidate(self, *, by_step: bool = False) -> None:
        """Declare the secondary shard stale; ``by_step`` says that the weights have changed by a step only."""

    def drop_gradients(self) -> None:
        """Drop the gradients accumulated from earlier micro-batches of the step."""


def attach(module: nn.Module, unit: Unit, path: str = "") -> None:
    """Make ``unit`` findable from ``module``.

    Args:
        module: The module.
        unit: The unit.
        path: The unit's path within the module, if this has several units.
    """
    vars(module).setdefault(_ATTRIBUTE, {})[unit] = path


def units_of(module: nn.Module) -> Mapping[Unit, str]:
    """Return the units attached to ``module`` itself, with their paths within it."""
    # vars, not getattr: FSDP1 forwards attributes that it lacks to the module it wraps, which may have another unit.
    units: Mapping[Unit, str] = vars(module).get(_ATTRIBUTE, {})
    return units


def unit_of(module: nn.Module) -> Unit | None:
    """Return the first unit attached to ``module`` itself."""
    return next(iter(units_of(module)), None)


def named_units(model: nn.Module) -> dict[Unit, str]:
    """Return the units of a model, outermost first, with their names; a shared unit has the first one's."""
    names: dict[Unit, str] = {}
    for name, module in model.named_modules():
        for unit, path in units_of(module).items():
            names.setdefault(unit, ".".join(filter(None, (name, path))))
    return names


class StrategyUnit:
    """A group of parameters that is gathered together and whose gradients are reduced together.

    Args:
        strategy: Its strategy. Parts that gain nothing on the mesh are inactive; see [Note: One node] in resolve.py.
        ranks: Its ranks.

    Attributes:
        ranks: Its ranks.
        resolved: The strategy as resolved on its ranks.
        scopes: Its effective scopes.
        traffic: Bytes it has sent.
        gather: Gathers its weights; None if torch's own all-gather does just that, or if nothing needs a gather.
        keep_unsharded: Whether the weights stay gathered until they change.
        packed: Whether it holds packed values, so that no codec may touch its weights.
        encodes_itself: Whether trained weights encode themselves for the all-gather, as other bytes.
        stock: Whether torch does everything, as it would without a strategy.
        left_unquantized: Names of frozen parameters that ``frozen=`` has left to it, by the reason.
        patterns: Patterns of the overrides that its call was given.
        reductions: Its gradient reductions, of which each step makes one.
        fragment: Exchanges its weights between nodes that train on their own; None if they don't.
        share: This rank's share of the exchanges, if all ranks of a node hold the same weights; None if they don't.
        local_training: Decides when the fragment is exchanged; None before the first forward.
        sharded: What FSDP has sharded of it.
        loads: Number of times that weights were loaded from a state dict.
        loaded_state: Its codec state from a checkpoint, until the next forward.
    """

    def __init__(self, strategy: Strategy, ranks: ProcessMesh) -> None:
        self.strategy = strategy
        local_steps = active_local_steps(strategy.local_steps, ranks)
        self.ranks = ranks = ranks if local_steps is None else with_own_hop(ranks)
        self.resolved = strategy.resolve(ranks.topology)
        self.scopes = self.resolved.scopes
        self.traffic = Traffic()
        self.sharded = Sharded()
        self.loads = 0
        self.loaded_state: Loaded | None = None
        self.packed = self.encodes_itself = self._in_place_of_torch = self.stock = False
        self.gather = self._make_gather()
        self.left_unquantized: dict[str, tuple[str, ...]] = {}
        self.patterns: tuple[str, ...] = ()
        self.keep_unsharded = self.gather is not None and self.scopes.parameters == "N"
        self.reductions = StepReductions(ranks, self.resolved, local_steps, self.traffic)
        self.local_training: LocalTraining | None = None
        self.share: NodeShare | None = None
        self.fragment = None if local_steps is None else self._make_fragment(local_steps)
        hear_of_loads(self)

    def _make_gather(self) -> WeightGather | None:
        if self.scopes.optimizer == "N":
            return None
        # Under the optimizer scope I each node has all shards, so there is no inter-node hop.
        within_node = self.scopes.optimizer == "I"
        mesh = self.ranks.own_node() if within_node else self.ranks
        # One hop that encodes nothing and keeps nothing would be torch's own all-gather over again.
        does_more = self.resolved.weights is not None or self.scopes.parameters == "N" or within_node
        replaces_one_hop = does_more or self._in_place_of_torch
        if mesh.inter is None and not (mesh.intra is not None and replaces_one_hop):
            return None
        return WeightGather(mesh, self.resolved.weights, self.scopes.parameters == "I", self.traffic)

    def full_shard_units(self, is_outermost: bool) -> list[FullShardUnit] | None:
        """Return what FULL_SHARD would communicate of it; None if torch sends something itself, uncounted."""
        if self.ranks.topology.world == 1:
            return []
        torch_gathers = self.gather is None and self.scopes.optimizer != "N"
        if self.stock or torch_gathers or (self.reduce is not None and self.reduce.is_native):
            return None
        weights, gradients = self.sharded.wire_dtypes()
        return [
            FullShardUnit(
                numel=self.sharded.numel(),
                trained_numel=self.sharded.trained_numel(),
                weight_nbytes=weights.itemsize,
                gradient_nbytes=gradients.itemsize,
                reshards=not is_outermost,
                topology=self.ranks.topology,
                own_nbytes=self.sharded.own_nbytes(),
            )
        ]

    def compute_device(self) -> torch.device | None:
        """Return the device on which FSDP gathers and computes; None if it has no parameters."""
        return self.sharded.compute_device()

    def leave_weights_uncoded(self, *, in_place_of_torch: bool = False) -> None:
        """Gather the weights as they are, since they hold packed values; to be called before the unit is used.

        Args:
            in_place_of_torch: Whether to do so even where torch's own all-gather would do; see [Note: Packed bytes].
        """
        self.packed, self._in_place_of_torch = True, in_place_of_torch
        # Packed values are a frozen base, unless they encode themselves: see [Note: Links] in resolve.py.
        if self.ranks.by_links and not self.encodes_itself:
            self.ranks = as_launched(self.ranks)
            self.resolved = self.strategy.resolve(self.ranks.topology)
            self.scopes = self.resolved.scopes
            self.reductions = StepReductions(self.ranks, self.resolved, None, self.traffic)
        self.resolved = replace(self.resolved, weights=None)
        self.gather = self._make_gather()
        self.keep_unsharded = self.gather is not None and self.scopes.parameters == "N"

    def _make_fragment(self, local_steps: LocalSteps) -> Fragment:
        # Under N all ranks of a node hold the same weights, so each of them exchanges a part.
        replicas = self.ranks.own_node() if self.scopes.optimizer == "N" and self.ranks.intra is not None else None
        self.share = None if replicas is None else NodeShare(replicas, self.traffic)
        # Looked up anew, since an adapter sets what it has sharded after this.
        shards, placements = lambda: self.sharded.named_shards(), lambda: self.sharded.placements()
        how = self.share, shards, placements, lambda: self.sharded.trained_names(), self.invalidate
        if local_steps.elastic is not None:
            return ElasticFragment(local_steps, ElasticOuterStep(local_steps, self.ranks, self.traffic), *how)
        return Fragment(local_steps, OuterStep(local_steps, self.ranks, self.traffic), *how)

    @property
    def mesh(self) -> ProcessMesh:
        """Return the ranks over which steps reduce gradients now: with local steps, often this node's."""
        return self.reductions.mesh

    @property
    def reduce(self) -> GradientReduce | None:
        """Return what reduces the gradients of steps now; None if there is only one rank, or torch does."""
        return self.reductions.current

    @property
    def keeps_weights(self) -> bool:
        """Return whether weights are kept from one gather to the next: a secondary shard, or what was gathered."""
        return self.gather is not None and (self.gather.secondary.keep or self.keep_unsharded)

    @property
    def can_prefetch(self) -> bool:
        """Return whether weights cross nodes once after a change, and are kept after that, encoded or whole."""
        return self.gather is not None and self.gather.secondary.hop is not None and self.scopes.parameters != "G"

    def invalidate(self, *, by_step: bool = False) -> None:
        """Declare stale what is kept of the old weights, the secondary shard above all; see :class:`SecondaryShard`.

        Args:
            by_step: Whether a training step changes the weights: by little, so that a delta codec may send the change.
        """
        if self.gather is not None:
            self.gather.secondary.mark_stale(by_step=by_step)
        self.sharded.weights_changed(by_step)

    def weights_loaded(self) -> None:
        """Handle weights that were loaded: from a state dict, or in place from a checkpoint."""
        self.invalidate()
        self.loads += 1
        if self.fragment is not None:
            self.fragment.weights_loaded()

    def drop_gradients(self) -> None:
        """Drop the gradients accumulated from earlier micro-batches of the step."""
        for reduction in self.reductions.all:
            reduction.accumulated.drop()
        self.sharded.drop_gradients()

    @property
    def errors(self) -> ErrorFeedbackState | None:
        """Return the error state of the unit's gradient codecs; None without error feedback."""
        return None if self.reduce is None else self.reduce.errors

    def rename(self, name: str) -> None:
        """Set the unit's name in profiles and errors."""
        outer = None if self.fragment is None else self.fragment.outer
        for part in (self.gather, *self.reductions.all, outer):
            if part is not None:
                part.label = name
