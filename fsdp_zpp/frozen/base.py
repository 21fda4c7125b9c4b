"""The frozen base of a model: how its weights are grouped into units once the model has its final shape.

Weights are quantized early, so that no full-precision copy lingers, but which weights to gather together is known late:
adapters and wrappers come afterwards. So units are made at the first use of a weight, from the model as it is then. A
unit is a module that FSDP wraps, or an item of the outermost ``nn.ModuleList`` if that is smaller, so that a model that
is wrapped only once is gathered block by block, too; a module in neither is a unit of its own. Until then, and for
weights that are added later, each weight's codes are held separately.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from fsdp_zpp.collectives.agreement import check_agreement
from fsdp_zpp.collectives.replicas import check_replicas
from fsdp_zpp.module_names import original_path, parameter_name

from ._hugging_face import guard_save_pretrained, refuse_lost_ties, show_to_peft
from ._torch_replacing import refuse_replacing
from .double_buffer import DoubleBuffer
from .modules import frozen_modules, frozen_sites
from .placement import Placement
from .report import log_report
from .unit import FrozenUnit
from .weight import FrozenBase, FrozenWeight, out_of_inference_mode


def make_units(base: FrozenBase) -> None:
    """Group all weights into units, by the shape that the model has now. Collective. See the top of this file.

    Raises:
        ValueError: If ranks have different weights, if ranks that hold the same part of a weight have different
            values, or if adapters were tied and sharding has untied them.
    """
    root = base.root()
    model = type(root).__name__ if root is not None else "the model"
    if root is not None:
        refuse_lost_ties(root)  # only now both the adapters and the sharding are known
    groups: dict[tuple[str, Placement], list[FrozenWeight]] = {}
    placed = set()
    for name, key, weight in _grouped(root) if root is not None else ():
        if weight in base.weights and weight not in placed:  # a tied weight belongs to the unit of its first module
            placed.add(weight)
            weight.name = name
            groups.setdefault((key, weight.placement), []).append(weight)
    for weight in base.weights:
        if weight not in placed:  # the module that had it has left the model, but may still be used by itself
            groups[weight.name, weight.placement] = [weight]
    # Before the first gather: ranks with different units would gather payloads of different sizes.
    _check_agreement(model, groups)
    buffers = DoubleBuffer()  # one for all units, since they take turns in its memory
    for (key, _), weights in groups.items():
        FrozenUnit(f"frozen {key}", weights, base.traffic, buffers)
    _check_replicas(base, model)
    log_report(base.reports)
    base.reports = []


def units_of(base: FrozenBase) -> list[FrozenUnit]:
    """The units of a base; none before the first use of a weight."""
    return list({weight.holder: None for weight in base.weights if isinstance(weight.holder, FrozenUnit)})


def drop_weights(base: FrozenBase, weights: set[FrozenWeight]) -> None:
    """Drop weights that are plain parameters again. Collective, if others stay."""
    base.weights = [weight for weight in base.weights if weight not in weights]
    if base.weights:
        make_units(base)  # anew: a payload shard that contains a dropped weight would keep its memory


def _check_replicas(base: FrozenBase, model: str) -> None:
    # In the order of the units: all ranks must compare placements in one order, and a set has another on each of them.
    for placement in dict.fromkeys(unit.placement for unit in units_of(base)):
        rows = [weight.holder.local_payload(weight) for weight in base.weights if weight.placement == placement]
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
        """The device that the codes are on."""
        return self._row.device

    def move(self, device: torch.device) -> None:
        """Move the codes to another device."""
        self._row = self._row.to(device)

    def local_payload(self, weight: FrozenWeight) -> Tensor:
        """This rank's chunk of the weight, uint8 [local_nbytes]."""
        return self._row

    def gathered_payload(self, weight: FrozenWeight, device: torch.device) -> Tensor:
        """Make the units of the base, and gather the one that has the weight. Collective."""
        with out_of_inference_mode():  # the first use may be in inference mode, and payload shards outlive it
            make_units(weight.base)
        return weight.holder.gathered_payload(weight, device)


def base_for(model: nn.Module) -> FrozenBase:
    """The base of ``model``'s frozen weights; it takes over the bases that parts of ``model`` have."""
    bases = list({weight.base: None for _, _, weight in frozen_modules(model)})
    if len(bases) == 1:
        root = bases[0].root()
        if root is model or (root is not None and all(module is not root for module in model.modules())):
            return bases[0]  # the base of this model, or of a larger one that contains it
    show_to_peft()
    refuse_replacing()
    guard_save_pretrained(model)
    base = FrozenBase(model)
    for older in bases:
        base.weights += older.weights
        base.reports += older.reports
        for (kind, level), sent in older.traffic.sent.items():
            base.traffic.add(kind, level, sent)
    for weight in base.weights:
        # Out of their units, which are made again for the larger model, with one pair of buffers.
        weight.base, weight.holder = base, UngroupedPayload(weight.holder.local_payload(weight))
    return base


def _check_agreement(model: str, groups: dict[tuple[str, Placement], list[FrozenWeight]]) -> None:
    """Raise on every rank if ranks have different weights, or group them into different units."""
    # A dict, not a set: ranks must go through the groups in the same order, and a set's order differs by process.
    for group in dict.fromkeys(placement.mesh.group for _, placement in groups):
        facts = {
            f"unit {unit}": f"{[(w.name, tuple(w.shape), str(w.codec)) for w in weights]} placed {placement.scope}"
            for (unit, placement), weights in groups.items()
            if placement.mesh.group is group
        }
        check_agreement(group, f"the first use of the frozen base of {model}", facts)


def _grouped(root: nn.Module) -> list[tuple[str, str, FrozenWeight]]:
    """For each frozen weight below ``root``: its name, the name of its unit, and the weight."""
    kinds = dict(root.named_modules())
    found = []
    for path, _, name, weight in frozen_sites(root):
        parts = path.split(".")
        ancestors = [".".join(parts[:i]) for i in range(1, len(parts) + 1)]
        wrapped = [a for a in ancestors if isinstance(kinds[a], (FullyShardedDataParallel, FSDPModule))]
        items = [a for a in ancestors if isinstance(kinds[a.rpartition(".")[0]], nn.ModuleList)]
        # The innermost wrapped module or the outermost item of a list, whichever is further down: the longer path.
        unit = original_path(max(wrapped[-1:] + items[:1] or [path], key=len))
        found.append((parameter_name(path, name), unit, weight))
    return found
