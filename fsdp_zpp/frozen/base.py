"""A frozen base, all frozen weights of a model: they are grouped into units once the model has its final shape.

Weights are quantized early, so that no full-precision copy lingers, but which weights to gather together is known late:
adapters and wrappers come afterwards. So units are made at the first use of a weight, from the model as it is then. A
unit is a module that FSDP wraps, or an item of the outermost ``nn.ModuleList`` if that is smaller, so that a model that
is wrapped only once is gathered block by block, too; a module in neither is a unit of its own. Until then, and for
weights that are added later, each weight's codes are held separately.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_zpp.collectives.agreement import check_agreement
from fsdp_zpp.collectives.hops import Traffic
from fsdp_zpp.collectives.replicas import check_replicas
from fsdp_zpp.module_names import original_path, parameter_name
from fsdp_zpp.runtime.full_shard import FullShardUnit
from fsdp_zpp.runtime.tensors_of_model import unit_path

from ._torch_replacing import refuse_replacing
from .double_buffer import DoubleBuffer
from .hugging_face.patches import guard_save_pretrained, refuse_lost_ties, show_to_peft
from .modules import freeze, frozen_sites
from .placement import Placement
from .report import FrozenReport, log_report
from .unit import FrozenUnit
from .weight import FrozenWeight, out_of_inference_mode

Groups = dict[tuple[str, Placement], list[FrozenWeight]]
"""The weights of each unit, by its name and their placement."""


class FrozenBase:
    """All frozen weights of one model.

    Args:
        root: The model, or as much of it as is known.

    Attributes:
        traffic: Bytes that its gathers have sent.
        weights: All frozen weights.
        reports: Reports on what was quantized since the last log line.
    """

    def __init__(self, root: nn.Module) -> None:
        # Weak: the modules of a part refer to the base through their weights, and must not keep the whole model alive.
        self.root = weakref.ref(root)
        self.traffic = Traffic()
        self.weights: list[FrozenWeight] = []
        self.reports: list[FrozenReport] = []

    @classmethod
    def of(cls, model: nn.Module) -> FrozenBase:
        """Return the base of ``model``, made anew if need be; it takes over the bases that parts of ``model`` have."""
        bases = cls.below(model)
        if len(bases) == 1:
            root = bases[0].root()
            if root is model or (root is not None and all(module is not root for module in model.modules())):
                return bases[0]  # the base of this model, or of a larger one that contains it
        show_to_peft()
        refuse_replacing()
        guard_save_pretrained(model)
        base = cls(model)
        for part in bases:
            base._take_over(part)
        return base

    @staticmethod
    def below(model: nn.Module) -> list[FrozenBase]:
        """Return the bases that have weights in ``model``; there may be several before their first use."""
        bases = dict.fromkeys(weight.base for _, _, _, weight in frozen_sites(model))
        return [base for base in bases if isinstance(base, FrozenBase)]

    def _take_over(self, part: FrozenBase) -> None:
        self.weights += part.weights
        self.reports += part.reports
        self.traffic.take_over(part.traffic)
        for weight in part.weights:
            # Out of their units, which are made again for the larger model, with one pair of buffers.
            weight.base, weight.holder = self, UngroupedPayload(weight.holder.local_payload(weight))

    def add(self, weight: FrozenWeight, row: Tensor, sites: Iterable[tuple[str, nn.Module, str]]) -> None:
        """Put a weight in place of a parameter.

        Args:
            weight: The weight.
            row: Its local payload, uint8 [local_nbytes].
            sites: For each module that uses the parameter: its path, the module, and the parameter's name there.
        """
        weight.base, weight.holder = self, UngroupedPayload(row)
        self.weights.append(weight)
        for _, module, name in sites:
            freeze(module, name, weight)

    def drop(self, weights: Collection[FrozenWeight]) -> None:
        """Drop weights that are plain parameters again. Collective if other weights stay."""
        self.weights = [weight for weight in self.weights if weight not in weights]
        if self.weights:
            self.make_units()  # anew: a payload shard that contains a dropped weight would keep its memory

    def invalidate(self) -> None:
        """Do nothing, since frozen weights don't change."""

    def full_shard_units(self, is_outermost: bool) -> list[FullShardUnit]:
        """Return what FULL_SHARD would communicate of the weights, in the dtype that they show."""
        return [
            FullShardUnit(w.shape.numel(), 0, w.dtype.itemsize, 0, not is_outermost, w.placement.mesh.topology)
            for w in self.weights
        ]

    def compute_device(self) -> torch.device | None:
        """Return the device of the payloads, which are gathered where they are; None if no weights are left."""
        return self.weights[0].device if self.weights else None

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Return the groups that its weights are placed on; none if each process has all weights."""
        groups = dict.fromkeys(weight.placement.mesh.group for weight in self.weights)
        return [group for group in groups if group is not None]

    @property
    def units(self) -> list[FrozenUnit]:
        """Return its units; none before the first use of a weight."""
        return list({weight.holder: None for weight in self.weights if isinstance(weight.holder, FrozenUnit)})

    def make_units(self) -> None:
        """Group all weights into units, by the shape that the model has now. Collective. See the top of this file.

        Raises:
            ValueError: If ranks have different weights, if ranks that hold the same part of a weight have different
                values, or if adapters were tied and sharding has untied them.
        """
        root = self.root()
        model = type(root).__name__ if root is not None else "the model"
        if root is not None:
            refuse_lost_ties(root)  # only now both the adapters and the sharding are known
        groups = self._group(root)
        # Before the first gather: ranks with different units would gather payloads of different sizes.
        _check_agreement(model, groups)
        self._check_replicas(model, groups)  # before there are units, or a second use would not check
        buffers = DoubleBuffer()  # one for all units, since they take turns in its memory
        for (name, _), weights in groups.items():
            FrozenUnit(f"frozen {name}", weights, self.traffic, buffers)
        self.log_reports()

    def prepare(self) -> None:
        """Make units, with all checks of a first use, unless there are some, and log nothing. Collective.

        Raises:
            ValueError: Where :meth:`make_units` raises it.
        """
        reports, self.reports = self.reports, []
        try:
            if any(isinstance(weight.holder, UngroupedPayload) for weight in self.weights):
                with out_of_inference_mode():  # the first use may be in inference mode, and payload shards outlive it
                    self.make_units()
        finally:
            self.reports = reports

    def log_reports(self) -> None:
        """Log what was quantized since the last log line, as one line."""
        log_report(self.reports)
        self.reports = []

    def _group(self, root: nn.Module | None) -> Groups:
        """Return the weights of each unit, named by their FQNs in the model, if that is still alive."""
        groups: Groups = {}
        placed = set()
        for name, unit, weight in _named_units(root) if root is not None else ():
            if weight in self.weights and weight not in placed:  # a tied weight belongs to the unit of its first module
                placed.add(weight)
                weight.name = name
                groups.setdefault((unit, weight.placement), []).append(weight)
        for weight in self.weights:
            if weight not in placed:  # the module that had it has left the model, but may still be used by itself
                groups[weight.name, weight.placement] = [weight]
        return groups

    def _check_replicas(self, model: str, groups: Groups) -> None:
        device = self.weights[0].device  # a model may have been moved in part
        # In the order of the units: all ranks must compare placements in one order, and a set's order differs by rank.
        for placement in dict.fromkeys(placement for _, placement in groups):
            placed = (weight for weight in self.weights if weight.placement == placement)
            rows = [weight.holder.local_payload(weight).to(device) for weight in placed]
            check_replicas(rows, placement.mesh, placement.replicas, f"the frozen base of {model}")


class UngroupedPayload:
    """Holds the local payload of one weight that is in no unit yet. See the top of this file.

    Args:
        row: The local payload, uint8 [local_nbytes].
    """

    def __init__(self, row: Tensor) -> None:
        self._row = row

    @property
    def device(self) -> torch.device:
        """Return the device that the codes are on."""
        return self._row.device

    def move(self, device: torch.device) -> None:
        """Move the codes to another device."""
        self._row = self._row.to(device)

    def local_payload(self, weight: FrozenWeight) -> Tensor:
        """Return this rank's chunk of the weight, uint8 [local_nbytes]."""
        return self._row

    def gathered_payload(self, weight: FrozenWeight, device: torch.device) -> Tensor:
        """Make the units of the base, and gather the one that has the weight. Collective."""
        with out_of_inference_mode():  # the first use may be in inference mode, and payload shards outlive it
            weight.base.make_units()
        return weight.holder.gathered_payload(weight, device)


def _check_agreement(model: str, groups: Groups) -> None:
    """Raise on every rank if ranks have different weights, or group them into different units."""
    # A dict, not a set: ranks must go through the groups in the same order, and a set's order differs by process.
    for group in dict.fromkeys(placement.mesh.group for _, placement in groups):
        facts = {
            f"unit {unit}": f"{[(w.name, tuple(w.shape), str(w.codec)) for w in weights]} placed {placement.scope}"
            for (unit, placement), weights in groups.items()
            if placement.mesh.group is group
        }
        check_agreement(group, f"the first use of the frozen base of {model}", facts)


def _named_units(root: nn.Module) -> list[tuple[str, str, FrozenWeight]]:
    """Return for each frozen weight below ``root``: its name, the name of its unit, and the weight."""
    modules = dict(root.named_modules())
    named = []
    for path, _, name, weight in frozen_sites(root):
        unit = original_path(unit_path(path, modules))
        named.append((parameter_name(path, name), unit, weight))
    return named
