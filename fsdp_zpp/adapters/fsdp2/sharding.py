"""From ``fully_shard(module, strategy=strategy)`` to units that gather and reduce."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from typing import Any, overload

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard as torch_fully_shard

from fsdp_zpp.adapters._torch_mesh import flattened, mesh_over
from fsdp_zpp.adapters.hsdp_mesh import read_hsdp_mesh
from fsdp_zpp.collectives.agreement import agree, check_agreement, parameter_facts
from fsdp_zpp.collectives.devices import default_device_type
from fsdp_zpp.collectives.mesh import ProcessMesh, own_rank
from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.frozen.from_strategy import log_frozen, prepare_frozen, quantize_for
from fsdp_zpp.module_names import model_name
from fsdp_zpp.runtime.lifecycle import weights_moved
from fsdp_zpp.runtime.model_setup import set_up_model
from fsdp_zpp.runtime.packed_weights import packed, packed_facts
from fsdp_zpp.runtime.rank_layout import RankLayout
from fsdp_zpp.runtime.unit import StrategyUnit, attach, unit_of
from fsdp_zpp.runtime.validation import check_module, strategy_facts
from fsdp_zpp.torch_internals import Patch, apply_patches

from . import _torch, _torch_adoption, _torch_backward
from ._torch_group import StrategyGroup
from .clipping import explain_clipping_errors
from .validation import check_arguments, check_strategy, mark_sharded, named_own_parameters

logger = logging.getLogger("fsdp_zpp")


@overload
def fully_shard(
    module: nn.Module,
    *,
    strategy: Strategy,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | None = ...,
    **arguments: Any,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    strategy: Strategy,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | None = ...,
    **arguments: Any,
) -> list[FSDPModule]: ...


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    strategy: Strategy,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    **arguments: Any,
) -> FSDPModule | list[FSDPModule]:
    """Apply torch's ``fully_shard`` to ``module``, in place, and shard it by ``strategy``.

    Call it bottom-up, like torch's. Different calls in one model may use different strategies, or torch's own. To clip
    the gradients of parts with different third letters together, use :func:`clip_grad_norm_`.

    Args:
        module: The module, or several that are gathered together.
        strategy: Where each model state lives and how each hop is encoded.
        mesh: The 1-D mesh of the data-parallel ranks; a dimension of a larger mesh will do. Default: all ranks.
            How they split into nodes is the strategy's ``gpus_per_node``, counted in ranks of this mesh. A 2-D mesh,
            as HSDP takes it, is read as nodes x ranks of a node. With ``dp_mesh_dims``, the whole SPMD mesh.
        reshard_after_forward: As torch's, except that an int is refused: the strategy's first letter ``I`` keeps a
            secondary shard inside each node. ``Strategy("GGG")`` on one node is torch's ``fully_shard`` itself, except
            for modules that hold packed values, and accepts all of its arguments.
        **arguments: As torch's: ``mp_policy``, ``offload_policy``, ``shard_placement_fn``, ``ignored_params``,
            ``dp_mesh_dims``.

    Returns:
        ``module``, whose class is now torch's ``FSDPModule``.

    Raises:
        TypeError: If ``strategy`` is not a ``Strategy``, or a parameter has a dtype that none can shard.
        ValueError: If the mesh or another argument does not fit a strategy.
        NotImplementedError: If the strategy can't be combined with another parallelism that has sharded the module.

    Examples:
        >>> for layer in model.layers:
        ...     fully_shard(layer, strategy=Strategy.zeropp())
        >>> fully_shard(model, strategy=Strategy.zeropp())
    """
    passed_on = {"mesh": mesh, "reshard_after_forward": reshard_after_forward, **arguments}
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    if not dist.is_initialized():
        check_strategy(strategy)
    strategy, mesh = _data_parallel_part(strategy, passed_on)
    ranks, compared = _ranks(mesh)
    layout, holds_packed = _agreed_layout(modules, strategy, ranks, compared, passed_on)
    unit = _unit_for(strategy, layout, passed_on)
    policy = passed_on.get("mp_policy")
    ignored = passed_on.get("ignored_params") or ()
    dtype = None if policy is None else policy.param_dtype
    for each in modules:
        unit.left_unquantized |= quantize_for(strategy, each, unit.ranks, ignored=ignored, dtype=dtype)
    if holds_packed and packed(named_own_parameters(modules, ignored)):  # what is left of them
        unit.leave_weights_uncoded(in_place_of_torch=not layout.stock or _can_gather(unit.ranks, compared, passed_on))
    before = {parameter for each in modules for parameter in each.parameters()}
    sharded = torch_fully_shard(module, **passed_on)
    mark_sharded(modules, before, strategy)
    unit.stock = layout.stock and unit.gather is None
    if layout.stock and not unit.stock:
        unit.reduce = None  # torch reduces
    group = _torch_adoption.adopt_group(modules[0], unit, _on_lazy_init)
    if layout.stock or group is not None:  # else the module has no parameters of its own
        for each in modules:
            attach(each, unit)
    return sharded


PATCHES = (
    Patch(
        "FSDPModule._apply",
        "a move or cast of the model keeps our marks on parameters, and what was gathered of it is stale",
        lambda: _torch.after_moves(weights_moved),
    ),
    Patch(
        "torch.nn.utils.clip_grad_norm_",
        "gradients of units that are sharded over different ranks get an error that names their strategies",
        explain_clipping_errors,
    ),
)
"""All that is replaced in torch.

Besides, parameter groups that a strategy shards become :class:`_torch_group.StrategyGroup`, and the states of the
modules of such a model :class:`_torch_backward.WatchedState`, which hears of the end of backwards.
"""


def install() -> None:
    """Prepare torch for strategies."""
    apply_patches(PATCHES)


# torch's function has its state under this name, and torch's users look it up there.
fully_shard.state = _torch.state_of  # type: ignore[attr-defined]


def _data_parallel_part(strategy: Strategy, arguments: dict[str, Any]) -> tuple[Strategy, DeviceMesh | None]:
    """Return the strategy, with the node size of a mesh of several dimensions, and the mesh to shard over.

    Replaces the mesh in ``arguments`` by a 1-D one, or the dimensions of an SPMD mesh by those to shard along. An
    object that is no strategy, and a strategy that may leave a mesh to torch, are returned as they are.
    """
    mesh, dims = arguments["mesh"], arguments.get("dp_mesh_dims")
    if not isinstance(mesh, DeviceMesh) or not isinstance(strategy, Strategy):
        return strategy, mesh
    if dims is not None:
        names = tuple(name for name in mesh.mesh_dim_names or () if name in {*dims.replicate_names, *dims.shard_names})
        if dims.replicate_names and dims.shard_names:
            read = read_hsdp_mesh(strategy, mesh, dims.replicate_names, dims.shard_names)
        else:
            read = strategy, flattened(mesh, names)
        if read is None or RankLayout.of(read[0], read[1].get_group()).stock:
            return strategy, mesh
        arguments["dp_mesh_dims"] = replace(dims, shard=names, replicate=None)
        return read
    if mesh.ndim == 2 and mesh.mesh_dim_names is not None:
        first, second = mesh.mesh_dim_names
        if (read := read_hsdp_mesh(strategy, mesh, (first,), (second,))) is not None:
            strategy, arguments["mesh"] = read
    return strategy, arguments["mesh"]


def _ranks(mesh: DeviceMesh | None) -> tuple[dist.ProcessGroup, bool]:
    """Return the ranks to shard over, and whether they can compare their arguments.

    A stock strategy takes a mesh of several dimensions, too: torch communicates, and the unit's own ranks are not used.
    """
    if mesh is None and not dist.is_initialized():
        dist.init_process_group()  # as torch would have done
    group = mesh.get_group() if mesh is not None and getattr(mesh, "ndim", None) == 1 else dist.group.WORLD
    assert group is not None
    return group, mesh is None or getattr(mesh, "ndim", None) == 1


def _agreed_layout(
    modules: list[nn.Module], strategy: Strategy, group: dist.ProcessGroup, compared: bool, arguments: dict[str, Any]
) -> tuple[RankLayout, bool]:
    """Raise on every rank unless all shard the same modules in the same way, and a strategy can do it.

    Returns:
        Where the ranks lie, and whether any parameter that is to be sharded holds packed values.
    """
    ranks = group if compared else None
    call = f"fully_shard({', '.join(model_name(module) for module in modules)})"
    if not all(isinstance(module, nn.Module) for module in modules):  # which other ranks may have
        check_agreement(ranks, call, {})
        list(map(check_module, modules))
    own = named_own_parameters(modules, arguments.get("ignored_params") or ())
    facts = strategy_facts(strategy, group) if compared else {}
    facts |= {name: arguments.get(name) for name in ("reshard_after_forward", "mp_policy")}
    held = packed(own)
    check_agreement(ranks, call, facts | packed_facts(held) | parameter_facts(own))
    return agree(ranks, lambda: check_arguments(own, strategy, group, arguments)), bool(held)


def _can_gather(ranks: ProcessMesh, one_mesh: bool, arguments: dict[str, Any]) -> bool:
    """Return whether a stock strategy can gather in place of torch; warns that torch changes packed values if not."""
    reshard = arguments["reshard_after_forward"]
    elsewhere = any(arguments.get(name) is not None for name in ("shard_placement_fn", "dp_mesh_dims"))
    if one_mesh and not elsewhere and (reshard is None or isinstance(reshard, bool)):
        return True
    if ranks.rank == 0:
        _warn_of_packed_values()
    return False


@cache  # for all layers of a model
def _warn_of_packed_values() -> None:
    logger.warning(
        "fully_shard: packed values are gathered by torch, for reshard_after_forward is a number of ranks, mesh has "
        "several dimensions, or shard_placement_fn or dp_mesh_dims was given; on GPUs torch changes those that read as "
        "NaN: pack them with bnb_4bit_quant_storage=torch.uint8, or pass a bool, a 1-D mesh and no more"
    )


def _unit_for(strategy: Strategy, layout: RankLayout, arguments: dict[str, Any]) -> StrategyUnit:
    """Make a unit on the ranks of ``layout``; replaces the mesh in ``arguments`` by that of the ranks to shard over."""
    mesh = arguments["mesh"]
    unit = StrategyUnit(strategy, layout.mesh())
    if unit.scopes.optimizer != "G" and unit.ranks.topology.world > 1:
        sharded_over = unit.mesh.intra if unit.scopes.optimizer == "I" else own_rank()
        assert sharded_over is not None
        if mesh is None:
            arguments["mesh"] = DeviceMesh.from_group(sharded_over, default_device_type())
        else:
            arguments["mesh"] = mesh_over(sharded_over, mesh)
    return unit


def _on_lazy_init(root: nn.Module) -> None:
    """Start to watch the model under ``root``."""
    units: dict[str, StrategyUnit] = {}
    groups: list[StrategyGroup] = []
    for module in root.modules():
        unit = unit_of(module)
        group = _torch_adoption.strategy_group_of(module) if isinstance(module, FSDPModule) else None
        if isinstance(unit, StrategyUnit) and group is not None:
            group.weights.check_gather()
            unit.sharded = group
            units[group.name] = unit  # modules that were passed as a list share one
            groups.append(group)
    model, members = model_name(root), list(units.values())
    prepare_frozen(root)
    hooks = set_up_model(root, model, members, _torch.sizes_of_other_groups(root, groups))
    log_frozen(root, model, members)
    _torch_backward.watch_backwards(root, hooks.backward_ended)
