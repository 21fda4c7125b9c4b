"""A unit of a model: parameters that one strategy gathers and reduces together."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Protocol, TypeVar

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_zpp.comm.error_feedback import ErrorFeedbackState
from fsdp_zpp.comm.flat_layout import Sharded
from fsdp_zpp.comm.gradient_reduce import GradientReduce, StepReductions
from fsdp_zpp.comm.hops import Traffic
from fsdp_zpp.comm.mesh import ProcessMesh, as_launched, with_own_hop
from fsdp_zpp.comm.weight_gather import WeightGather
from fsdp_zpp.local_steps.elastic import ElasticFragment, ElasticOuterStep, active_local_steps
from fsdp_zpp.local_steps.fragment import Fragment
from fsdp_zpp.local_steps.outer_step import OuterStep
from fsdp_zpp.names import did_you_mean
from fsdp_zpp.strategy.local_steps import LocalSteps
from fsdp_zpp.strategy.strategy import Strategy, override_for

from ._torch_flat_parts import hear_of_loads

if TYPE_CHECKING:
    from fsdp_zpp.local_steps.local_training import LocalTraining


# ---- parameters whose bytes are packed values, which a codec must not encode
#
# bitsandbytes packs two 4-bit codes into a byte, and presents the bytes to FSDP as bf16 (``bnb_4bit_quant_storage``).
# These bf16 numbers mean nothing, and rounding them would change the codes. So a unit that holds such a parameter is
# gathered without a codec.
#
# Trained weights that encode themselves for the all-gather, as torchao's float8 weights do, are gathered without a
# codec, too; see [Note: Own bytes] in fsdp2/_torch_weights.py.
#
# [Note: Packed bytes]
# Under fully_shard, this library gathers units that hold packed values, even ones that are otherwise left to torch.
# torch copies shards by ``_foreach_copy_``, which converts to fp32 on GPUs and turns all NaNs into the same one. About
# one in a thousand packed byte pairs is a NaN in bf16 (bitsandbytes, issue 1945). So no copy in this library may
# convert packed values either.

K = TypeVar("K", bound=Hashable)


def is_packed(parameter: Tensor) -> bool:
    """Return whether the elements of ``parameter`` stand for other values, so that its bytes must not change.

    Call it before FSDP shards the parameter: shards are plain tensors.
    """
    if isinstance(parameter, DTensor):
        return is_packed(parameter._local_tensor)
    return (
        hasattr(parameter, "__tensor_flatten__")  # a subclass whose values are computed from other tensors
        or encodes_itself(parameter)
        or getattr(parameter, "quant_state", None) is not None
        # bitsandbytes packs its parameters only when they move to a GPU; they count as packed before that, too.
        or any(cls.__module__.partition(".")[0] == "bitsandbytes" for cls in type(parameter).__mro__)
    )


def encodes_itself(parameter: Tensor) -> bool:
    """Return whether ``parameter`` decides itself what FSDP gathers, as torchao's float8 weights do."""
    return hasattr(parameter._local_tensor if isinstance(parameter, DTensor) else parameter, "fsdp_pre_all_gather")


def packed(parameters: Iterable[tuple[K, Tensor]]) -> dict[K, Tensor]:
    """Return the parameters that hold packed values, by the keys that they come with."""
    # Most parameters are plain: calling is_packed on each would take a third of the time that sharding a module takes.
    candidates = ((key, p) for key, p in parameters if type(p) is not nn.Parameter or "quant_state" in vars(p))
    return {key: parameter for key, parameter in candidates if is_packed(parameter)}


def packed_sites(model: nn.Module) -> set[tuple[nn.Module, str]]:
    """Return the module and the name of each packed parameter in ``model``."""
    sites = ((module, *named) for module in model.modules() for named in module._parameters.items())
    return set(packed(((module, name), p) for module, name, p in sites if p is not None))


def packed_facts(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the facts about packed parameters on which ranks must agree; see [Note: Agreement] in agreement.py."""
    return {f"values in {name}": f"packed as {type(parameter).__name__}" for name, parameter in parameters.items()}


# ---- strategies of modules by overrides

logger = logging.getLogger("fsdp_zpp")


def unwrapped(module: object) -> object:
    """Return the user's module inside of torch.compile's and checkpointing's wrappers."""
    for name in ("_orig_mod", "_checkpoint_wrapped_module"):
        if isinstance(module, nn.Module) and (inner := module._modules.get(name)) is not None:
            return unwrapped(inner)
    return module


def strategy_for(module: object, strategy: Strategy) -> Strategy:
    """Return the strategy for ``module`` alone: the one that overrides give it, or ``strategy`` without overrides."""
    own = override_for(type(unwrapped(module)), strategy.overrides)
    if own is None:
        return replace(strategy, overrides=())
    return own if own.gpus_per_node is not None else replace(own, gpus_per_node=strategy.gpus_per_node)


def strategies_below(module: nn.Module, outer: Strategy, strategy: Strategy) -> dict[nn.Module, Strategy]:
    """Return the strategies of a module and of all below it; ``outer`` is the strategy of its parent."""
    own = override_for(type(module), strategy.overrides) or outer
    found = {module: own}
    for child in module.children():
        found = strategies_below(child, own, strategy) | found
    return found


def warn_of_unmatched(root: nn.Module, model: str, patterns: Iterable[str]) -> None:
    """Warn of override patterns that match no module's class."""
    names = {type(module).__name__ for module in root.modules()}
    own = {name.removeprefix("FSDP") for name in names}  # fully_shard adds the prefix
    classes = names | own
    for pattern in dict.fromkeys(patterns):
        if not any(fnmatchcase(name, pattern) for name in classes):
            hint = did_you_mean(pattern.strip("*"), own, before="; ", most=3)
            logger.warning("%s: overrides for %r apply to no module: no class has such a name%s", model, pattern, hint)


# ---- units

_ATTRIBUTE = "_fsdp_zpp_unit"
COMMUNICATORS = "_fsdp_zpp_parts"
"""Attribute of a module that holds the frozen bases of its weights; bases communicate, but are not units."""


class Communicator(Protocol):
    traffic: Traffic

    def invalidate(self) -> None: ...


Checksums = Mapping[str, tuple[str, int]]
"""Dtype and checksum of a rank's shard of each parameter, by name."""


class Loaded(Protocol):
    """Codec state from a checkpoint, not checked yet against the weights; see checkpoint.py."""

    @property
    def saved_with(self) -> Mapping[ParameterUnit, Checksums]: ...

    def forget(self) -> None: ...


class ParameterUnit(Communicator, Protocol):
    """One group of parameters that is gathered and reduced together."""

    sharded: Sharded
    loads: int  # how often a state dict was loaded into its weights
    loaded_state: Loaded | None  # codec state from a checkpoint, until the next forward

    @property
    def errors(self) -> ErrorFeedbackState | None:
        """Return the error state of the unit's gradient codecs; None without error feedback."""

    @property
    def ranks(self) -> ProcessMesh: ...

    def invalidate(self, *, by_step: bool = False) -> None:
        """Declare all copies of the old weights stale, such as the secondary shard.

        ``by_step`` says that a training step changes the weights. Such a change is small, so a delta codec may send it.
        """

    def drop_gradients(self) -> None:
        """Drop the gradients accumulated from earlier micro-batches of the step."""


def attach(module: nn.Module, unit: ParameterUnit, path: str = "") -> None:
    """Make ``unit`` findable from ``module``; ``path`` is its path within a module that has several units."""
    vars(module).setdefault(_ATTRIBUTE, {})[unit] = path


def units_of(module: nn.Module) -> Mapping[ParameterUnit, str]:
    """Return the units attached to ``module`` itself, with their paths within it."""
    # vars, not getattr: FSDP1 looks up attributes that it lacks in the module it wraps, which may have another unit.
    units: Mapping[ParameterUnit, str] = vars(module).get(_ATTRIBUTE, {})
    return units


def unit_of(module: nn.Module) -> ParameterUnit | None:
    return next(iter(units_of(module)), None)


def named_units(model: nn.Module) -> dict[ParameterUnit, str]:
    """Return the units of a model, outermost first, with their names; a unit with several names gets the first."""
    names: dict[ParameterUnit, str] = {}
    for name, module in model.named_modules():
        for unit, path in units_of(module).items():
            names.setdefault(unit, ".".join(filter(None, (name, path))))
    return names


class StrategyUnit:
    """A unit under a :class:`Strategy`, with either FSDP."""

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
        # packed: no codec may encode the values. encodes_itself: the weights are gathered as the bytes that they encode
        # themselves to. stock: the unit is left to torch altogether.
        self.packed = self.encodes_itself = self._in_place_of_torch = self.stock = False
        self.gather = self._make_gather()
        self.left_unquantized: dict[str, tuple[str, ...]] = {}  # names of frozen parameters by reason
        self.patterns: tuple[str, ...] = ()  # of the overrides in the call that shards the unit
        self.keep_unsharded = self.gather is not None and self.scopes.parameters == "N"
        self.reductions = StepReductions(ranks, self.resolved, local_steps, self.traffic)
        self.local_training: LocalTraining | None = None  # before the first forward
        self.fragment = None if local_steps is None else self._make_fragment(local_steps)
        hear_of_loads(self)

    def _make_gather(self) -> WeightGather | None:
        """Return the gather of the unit's weights; None if torch's all-gather does the same, or no gather is needed."""
        if self.scopes.optimizer == "N":
            return None
        # Under the optimizer scope I each node has all shards, so there is no inter-node hop.
        within_node = self.scopes.optimizer == "I"
        mesh = self.ranks.own_node() if within_node else self.ranks
        # A single hop that neither encodes weights nor keeps them does the same as torch's own all-gather.
        does_more = self.resolved.weights is not None or self.scopes.parameters == "N" or within_node
        replaces_one_hop = does_more or self._in_place_of_torch
        if mesh.inter is None and not (mesh.intra is not None and replaces_one_hop):
            return None
        return WeightGather(mesh, self.resolved.weights, self.scopes.parameters == "I", self.traffic)

    def leave_weights_uncoded(self, *, in_place_of_torch: bool = False) -> None:
        """Gather without a codec; ``in_place_of_torch`` replaces torch's gather, too. Call before the first gather."""
        self.packed, self._in_place_of_torch = True, in_place_of_torch
        # Packed values that don't encode themselves are a frozen base: see [Note: Links] in strategy.py.
        if self.ranks.by_links and not self.encodes_itself:
            self.ranks = as_launched(self.ranks)
            self.resolved = self.strategy.resolve(self.ranks.topology)
            self.scopes = self.resolved.scopes
            self.reductions = StepReductions(self.ranks, self.resolved, None, self.traffic)
        self.resolved = replace(self.resolved, weights=None)
        self.gather = self._make_gather()
        self.keep_unsharded = self.gather is not None and self.scopes.parameters == "N"

    def _make_fragment(self, local_steps: LocalSteps) -> Fragment:
        if local_steps.elastic is not None:
            outer = ElasticOuterStep(local_steps, self.ranks, self.traffic)
            return ElasticFragment(local_steps, outer, self)
        return Fragment(local_steps, OuterStep(local_steps, self.ranks, self.traffic), self)

    @property
    def mesh(self) -> ProcessMesh:
        """Return the ranks over which steps reduce gradients now: with local steps, often this node's."""
        return self.reductions.mesh

    @property
    def reduce(self) -> GradientReduce | None:
        """Return the current reduction of gradients; None if there is only one rank, or torch reduces."""
        return self.reductions.current

    @property
    def keeps_weights(self) -> bool:
        """Return whether weights are kept from one gather to the next, until they change."""
        return self.gather is not None and (self.gather.secondary.keep or self.keep_unsharded)

    @property
    def can_prefetch(self) -> bool:
        """Return whether weights are sent between nodes once per change, and then kept, encoded or whole."""
        return self.gather is not None and self.gather.secondary.hop is not None and self.scopes.parameters != "G"

    def invalidate(self, *, by_step: bool = False) -> None:
        if self.gather is not None:
            self.gather.secondary.mark_stale(by_step=by_step)
        self.sharded.weights_changed(by_step)

    def weights_loaded(self) -> None:
        self.invalidate()
        self.loads += 1
        if self.fragment is not None:
            self.fragment.weights_loaded()

    def drop_gradients(self) -> None:
        for reduction in self.reductions.all:
            reduction.accumulated.drop()
        self.sharded.drop_gradients()

    @property
    def errors(self) -> ErrorFeedbackState | None:
        return None if self.reduce is None else self.reduce.errors

    def rename(self, name: str) -> None:
        outer = None if self.fragment is None else self.fragment.outer
        for part in (self.gather, *self.reductions.all, outer):
            if part is not None:
                part.label = name
