"""Moves a frozen base to the nodes of the strategy that wraps its model.

A base may be quantized before its model is wrapped; it is then sharded, by default, over nodes of the launcher's size.
The strategy may give another size (``gpus_per_node``), and a base that spans several of its nodes would be gathered
between them in every step. So the strategy decides: when a model is wrapped, a base with the default placement is
resharded, without decoding, since chunks are whole blocks. A base whose ``gpus_per_node`` was given stays, and so does
one whose strategy leaves the nodes to the machine's links: see [Note: Links] in resolve.py.
"""

from __future__ import annotations

import logging

from torch import Tensor, nn

from fsdp_zpp.codecs.blocks import BlockCodec
from fsdp_zpp.collectives.devices import for_collectives
from fsdp_zpp.collectives.hops import Traffic, hop_over
from fsdp_zpp.collectives.mesh import ProcessMesh, as_launched
from fsdp_zpp.module_names import model_name
from fsdp_zpp.runtime.unit import unit_of

from .base import UngroupedPayload
from .modules import frozen_sites
from .placement import Placement
from .weight import FrozenWeight

logger = logging.getLogger("fsdp_zpp")


def follow_strategy(module: nn.Module, mesh: ProcessMesh) -> None:
    """Reshard the frozen base of ``module``, if there is one, over ``mesh``. Collective. See the top of this file.

    Args:
        module: The module that is about to be wrapped. Parts that are already wrapped stay where their strategies have
            put them.
        mesh: The ranks of the strategy.

    Raises:
        ValueError: If a weight would have to move, but its codec is user-defined, so that its chunks can't be re-cut.
    """
    if not _weights_of(module):
        return
    mesh = as_launched(mesh)
    moving = [weight for weight in _unplaced(module) if _lies_elsewhere(weight.placement, mesh)]
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


def holds_base(module: nn.Module) -> bool:
    """Return whether a module has quantized weights, besides those of parts that are wrapped already."""
    return bool(_unplaced(module))


def _unplaced(module: nn.Module) -> list[FrozenWeight]:
    wrapped = [part for part in module.modules() if part is not module and unit_of(part) is not None]
    placed = {weight for part in wrapped for weight in _weights_of(part)}
    return [weight for weight in _weights_of(module) if weight not in placed]


def _weights_of(module: nn.Module) -> list[FrozenWeight]:
    """Return the frozen weights below ``module``, tied ones once."""
    return list(dict.fromkeys(weight for _, _, _, weight in frozen_sites(module)))


def _lies_elsewhere(placement: Placement, mesh: ProcessMesh) -> bool:
    """Return whether ``placement`` is a default one, over the ranks of ``mesh`` but on nodes of another size."""
    if placement.by_name:
        return False
    alone = placement.mesh.group is None  # quantized before there was a process group: all of it is on each rank
    return (alone or placement.mesh.group is mesh.group) and placement.mesh.topology != mesh.topology


def _check_movable(weight: FrozenWeight, mesh: ProcessMesh) -> None:
    if not isinstance(weight.codec, BlockCodec):
        raise ValueError(
            f"{weight.name} is placed on {weight.placement.mesh.topology}, but the strategy that wraps it has "
            f"{mesh.topology}, and chunks encoded by {weight.codec} can't be re-cut; pass gpus_per_node="
            f"{mesh.topology.gpus_per_node} to quantize_frozen_params"
        )


def _move(weight: FrozenWeight, placement: Placement) -> None:
    """Re-cut the codes of a weight for another placement."""
    device = weight.device
    weight.holder = UngroupedPayload(weight.recut(_all_rows(weight), placement).to(device))


def _all_rows(weight: FrozenWeight) -> Tensor:
    """Gather all chunks of a weight by itself, uint8 [chunks, local_nbytes]. Collective.

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
