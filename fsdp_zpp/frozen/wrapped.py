"""Places a frozen base on the nodes of the strategy that wraps its model.

[Note: Who says how large a node is]
A base may be quantized before its model is wrapped, and is then sharded by default over a node of the launcher's size.
The strategy may give another size (``gpus_per_node``); a base that spans several of its nodes would be gathered between
them in every step. So the strategy decides: a base that was placed by default is re-sharded as it is wrapped, without
decoding, since chunks consist of whole blocks. A base whose ``gpus_per_node`` was given explicitly stays.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..agreement import check_agreement
from ..hop import Traffic, hop_over
from ..support import launched_node_size, model_name
from ..topology import ProcessMesh
from ..units import unit_of
from .base import Unsettled
from .file_format import Storable, codes_in, row_from_slices
from .module import frozen_modules
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
    """Raise on every rank of ``group`` unless all ranks pass the same arguments and the same weights. Collective."""
    if group is None:
        return
    nodes = gpus_per_node or f"{launched_node_size(group)} (LOCAL_WORLD_SIZE)"
    chosen = {f"weight {c.name}": f"{c.parameter.dtype} {list(c.parameter.shape)}" for c in selection.chosen}
    check_agreement(group, f"{call}({model_name(model)})", {"gpus_per_node": nodes} | facts | chosen)


def wrapping_mesh(model: nn.Module, group: dist.ProcessGroup | None) -> ProcessMesh | None:
    """The mesh on ``group`` of the strategies that wrap parts of ``model``; None if there are none.

    Raises:
        ValueError: If their node sizes differ.
    """
    meshes = {unit.mesh for unit in map(unit_of, model.modules()) if unit is not None and unit.mesh.group is group}
    if len(meshes) > 1:
        raise ValueError(
            f"the strategies that wrap parts of this {model_name(model)} have different node sizes "
            f"({', '.join(sorted(str(mesh.topology) for mesh in meshes))}); pass the one of the frozen base as "
            "gpus_per_node"
        )
    return next(iter(meshes), None)


def follow_strategy(module: nn.Module, mesh: ProcessMesh) -> None:
    """Place the frozen base of ``module`` on ``mesh``. Collective. See [Note: Who says how large a node is].

    Args:
        module: The module that is about to be wrapped; parts that are already wrapped stay as their strategies say.
        mesh: The ranks of the strategy.

    Raises:
        ValueError: If a weight would have to move whose codec is user-defined, so that its chunks can't be re-cut.
    """
    wrapped = [m for m in module.modules() if m is not module and unit_of(m) is not None]
    placed = {weight for part in wrapped for _, _, weight in frozen_modules(part)}
    weights = dict.fromkeys(weight for _, _, weight in frozen_modules(module) if weight not in placed)
    moving = [weight for weight in weights if _lies_elsewhere(weight.placement, mesh)]
    for weight in moving:
        _check_movable(weight, mesh)
    for weight in moving:
        _move(weight, Placement(weight.placement.letter, mesh))
    if moving and mesh.rank == 0:
        logger.info(
            "%s: %d frozen weights now lie on %s, as the strategy that wraps them says",
            model_name(module),
            len(moving),
            mesh.topology,
        )


def _lies_elsewhere(placement: Placement, mesh: ProcessMesh) -> bool:
    """Whether by default a base lies over the same ranks, or on each by itself, but on nodes of another size."""
    if placement.by_name:
        return False
    alone = placement.mesh.group is None
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
    codes, scales = codes_in(weight, _all_rows(weight))
    weight.place(placement)
    weight.held = Unsettled(row_from_slices(weight, codes, scales).to(device))


def _all_rows(weight: FrozenWeight) -> Tensor:
    """All chunks of a weight, gathered alone: gathering its unit would settle the base before it is complete."""
    mesh, letter = weight.placement.mesh, weight.placement.letter
    row = weight.held.row_of(weight).view(1, -1)
    hops = (
        hop_over(mesh.inter if letter == "G" else None, "gather", "inter", Traffic()),
        hop_over(mesh.intra if letter != "N" else None, "gather", "intra", Traffic()),
    )
    for hop in filter(None, hops):
        on_cpu = row.is_cpu and "nccl" in dist.get_backend(hop.group)
        row = hop.all_gather(row.to(torch.accelerator.current_accelerator()) if on_cpu else row, weight.name)
    return row
