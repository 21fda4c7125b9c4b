"""Optimizers' moments of a model whose nodes train on their own: found, agreed on, and averaged over nodes.

[Note: States that nodes average]
A state is a moment if it is a floating-point tensor of as many values as this rank holds of its parameter: Adam's two,
Muon's momentum. After an average all nodes hold the same states bit for bit. A node whose optimizer has no state of a
parameter yet, because it never got a gradient there, counts as zeros, as its gradients would have been. Numbers, such
as step counters, are taken from the node that has made most steps with the parameter: the bias corrections of others
would divide by less, and make their updates larger. Everything else can't be averaged, and is refused.
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

Number = int | float | Tensor
States = Mapping[str, torch.dtype | Number]
"""States that an optimizer keeps of a parameter, by name: the dtype of a moment, or a number."""
Key = tuple[str, str, int]
"""A unit's name, a parameter's FQN, and its optimizer's place among those that hold it."""


class MomentUnit(Protocol):
    """A unit as seen from here; see :class:`StrategyUnit`."""

    sharded: Sharded
    ranks: ProcessMesh
    traffic: Traffic
    share: NodeShare | None


@dataclass(frozen=True)
class _Held:
    """A parameter that an optimizer holds, of which this rank has values."""

    unit: MomentUnit
    name: str
    parameter: nn.Parameter
    optimizer: Optimizer
    group: Mapping[str, Any]

    @property
    def state(self) -> dict[str, Any]:
        """Return what the optimizer keeps of it; empty before its first step with it."""
        found: dict[str, Any] = self.optimizer.state.get(self.parameter, {})
        return found

    def described(self) -> States:
        """Return its states.

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

    def adopt(self, states: States) -> None:
        """Set the numbers, and make those moments, of zeros, that are missing."""
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

    def saw(self, optimizer: object) -> None:
        """Note an optimizer that steps the model's parameters."""
        if isinstance(optimizer, Optimizer):
            next(iter(self._units)).optimizers[optimizer] = None

    @torch.no_grad()
    def average(self, fragments: Sequence[Fragment], codec: Codec | None = MOMENT_CODEC) -> None:
        """Let all nodes continue from the mean of their moments, the same bit for bit. Collective.

        Args:
            fragments: Fragments of the model, the same on all ranks.
            codec: Encodes what nodes send; None sends fp32, so that the mean is exact.

        Raises:
            ValueError: If nodes can't average a state, their states differ in kind, or no optimizer is known; on every
                rank, before any moment is sent.
        """
        units = [self._units[fragment] for fragment in fragments]
        held, described = agree(self._ranks.group, lambda: self._described(units))
        by_node = [described] if self._ranks.inter is None else from_each_rank(described, self._ranks.inter)
        agreed = agree(self._ranks.group, lambda: _agreed(by_node))
        for key, states in agreed.items():
            held[key].adopt(states)
        for unit in units:
            self._average(unit, {key: held[key] for key in agreed if key[0] == unit.sharded.name}, agreed, codec)

    def _average(
        self, unit: MomentUnit, held: Mapping[Key, _Held], agreed: Mapping[Key, States], codec: Codec | None
    ) -> None:
        label = unit.sharded.name
        over_nodes = MomentAverage(unit.ranks, codec, unit.traffic, label)
        kinds = {
            (place, state)
            for _, name, place in held
            for state, value in agreed[label, name, place].items()
            if isinstance(value, torch.dtype)
        }
        for place, state in sorted(kinds):
            moments: dict[str, Tensor] = {}
            for key, each in held.items():
                if key[2] == place and isinstance(agreed[key].get(state), torch.dtype):
                    moments.update(unit.sharded.named_parts(each.parameter, local_state(each.state[state])))
            share = unit.share
            own = moments if share is None else dict(zip(moments, share.of([*moments.values()]), strict=True))
            over_nodes.average(own, unit.sharded.placements())
            if share is not None:
                share.gather([*moments.values()], label)

    def _described(self, units: Sequence[MomentUnit]) -> tuple[dict[Key, _Held], dict[Key, States]]:
        held = {key: each for unit in units for key, each in self._held(unit)}
        return held, {key: each.described() for key, each in held.items()}

    def _held(self, unit: MomentUnit) -> Iterator[tuple[Key, _Held]]:
        """Yield what optimizers hold of a unit and this rank has values of; the same on all nodes."""
        optimizers = list(dict.fromkeys(each for fragment in self._units for each in fragment.optimizers))
        if not optimizers:
            raise ValueError(
                f"{self._model}: nodes average the moments of optimizers, but no optimizer derived from "
                "torch.optim.Optimizer has stepped its parameters; use such an optimizer, or local steps without "
                "moments_every and stop"
            )
        of: dict[int, list[tuple[Optimizer, dict[str, Any]]]] = {}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    of.setdefault(id(parameter), []).append((optimizer, group))
        for parameter in unit.sharded.parameters():
            local: Tensor = local_state(parameter).detach()
            if local.numel():
                name = next(iter(unit.sharded.named_parts(parameter, local)))
                for place, (optimizer, group) in enumerate(of.get(id(parameter), [])):
                    yield (unit.sharded.name, name, place), _Held(unit, name, parameter, optimizer, group)


def _agreed(by_node: Sequence[Mapping[Key, States]]) -> dict[Key, States]:
    """Return the states that all nodes are to have, given those that each has.

    Raises:
        ValueError: If nodes keep other moments of a parameter.
    """
    agreed: dict[Key, States] = {}
    for key in dict.fromkeys(key for described in by_node for key in described):
        present = [states for described in by_node if (states := described.get(key))]
        if not present:
            continue
        kinds = [_kinds(states) for states in present]
        if any(key not in described for described in by_node) or any(kind != kinds[0] for kind in kinds):
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
