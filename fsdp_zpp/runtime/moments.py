"""Finds the optimizers' moments of a model whose nodes train on their own, and averages them over nodes.

[Note: States that nodes average]
A state is a moment if it is a floating-point tensor of as many values as this rank holds of its parameter: Adam's two,
Muon's momentum. After an average all nodes hold the same states bit for bit. A node whose optimizer has no state of a
parameter yet, because it never got a gradient there, counts as zeros, as its gradients would have been. Numbers, such
as step counters, are taken from the node that has made most steps with the parameter: with fewer steps, bias
corrections would make updates larger. Everything else can't be averaged, and is refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.collectives.agreement import agree, from_each_rank
from fsdp_zpp.collectives.hops import Traffic
from fsdp_zpp.collectives.mesh import ProcessMesh
from fsdp_zpp.collectives.moment_average import MomentAverage
from fsdp_zpp.collectives.node_share import NodeShare
from fsdp_zpp.config.local_steps import MOMENT_CODEC

from .fragment import Fragment
from .optimizer_state import local_state, restored
from .sharded import Sharded

_CALL = "an average of moments over nodes"
Number = int | float | Tensor
States = Mapping[str, torch.dtype | Number]
"""States that an optimizer keeps of a parameter, by name: the dtype of a moment, or a number."""
Key = tuple[str, str, int]
"""A unit's name, a parameter's FQN, and its optimizer's number."""


class MomentUnit(Protocol):
    """A unit as seen from here; see :class:`StrategyUnit`."""

    sharded: Sharded
    ranks: ProcessMesh
    traffic: Traffic
    share: NodeShare | None


@dataclass(frozen=True, eq=False)
class _Held:
    """A parameter that an optimizer holds, of which this rank has values.

    Attributes:
        unit: Its unit.
        name: Its FQN, or the first one of a flat parameter.
        parameter: The parameter.
        optimizer: The optimizer.
        group: Its group there.
        number: The optimizer's number among those that are known.
    """

    unit: MomentUnit
    name: str
    parameter: nn.Parameter
    optimizer: Optimizer
    group: Mapping[str, Any]
    number: int

    @property
    def key(self) -> Key:
        return self.unit.sharded.name, self.name, self.number

    @property
    def state(self) -> dict[str, Any]:
        """Return what the optimizer keeps of it; empty before its first step with it."""
        found: dict[str, Any] = self.optimizer.state.get(self.parameter, {})
        return found

    def described(self) -> States:
        """Return its states: of a moment the dtype, of others the number.

        Raises:
            ValueError: If nodes can't average them; see [Note: States that nodes average].
        """
        present = ((name, value) for name, value in self.state.items() if value is not None)
        return {name: self._described(name, value) for name, value in present}

    def _described(self, name: str, value: object) -> torch.dtype | Number:
        if isinstance(value, int | float):
            return value
        local = local_state(value)
        if isinstance(local, Tensor) and type(local) in (Tensor, nn.Parameter) and local.layout == torch.strided:
            if local.ndim == 0:
                return local.detach().cpu()
            numel = local_state(self.parameter).numel()
            if local.is_floating_point() and local.is_contiguous() and local.numel() == numel:
                return local.dtype
        shape = f" {local.dtype} of shape {list(local.shape)}" if isinstance(local, Tensor) else ""
        raise ValueError(
            f"{self.unit.sharded.name}: {type(self.optimizer).__name__} keeps {name!r} of {self.name} as a "
            f"{type(local).__name__}{shape}, which nodes can't average: a moment is a plain, contiguous floating-point "
            "tensor with as many values as the rank holds of the parameter; use another optimizer, or local steps "
            "without moments_every and stop"
        )

    def parts(self, state: str) -> Mapping[str, Tensor]:
        """Return what this rank holds of a state, by FQN."""
        return self.unit.sharded.named_parts(self.parameter, local_state(self.state[state]))

    def adopt(self, states: States) -> None:
        """Set the numbers, and add zeros for moments that are missing."""
        state = self.optimizer.state[self.parameter]
        counts_on_device = bool(self.group.get("fused") or self.group.get("capturable"))
        for name, value in states.items():
            present = state.get(name)
            if isinstance(value, torch.dtype):
                if present is None:
                    zeros = torch.zeros(local_state(self.parameter).shape, dtype=value)
                    state[name] = restored(zeros, None, self.parameter, counts_on_device)
            elif isinstance(value, Tensor):
                state[name] = restored(value, present, self.parameter, counts_on_device)
            else:
                state[name] = value


class OptimizerMoments:
    """Averages the moments of a model's optimizers over nodes.

    Args:
        model: The model's name in errors.
        units: Its units, by fragment, in an order that is the same on all ranks.
        ranks: All ranks.
    """

    def __init__(self, model: str, units: Mapping[Fragment, MomentUnit], ranks: ProcessMesh) -> None:
        self._model, self._units, self._ranks = model, units, ranks
        self._optimizers = next(iter(units)).optimizers

    def saw(self, optimizer: object) -> None:
        """Note an optimizer that steps the model's parameters."""
        if isinstance(optimizer, Optimizer):
            self._optimizers.add(optimizer)

    def check(self, fragments: Sequence[Fragment]) -> None:
        """Raise on every rank if any has a state that nodes can't average, or knows no optimizer. Collective.

        Args:
            fragments: As in :meth:`average`.

        Raises:
            ValueError: If so.
        """
        units = [self._units[fragment] for fragment in fragments]
        agree(self._ranks.group, lambda: self._described(units), call=_CALL)

    @torch.no_grad()
    def average(self, fragments: Sequence[Fragment], codec: Codec | None = MOMENT_CODEC) -> None:
        """Let all nodes continue from the mean of their moments, the same bit for bit. Collective.

        Args:
            fragments: Fragments of the model, the same on all ranks.
            codec: Encodes what nodes send; None sends fp32, so that the mean is exact.

        Raises:
            ValueError: If nodes can't average a state, nodes keep different states, or no optimizer is known; on every
                rank, before any moment is sent.
        """
        units = [self._units[fragment] for fragment in fragments]
        held, described = agree(self._ranks.group, lambda: self._described(units), call=_CALL)
        gone = self._gone_on_any_rank()
        described = {key: states for key, states in described.items() if key[2] not in gone}
        by_node = [
            from_each_rank(
                {key: states for key, states in described.items() if held[key].unit.ranks == mesh}, mesh.inter
            )
            for mesh in dict.fromkeys(unit.ranks for unit in units)
            if mesh.inter is not None
        ]
        agreed = agree(
            self._ranks.group,
            lambda: {key: states for each in by_node for key, states in _agreed(each).items()},
            call=_CALL,
        )
        for key, states in agreed.items():
            held[key].adopt(states)
        for unit in units:
            self._average(unit, {held[key]: states for key, states in agreed.items() if held[key].unit is unit}, codec)

    def _gone_on_any_rank(self) -> frozenset[int]:
        """Return the numbers of optimizers that some rank has freed already, others perhaps not yet. Collective."""
        gone = frozenset(range(self._optimizers.count)) - self._optimizers.alive().keys()
        group = self._ranks.group
        return gone if group is None else gone.union(*from_each_rank(gone, group))

    def _average(self, unit: MomentUnit, held: Mapping[_Held, States], codec: Codec | None) -> None:
        kinds: dict[tuple[str, int], dict[str, Tensor]] = {}
        for each, states in held.items():
            for state, value in states.items():
                if isinstance(value, torch.dtype):
                    kinds.setdefault((state, each.number), {}).update(each.parts(state))
        over_nodes = MomentAverage(unit.ranks, codec, unit.traffic, unit.sharded.name)
        placements = unit.sharded.placements()
        for _, moments in sorted(kinds.items(), key=lambda item: item[0]):
            if unit.share is None:
                over_nodes.average(moments, placements)
            else:
                whole = [*moments.values()]
                over_nodes.average(dict(zip(moments, unit.share.of(whole), strict=True)), placements)
                unit.share.gather(whole, unit.sharded.name)

    def _described(self, units: Sequence[MomentUnit]) -> tuple[dict[Key, _Held], dict[Key, States]]:
        held = {each.key: each for unit in units for each in self._held(unit)}
        return held, {key: each.described() for key, each in held.items()}

    def _held(self, unit: MomentUnit) -> Iterator[_Held]:
        """Yield the unit's parameters that optimizers hold and this rank has values of; the same on all nodes."""
        if not self._optimizers.count:
            raise ValueError(
                f"{self._model}: nodes average the moments of optimizers, but no optimizer derived from "
                "torch.optim.Optimizer has stepped its parameters; use such an optimizer, or local steps without "
                "moments_every and stop"
            )
        of: dict[int, list[tuple[Optimizer, dict[str, Any], int]]] = {}
        for number, optimizer in self._optimizers.alive().items():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    of.setdefault(id(parameter), []).append((optimizer, group, number))
        for parameter in unit.sharded.parameters():
            local: Tensor = local_state(parameter).detach()
            if local.numel():
                name = next(iter(unit.sharded.named_parts(parameter, local)))
                for holder in of.get(id(parameter), []):
                    yield _Held(unit, name, parameter, *holder)


def _agreed(by_node: Sequence[Mapping[Key, States]]) -> dict[Key, States]:
    """Return the states that all nodes are to have, given those that each node has.

    Raises:
        ValueError: If nodes keep different states of a parameter.
    """
    agreed: dict[Key, States] = {}
    for key in dict.fromkeys(key for node in by_node for key in node):
        present = [states for node in by_node if (states := node.get(key))]
        if not present:
            continue
        kinds = [_kinds(states) for states in present]
        if any(key not in node for node in by_node) or any(kind != kinds[0] for kind in kinds):
            raise ValueError(
                f"{key[0]}: nodes average the moments of {key[1]}, but their optimizers keep different states of it; "
                "use the same optimizers with the same parameters on every node"
            )
        agreed[key] = max(present, key=_steps)
    return agreed


def _kinds(states: States) -> dict[str, Hashable]:
    return {name: value if isinstance(value, torch.dtype) else "number" for name, value in states.items()}


def _steps(states: States) -> float:
    steps = states.get("step", 0)
    return 0.0 if isinstance(steps, torch.dtype) else float(steps)
