"""Checks the parts of a call of ``fully_shard``, makes their units, and quantizes their frozen parameters."""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_zpp.adapters._torch_mesh import flattened, mesh_over
from fsdp_zpp.collectives.agreement import agree
from fsdp_zpp.collectives.devices import default_device_type
from fsdp_zpp.collectives.links import find_links
from fsdp_zpp.collectives.mesh import ProcessMesh, own_rank
from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.frozen.from_strategy import left_to_shard, quantize_for
from fsdp_zpp.runtime.packed_weights import encodes_itself, packed
from fsdp_zpp.runtime.rank_layout import RankLayout
from fsdp_zpp.runtime.unit import StrategyUnit

from ._torch_mesh_info import info_on_spmd_mesh
from .data_parallel_mesh import names_of_node
from .parts import Part
from .validation import check_arguments, named_own_parameters

logger = logging.getLogger("fsdp_zpp")


def make_unit(
    part: Part, modules: list[nn.Module], holds_packed: bool, others: Collection[nn.Parameter]
) -> tuple[StrategyUnit, bool]:
    """Check a part of a call on every rank, make its unit, and quantize what is frozen of it. Collective.

    Args:
        part: The part; the mesh in its arguments is replaced by that of the ranks to shard over.
        modules: The modules of the call.
        holds_packed: Whether any parameter of the call holds packed values.
        others: The parameters of other parts.

    Returns:
        The unit, and whether torch's FULL_SHARD is all that its strategy asks for.
    """
    over, arguments = part.over, part.arguments
    strategy, group = over.strategy, over.group
    if over.compared and isinstance(strategy, Strategy) and strategy.gpus_per_node is None:
        find_links(group)
    own = left_to_shard(strategy, modules, part.own)
    layout = agree(group if over.compared else None, lambda: check_arguments(own, strategy, group, arguments))
    unit = _unit_for(part, layout)
    policy = arguments.get("mp_policy")
    ignored = {*(arguments.get("ignored_params") or ()), *others}
    dtype = None if policy is None else policy.param_dtype
    for each in modules:
        unit.left_unquantized |= quantize_for(
            strategy, each, unit.ranks, ignored=ignored, dtype=dtype, is_part=bool(others)
        )
    if holds_packed and (raw := _not_to_be_encoded(named_own_parameters(modules, ignored))):  # what is left of them
        changes = any(parameter.is_floating_point() for parameter in raw)  # if torch gathers them
        can_gather = not layout.stock or _can_gather(unit.ranks, over.compared, arguments, changes)
        unit.leave_weights_uncoded(in_place_of_torch=can_gather)
    unit.stock = layout.stock and unit.gather is None
    if layout.stock:
        unit.reductions.leave_to_torch()
    return unit, layout.stock


def _not_to_be_encoded(parameters: list[tuple[str, nn.Parameter]]) -> list[Tensor]:
    """Return the parameters that hold packed values, but for trained ones that encode themselves.

    What these send is known only when they are sharded; see ``lazy_init`` in _torch_group.py.
    """
    return [p for p in packed(parameters).values() if not (p.requires_grad and encodes_itself(p))]


def _unit_for(part: Part, layout: RankLayout) -> StrategyUnit:
    """Make a unit on the ranks of ``layout``, and have the part sharded over those that its scope says."""
    arguments = part.arguments
    mesh = arguments["mesh"]
    unit = StrategyUnit(part.over.strategy, layout.mesh())
    if unit.scopes.optimizer != "G" and unit.ranks.topology.world > 1:
        sharded_over = unit.ranks.intra if unit.scopes.optimizer == "I" else own_rank()
        assert sharded_over is not None
        if (dims := arguments.get("dp_mesh_dims")) is not None:
            size = layout.topology.gpus_per_node
            of_node = names_of_node(mesh, dims.shard_names, size) if unit.scopes.optimizer == "I" else ()
            assert of_node is not None  # which was checked
            ranks = flattened(mesh, of_node) if of_node else DeviceMesh.from_group(own_rank(), mesh.device_type)
            replicate = dims.shard_names[: len(dims.shard_names) - len(of_node)]
            part.mesh_info = info_on_spmd_mesh(ranks, mesh, replicate, dims)
        elif mesh is None:
            arguments["mesh"] = DeviceMesh.from_group(sharded_over, default_device_type())
        else:
            arguments["mesh"] = mesh_over(sharded_over, mesh)
    return unit


def _can_gather(ranks: ProcessMesh, one_mesh: bool, arguments: dict[str, Any], changes: bool) -> bool:
    """Return whether a stock strategy can gather in place of torch; if not, warn where torch ``changes`` values."""
    reshard = arguments["reshard_after_forward"]
    elsewhere = any(arguments.get(name) is not None for name in ("shard_placement_fn", "dp_mesh_dims"))
    if one_mesh and not elsewhere and (reshard is None or isinstance(reshard, bool)):
        return True
    if changes and ranks.rank == 0:
        _warn_of_packed_values()
    return False


@cache  # for all layers of a model
def _warn_of_packed_values() -> None:
    logger.warning(
        "fully_shard: packed values are gathered by torch, for reshard_after_forward is a number of ranks, mesh has "
        "several dimensions, or shard_placement_fn or dp_mesh_dims was given; on GPUs torch changes those that read as "
        "NaN: pack them with bnb_4bit_quant_storage=torch.uint8, or pass a bool, a 1-D mesh and no more"
    )
