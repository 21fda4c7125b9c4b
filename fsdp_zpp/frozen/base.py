"""The frozen base of a model: its weights, and how they are put into units once the model has its final shape.

[Note: Settling]
Weights are quantized early, so that no full-precision copy lingers, but what is to be gathered together is known late:
adapters and wrappers come afterwards. So units are made at the first use of a weight, from the model as it is then.
What FSDP wraps is a unit, or an item of the outermost ``nn.ModuleList`` where that is smaller, so that a base is
gathered block by block in a model that is wrapped once, too; elsewhere a module alone is one. Until then, and for
weights that are added later, a weight's codes are held by themselves.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from ..agreement import check_agreement
from ..hop import Traffic
from ..replicas import check_replicas
from ._peft import refuse_lost_ties, show_to_peft
from .module import frozen_modules, frozen_sites
from .placement import Placement
from .report import FrozenReport, log_report
from .residency import Residency
from .save_pretrained import guard_save_pretrained
from .unit import FrozenUnit
from .weight import FrozenWeight, out_of_inference_mode

_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class FrozenBase:
    """The frozen weights of one model.

    Args:
        root: The model, or as much of it as is known.

    Attributes:
        traffic: What its gathers have sent.
        weights: All of them.
        units: Those that are gathered together, after settling.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = weakref.ref(root)
        self.traffic = Traffic()
        self.weights: list[FrozenWeight] = []
        self.units: list[FrozenUnit] = []
        self.reports: list[FrozenReport] = []

    def invalidate(self) -> None:
        """Frozen weights don't change."""

    def settle(self) -> None:
        """Make units of all weights, by the shape that the model has now. Collective.

        Raises:
            ValueError: If ranks have different weights, if ranks that hold the same part of a weight have different
                values, or if adapters were tied and sharding has untied them.
        """
        root = self.root()
        model = type(root).__name__ if root is not None else "the model"
        if root is not None:
            refuse_lost_ties(root)
        groups: dict[tuple[str, Placement], list[FrozenWeight]] = {}
        placed = set()
        for name, key, weight in _grouped(root) if root is not None else ():
            if weight in self.weights and weight not in placed:
                placed.add(weight)
                weight.name = name
                groups.setdefault((key, weight.placement), []).append(weight)
        for weight in self.weights:
            if weight not in placed:  # the module that held it is no part of the model any more
                groups[weight.name, weight.placement] = [weight]
        _check_agreement(model, groups)
        residency = Residency()
        self.units = [
            FrozenUnit(f"frozen {key}", weights, self.traffic, residency) for (key, _), weights in groups.items()
        ]
        self._check_replicas(model)
        log_report(self.reports)
        self.reports = []

    def forget(self, weights: set[FrozenWeight]) -> None:
        """Let go of weights that are plain parameters again. Collective, if others stay."""
        self.weights = [weight for weight in self.weights if weight not in weights]
        self.units = []
        if self.weights:
            self.settle()

    def _check_replicas(self, model: str) -> None:
        placements = {unit.placement for unit in self.units}
        for placement in sorted(placements, key=lambda placement: placement.letter):
            rows = [weight.held.row_of(weight) for weight in self.weights if weight.placement == placement]
            check_replicas(rows, placement.mesh, placement.replicas, f"the frozen base of {model}")


class Unsettled:
    """The codes of one weight that is in no unit yet. See [Note: Settling].

    Args:
        row: This rank's chunk.
    """

    def __init__(self, row: Tensor) -> None:
        self._row = row

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self._row.device

    def move(self, device: torch.device) -> None:
        """Keep the codes on another device."""
        self._row = self._row.to(device)

    def row_of(self, weight: FrozenWeight) -> Tensor:
        """This rank's chunk of the weight."""
        return self._row

    def rows_of(self, weight: FrozenWeight, device: torch.device) -> Tensor:
        """Settle the base, and gather the weight's unit. Collective."""
        with out_of_inference_mode():
            weight.base.settle()
        return weight.held.rows_of(weight, device)


def base_for(model: nn.Module) -> FrozenBase:
    """The base of ``model``'s frozen weights; takes over what parts of ``model`` have been given before."""
    bases = list({weight.base: None for _, _, weight in frozen_modules(model)})
    if len(bases) == 1:
        root = bases[0].root()
        if root is model or (root is not None and all(module is not root for module in model.modules())):
            return bases[0]  # of this model, or of a larger one of which it is a part
    show_to_peft()
    guard_save_pretrained(model)
    base = FrozenBase(model)
    for older in bases:
        base.weights += older.weights
        base.reports += older.reports
        for (kind, level), sent in older.traffic.sent.items():
            base.traffic.add(kind, level, sent)
    for weight in base.weights:
        weight.base, weight.held = base, Unsettled(weight.held.row_of(weight))
    return base


def original_path(path: str) -> str:
    """A path without what wrappers put into it."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def parameter_name(path: str, own_name: str) -> str:
    """The name in its model of a parameter of the module at ``path``."""
    return original_path(f"{path}.{own_name}").removeprefix(".")


def _check_agreement(model: str, groups: dict[tuple[str, Placement], list[FrozenWeight]]) -> None:
    """Raise on every rank if ranks have different weights, or group them into different units."""
    for group in dict.fromkeys(placement.mesh.group for _, placement in groups):
        facts = {
            f"unit {unit}": f"{[(w.name, tuple(w.shape), str(w.codec)) for w in weights]} placed {placement.letter}"
            for (unit, placement), weights in groups.items()
            if placement.mesh.group is group
        }
        check_agreement(group, f"the first use of the frozen base of {model}", facts)


def _grouped(root: nn.Module) -> list[tuple[str, str, FrozenWeight]]:
    """For each frozen weight below ``root`` its name, the name of the unit that it belongs to, and the weight."""
    kinds = dict(root.named_modules())
    found = []
    for path, _, name, weight in frozen_sites(root):
        parts = path.split(".")
        ancestors = [".".join(parts[:i]) for i in range(1, len(parts) + 1)]
        wrapped = [a for a in ancestors if isinstance(kinds[a], (FullyShardedDataParallel, FSDPModule))]
        items = [a for a in ancestors if isinstance(kinds[a.rpartition(".")[0]], nn.ModuleList)]
        unit = original_path(max(wrapped[-1:] + items[:1] or [path], key=len))
        found.append((parameter_name(path, name), unit, weight))
    return found
