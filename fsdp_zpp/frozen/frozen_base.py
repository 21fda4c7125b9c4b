"""The frozen base of a model: all of its quantized weights."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor, nn

from fsdp_zpp.codecs import AsStored, Codec, codec_of_plain
from fsdp_zpp.comm.agreement import check_agreement, check_replicas
from fsdp_zpp.comm.hops import Traffic
from fsdp_zpp.comm.mesh import ProcessMesh, as_launched
from fsdp_zpp.names import original_path, parameter_name
from fsdp_zpp.runtime.full_tensors import unit_path
from fsdp_zpp.runtime.unit import unit_of

from ._torch_modules import freeze, frozen_sites
from .hugging_face import guard_save_pretrained, refuse_lost_ties, show_to_peft
from .weight import DoubleBuffer, FrozenUnit, FrozenWeight, Placement, UngroupedPayload, out_of_inference_mode

# ---- report
#
# Reports on a quantized base: its parameters and bytes, and why other frozen parameters stay as they are.

logger = logging.getLogger("fsdp_zpp")

_WHERE = {"N": "replicated on every rank", "I": "sharded inside nodes"}


@dataclass(frozen=True)
class FrozenReport:
    """A report on what ``quantize_frozen_params`` did.

    Attributes:
        model: The name of the model's class.
        codec: The codec of the weights.
        placement: The scope and the mesh, which determine the chunk of each weight that a rank holds.
        weights: The number of weights that were quantized, tied ones counted once.
        parameters: The number of their values.
        bytes_before: The bytes of these values in their previous dtype.
        bytes_after: The bytes that the quantized weights take on this rank.
        left: The names of frozen parameters that stay as they are, by reason.
        stored: The number of weights that were quantized already and keep their codes.
    """

    model: str
    codec: Codec
    placement: Placement
    weights: int
    parameters: int
    bytes_before: int
    bytes_after: int
    left: dict[str, tuple[str, ...]]
    stored: int = 0

    def __str__(self) -> str:
        topology = self.placement.mesh.topology
        left = "; ".join(f"{len(names)} {reason} ({names[0]}, ...)" for reason, names in self.left.items())
        return (
            f"{self.model}: frozen base {self._encoded}, {_WHERE[self.placement.scope]} on {topology}: {self.weights} "
            f"weights, {self.parameters:,} parameters, {_size(self.bytes_before)} before, {_size(self.bytes_after)} a "
            f"GPU after; left as they are: {left or 'none'}"
        )

    @property
    def _encoded(self) -> str:
        codec = codec_of_plain(self.codec)
        if isinstance(codec, AsStored) or self.stored == self.weights > 0:
            return "as stored"
        return f"as {codec}" + (f", but {self.stored} of {self.weights} weights as stored" if self.stored else "")


def log_report(reports: list[FrozenReport]) -> None:
    if reports and reports[0].placement.mesh.rank == 0:
        logger.info("%s", merge(reports))  # in one line


def merge(reports: list[FrozenReport]) -> FrozenReport:
    """Merge the reports on parts of a model; the model's name is that of the last report."""
    left: dict[str, tuple[str, ...]] = {}
    for report in reports:
        for reason, names in report.left.items():
            left[reason] = (*left.get(reason, ()), *names)
    counts = ("weights", "parameters", "bytes_before", "bytes_after", "stored")
    sums = {name: sum(getattr(report, name) for report in reports) for name in counts}
    return replace(reports[0], model=reports[-1].model, left=left, **sums)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**28 else f"{nbytes / 2**20:.2f} MiB"


# ---- base
#
# A frozen base has all frozen weights of a model. It groups them into units, each of which is gathered as a whole.
#
# Weights are quantized early, so that no full-precision copy lingers. Units depend on adapters and wrappers, which are
# added later, so units are made at the first use of a weight. A weight that is in no unit yet is held separately. Its
# unit will be the innermost module around it that FSDP wraps, or the item of the outermost ``nn.ModuleList``, whichever
# is further down the model. So a model that is wrapped only as a whole is gathered block by block, too. A module in
# neither of them is a unit of its own.

# The weights of each unit, by the name and placement of the unit.
Groups = dict[tuple[str, Placement], list[FrozenWeight]]


class FrozenBase:
    """All frozen weights of ``root``, a model or a part of one.

    Attributes:
        traffic: The bytes that gathers have sent.
        reports: Reports that are not in the log yet.
    """

    def __init__(self, root: nn.Module) -> None:
        # Weak: modules refer to the base through their weights, and one module must not keep the whole model alive.
        self.root = weakref.ref(root)
        self.traffic = Traffic()
        self.weights: list[FrozenWeight] = []
        self.reports: list[FrozenReport] = []

    @classmethod
    def of(cls, model: nn.Module) -> FrozenBase:
        """Return the base of ``model``; if there is none yet, make one that takes over the bases of parts."""
        bases = cls.below(model)
        if len(bases) == 1:
            root = bases[0].root()
            if root is model or (root is not None and all(module is not root for module in model.modules())):
                return bases[0]  # the base of this model, or of a larger model
        show_to_peft()
        guard_save_pretrained(model)
        base = cls(model)
        for part in bases:
            base._take_over(part)
        return base

    @staticmethod
    def below(model: nn.Module) -> list[FrozenBase]:
        """Return the bases with weights in ``model``; each part that was quantized separately has its own."""
        bases = dict.fromkeys(weight.base for _, _, _, weight in frozen_sites(model))
        return [base for base in bases if isinstance(base, FrozenBase)]

    def _take_over(self, part: FrozenBase) -> None:
        self.weights += part.weights
        self.reports += part.reports
        self.traffic.take_over(part.traffic)
        for weight in part.weights:
            # Take weights out of the part's units: this base makes new units, with one pair of buffers for all.
            weight.base, weight.holder = self, UngroupedPayload(weight.holder.local_payload(weight))

    def add(self, weight: FrozenWeight, row: Tensor, sites: Iterable[tuple[str, nn.Module, str]]) -> None:
        """Replace the parameter at ``sites`` by ``weight``, whose local payload is ``row``, uint8 [local_nbytes]."""
        weight.base, weight.holder = self, UngroupedPayload(row)
        self.weights.append(weight)
        for _, module, name in sites:
            freeze(module, name, weight)

    def drop(self, weights: Collection[FrozenWeight]) -> None:
        """Drop weights that have become plain parameters again. Collective if other weights stay."""
        self.weights = [weight for weight in self.weights if weight not in weights]
        if self.weights:
            self.make_units()  # the old units' payload shards would keep the memory of dropped weights

    def invalidate(self) -> None:
        pass  # frozen weights don't change

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        groups = dict.fromkeys(weight.placement.mesh.group for weight in self.weights)
        return [group for group in groups if group is not None]

    def make_units(self) -> None:
        """Group all weights into units, by the model as it is now; see the top of this section. Collective.

        Raises:
            ValueError: If ranks have different weights or units, if replicas have different values, or if sharding
                has untied adapters that were tied.
        """
        root = self.root()
        model = type(root).__name__ if root is not None else "the model"
        if root is not None:
            refuse_lost_ties(root)  # now both the adapters and the sharding are known
        groups = self._group(root)
        # Before the first gather: ranks with different units would gather payloads of different sizes.
        _check_agreement(model, groups)
        self._check_replicas(model, groups)  # before units exist: once they do, no use of a weight checks again
        buffers = DoubleBuffer()  # all units take turns in it
        for (name, _), weights in groups.items():
            FrozenUnit(f"frozen {name}", weights, self.traffic, buffers)
        self.log_reports()

    def prepare(self) -> None:
        """Make units if some weights have none; check all that a first use checks, but log nothing. Collective."""
        if any(isinstance(weight.holder, UngroupedPayload) for weight in self.weights):
            # Payload shards outlive a forward in inference mode.
            with patch.multiple(self, reports=[]), out_of_inference_mode():
                self.make_units()

    def log_reports(self) -> None:
        log_report(self.reports)
        self.reports = []

    def _group(self, root: nn.Module | None) -> Groups:
        """Return the weights of each unit, and rename them by their FQNs in ``root``, if the model is still alive."""
        groups: Groups = {}
        placed = set()
        modules = {} if root is None else dict(root.named_modules())
        for path, _, name, weight in frozen_sites(root) if root is not None else ():
            if weight in self.weights and weight not in placed:  # a tied weight belongs to the unit of its first module
                placed.add(weight)
                weight.name, unit = parameter_name(path, name), original_path(unit_path(path, modules))
                groups.setdefault((unit, weight.placement), []).append(weight)
        for weight in self.weights:
            if weight not in placed:  # its module has left the model, but may still be used by itself
                groups[weight.name, weight.placement] = [weight]
        return groups

    def _check_replicas(self, model: str, groups: Groups) -> None:
        device = self.weights[0].device  # compare on one device, since parts of the model may have been moved
        # A dict, not a set: ranks must compare placements in the same order, and a set's order differs by process.
        for placement in dict.fromkeys(placement for _, placement in groups):
            placed = (weight for weight in self.weights if weight.placement == placement)
            rows = [weight.holder.local_payload(weight).to(device) for weight in placed]
            check_replicas(rows, placement.mesh, placement.replicas, f"the frozen base of {model}")


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


# ---- nodes
#
# Checks that a frozen base is on the same nodes as the strategy that wraps its model.
#
# A base that is quantized before the model is wrapped is sharded over nodes of the launcher's size by default. A
# strategy with another node size is an error: if the base spans several of the strategy's nodes, every step would
# gather it between them. The sizes may differ if the user gave the base ``gpus_per_node``, or if the machine's links
# determine the strategy's node size ([Note: Links] in strategy.py).


def check_nodes(module: nn.Module, mesh: ProcessMesh) -> None:
    """Raise ValueError if the base of ``module`` has other nodes than ``mesh``; accept a node size that the user gave.

    Parts that are already wrapped are not checked.
    """
    if not _weights_of(module):
        return
    mesh = as_launched(mesh)
    for weight in _unplaced(module):
        placed = weight.placement.mesh
        if weight.placement.node_size_is_given or placed.topology == mesh.topology:
            continue
        if placed.group is None:  # the whole weight is on each rank
            raise ValueError(
                f"{weight.name} was quantized before there was a process group; call init_process_group before "
                "quantize_frozen_params or load_frozen_params"
            )
        if placed.group is mesh.group:
            raise ValueError(
                f"{weight.name} is placed on {placed.topology}, but the strategy that wraps it has {mesh.topology}; "
                f"pass gpus_per_node={mesh.topology.gpus_per_node} to quantize_frozen_params or load_frozen_params"
            )


def holds_base(module: nn.Module) -> bool:
    """Return whether ``module`` has quantized weights outside of parts that are already wrapped."""
    return bool(_unplaced(module))


def _unplaced(module: nn.Module) -> list[FrozenWeight]:
    wrapped = [part for part in module.modules() if part is not module and unit_of(part) is not None]
    placed = {weight for part in wrapped for weight in _weights_of(part)}
    return [weight for weight in _weights_of(module) if weight not in placed]


def _weights_of(module: nn.Module) -> list[FrozenWeight]:
    """Return the frozen weights below ``module``, tied ones once."""
    return list(dict.fromkeys(weight for _, _, _, weight in frozen_sites(module)))
