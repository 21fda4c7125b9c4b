"""Reshards a frozen base over the nodes of the strategy that wraps its model.

A base may be quantized before its model is wrapped; it is then sharded, by default, over nodes of the launcher's size.
The strategy may give another size (``gpus_per_node``), and a base that spans several of its nodes would be gathered
between them in every step. So the strategy decides: when a model is wrapped, a base with the default placement is
resharded, without decoding, since chunks are whole blocks. A base whose ``gpus_per_node`` was given stays.
"""

from __future__ import annotations

import logging

import torch.distributed as dist
from torch import Tensor, nn

from fsdp_zpp.collectives.agreement import check_agreement
from fsdp_zpp.collectives.devices import for_collectives
from fsdp_zpp.collectives.hops import Traffic, hop_over
from fsdp_zpp.collectives.mesh import ProcessMesh
from fsdp_zpp.module_names import model_name
from fsdp_zpp.runtime.rank_layout import launched_node_size
from fsdp_zpp.runtime.unit import unit_of

from .base import UngroupedPayload
from .file_format import Storable, codes_and_scales, local_payload_from_slices
from .modules import frozen_modules
from .placement import Placement
from .selection import Selection
from .weight import FrozenWeight

logger = logging.getLogger("fsdp_zpp")


def check_base_agreement(
    call: str,
    model: nn.Module,
    group: dist.ProcessGroup | None,
    gpus_per_node: int | None,
    selection: Selection,
    facts: dict[str, object],
) -> None:
    """Raise on every rank of ``group`` unless all ranks pass the same arguments and the same weights. Collective.

    Args:
        call: The public function that was called, for the error.
        model: The model.
        group: The ranks; None means this process alone, which has nobody to agree with.
        gpus_per_node: The node size that the user gave.
        selection: The weights that are to be quantized.
        facts: Its other arguments, by name.

    Raises:
        ValueError: If they differ.
    """
    if group is None:
        return
    # A size that was given differs from the same size by default: only the default one follows a strategy later.
    nodes = gpus_per_node or f"{launched_node_size(group)} (LOCAL_WORLD_SIZE)"
    chosen = {f"weight {c.name}": f"{c.parameter.dtype} {list(c.parameter.shape)}" for c in selection.chosen}
    check_agreement(group, f"{call}({model_name(model)})", {"gpus_per_node": nodes} | facts | chosen)


def wrapping_mesh(model: nn.Module, group: dist.ProcessGroup | None) -> ProcessMesh | None:
    """The mesh on ``group`` of the strategies that wrap parts of ``model``; None if there are none.

    Raises:
        ValueError: If their node sizes differ.
    """
    meshes = {unit.ranks for unit in map(unit_of, model.modules()) if unit is not None and unit.ranks.group is group}
    if len(meshes) > 1:
        raise ValueError(
            f"the strategies that wrap parts of this {model_name(model)} have different node sizes "
            f"({', '.join(sorted(str(mesh.topology) for mesh in meshes))}); pass gpus_per_node= to choose that of the "
            "frozen base"
        )
    return next(iter(meshes), None)


def follow_strategy(module: nn.Module, mesh: ProcessMesh) -> None:
    """Reshard the frozen base of ``module`` over ``mesh``. Collective. See the top of this file.

    Args:
        module: The module that is about to be wrapped. Parts that are already wrapped stay where their strategies have
            put them.
        mesh: The ranks of the strategy.

    Raises:
        ValueError: If a weight would have to move, but its codec is user-defined, so that its chunks can't be re-cut.
    """
    wrapped = [m for m in module.modules() if m is not module and unit_of(m) is not None]
    placed = {weight for part in wrapped for _, _, weight in frozen_modules(part)}
    weights = dict.fromkeys(weight for _, _, weight in frozen_modules(module) if weight not in placed)
    moving = [weight for weight in weights if _lies_elsewhere(weight.placement, mesh)]
    for weight in moving:  # all before the first moves, so that an error leaves the base as it was
        _check_movable(weight, mesh)
    for weight in moving:
        _move(weight, Placement(weight.placement.scope, mesh))
    if moving and mesh.rank == 0:
        logger.info(
            "%s: %d frozen weights are now sharded over %s, the nodes of the strategy that wraps them",
            model_name(module),
            len(moving),
            mesh.topology,
        )


def _lies_elsewhere(placement: Placement, mesh: ProcessMesh) -> bool:
    """Whether a base has the default placement, over the ranks of ``mesh`` but on nodes of another size."""
    if placement.by_name:
        return False
    alone = placement.mesh.group is None  # quantized before there was a process group: all of it is on each rank
    return (alone or placement.mesh.group is mesh.group) and placement.mesh.topology != mesh.topology


def _check_movable(weight: FrozenWeight, mesh: ProcessMesh) -> None:
    if not isinstance(weight.codec, Storable):
        raise ValueError(
            f"{weight.name} is placed on {weight.placement.mesh.topology}, but the strategy that wraps it has "
            f"{mesh.topology}, and chunks encoded by {weight.codec} can't be re-cut; pass gpus_per_node="
            f"{mesh.topology.gpus_per_node} to quantize_frozen_params"
        )


def _move(weight: FrozenWeight, placement: Placement) -> None:
    """Re-cut the codes of a weight for another placement."""
    device = weight.device
    codes, scales = codes_and_scales(weight, _all_rows(weight))
    weight.place(placement)
    weight.holder = UngroupedPayload(local_payload_from_slices(weight, codes, scales).to(device))


def _all_rows(weight: FrozenWeight) -> Tensor:
    """All chunks of a weight, uint8 [chunks, local_nbytes], gathered by itself. Collective.

    Gathering its unit would make units, and the model does not have its final shape yet.
    """
    mesh, scope = weight.placement.mesh, weight.placement.scope
    row = weight.holder.local_payload(weight).view(1, -1)
    hops = (
        hop_over(mesh.inter if scope == "G" else None, "gather", "inter", Traffic()),
        hop_over(mesh.intra if scope != "N" else None, "gather", "intra", Traffic()),
    )
    for hop in filter(None, hops):
        row = hop.all_gather(for_collectives(row, hop.group), weight.name)
    return row
