"""From ``fully_shard(module, strategy=strategy)`` to units that gather and reduce."""

from __future__ import annotations

import inspect
from typing import Any, overload

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard as torch_fully_shard

from fsdp_zpp.collectives.agreement import check_agreement, parameter_facts
from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.frozen.from_strategy import log_frozen, prepare_frozen
from fsdp_zpp.frozen.hugging_face.patches import guard_sharded
from fsdp_zpp.module_names import model_name
from fsdp_zpp.runtime.lifecycle import weights_moved
from fsdp_zpp.runtime.model_setup import repeated_if_failed, set_up_model
from fsdp_zpp.runtime.overrides import strategy_for
from fsdp_zpp.runtime.packed_weights import packed, packed_facts
from fsdp_zpp.runtime.shared_parameters import hold
from fsdp_zpp.runtime.unit import attach
from fsdp_zpp.runtime.validation import check_module, strategy_facts
from fsdp_zpp.suggestions import check_keywords
from fsdp_zpp.torch_internals import Patch, apply_patches

from . import _torch, _torch_adoption, _torch_backward
from ._torch_mesh_info import mesh_infos, placing
from .clipping import explain_clipping_errors
from .data_parallel_mesh import read_mesh
from .parts import Part, split
from .units import make_unit
from .validation import UNITS, check_strategy, has_shards, named_own_parameters, refuse_shared


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
    the gradients of parts with different optimizer scopes together, use :func:`clip_grad_norm_`.

    Args:
        module: The module, or several that are gathered together.
        strategy: Where each model state lives and how each hop is encoded.
        mesh: The 1-D mesh of the data-parallel ranks; a dimension of a larger mesh will do. Default: all ranks.
            How they split into nodes is the strategy's ``gpus_per_node``, counted in ranks of this mesh. A 2-D mesh,
            as HSDP takes it, is read as nodes x ranks of a node. With ``dp_mesh_dims``, the whole SPMD mesh.
        reshard_after_forward: As torch's, except that an int is refused: parameter scope ``I`` keeps a
            secondary shard inside each node. ``Strategy("GGG")`` on one node is torch's ``fully_shard`` itself, except
            for modules that hold packed values, and accepts all of its arguments.
        **arguments: As torch's: ``mp_policy``, ``offload_policy``, ``shard_placement_fn``, ``ignored_params``,
            ``dp_mesh_dims``. The nodes of a mesh that ``shard_placement_fn`` gives a parameter are those of ``mesh``.

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
    check_keywords("fully_shard", arguments, ["strategy", *inspect.signature(torch_fully_shard).parameters])
    if not dist.is_initialized():
        check_strategy(strategy)
    parts, holds_packed = _agreed_parts(modules, strategy, passed_on)
    units, stock, sites = [], [], UNITS.sites(modules)
    for part in parts:
        others = [parameter for other in parts if other is not part for _, parameter in other.own]
        unit, is_stock = make_unit(part, modules, holds_packed, others)
        unit.patterns = tuple(dict(strategy.overrides))
        units.append(unit)
        stock.append(is_stock)
    by_info = len(parts) > 1 or parts[0].mesh_info is not None
    infos = mesh_infos((part.arguments, part.mesh_info) for part in parts) if by_info else []
    arguments = parts[0].arguments
    if infos:
        placements = [part.placements or dict.fromkeys(parameter for _, parameter in part.own) for part in parts]
        arguments["shard_placement_fn"] = placing(infos, placements)
    elif parts[0].placements:
        arguments["shard_placement_fn"] = parts[0].placements.__getitem__
    sharded = torch_fully_shard(module, **arguments)
    paths = [part.path for part in parts]
    groups = _torch_adoption.adopt_groups(modules[0], units, paths, infos, _on_lazy_init)
    for unit, path, group, is_stock in zip(units, paths, groups, stock, strict=True):
        if group is not None or is_stock:  # else the modules have no parameters of this part
            for each in modules:
                attach(each, unit, path)
    sharded_here = {id(parameter) for part in parts for _, parameter in part.own}
    unit_name = model_name(modules[0])
    for (owner, own_name), (name, parameter) in sites.items():
        # A quantized weight is no parameter any more: units may share it.
        if id(parameter) in sharded_here and own_name in owner._parameters:
            hold((owner, own_name), name, parameter, unit_name)
    for each in modules:
        guard_sharded(each, has_shards)
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


def _agreed_parts(modules: list[nn.Module], strategy: Strategy, arguments: dict[str, Any]) -> tuple[list[Part], bool]:
    """Raise on every rank unless all shard the same modules in the same way.

    Returns:
        The parts of the call, and whether any parameter that is to be sharded holds packed values.
    """
    overrides = strategy.overrides if isinstance(strategy, Strategy) else ()
    given = dict(arguments)
    over = read_mesh(strategy_for(modules[0], strategy) if overrides else strategy, arguments)
    ranks = over.group if over.compared else None
    call = f"fully_shard({', '.join(model_name(module) for module in modules)})"
    if not all(isinstance(module, nn.Module) for module in modules):  # which other ranks may have
        check_agreement(ranks, call, {})
        list(map(check_module, modules))
    own = named_own_parameters(modules, arguments.get("ignored_params") or ())
    facts = strategy_facts(over.strategy, over.group) if over.compared else {}
    facts |= {name: arguments.get(name) for name in ("reshard_after_forward", "mp_policy")}
    facts |= {"overrides": overrides, "shard_placement_fn": arguments.get("shard_placement_fn") is not None}
    held, shared = packed(own), UNITS.find_shared(modules, arguments.get("ignored_params") or ())
    facts |= {} if shared is None else {"shared": shared.name}
    check_agreement(ranks, call, facts | packed_facts(held) | parameter_facts(own))
    refuse_shared(shared, modules, call)
    whole = Part(over, own, arguments)
    is_split = isinstance(strategy, Strategy) and (overrides or arguments.get("shard_placement_fn") is not None)
    return split(modules, strategy, whole, given) if is_split else [whole], bool(held)


def _on_lazy_init(root: nn.Module) -> None:
    """Start to watch the model under ``root``."""
    with repeated_if_failed(root, _torch.init_groups_lazily):
        _set_up(root)


def _set_up(root: nn.Module) -> None:
    groups = _torch_adoption.strategy_groups_below(root)
    for group in groups:
        group.unit.sharded = group
    model, members = model_name(root), [group.unit for group in groups]
    prepare_frozen(root)
    hooks = set_up_model(root, model, members, _torch.sizes_of_other_groups(root, groups))
    log_frozen(root, model, members)
    _torch_backward.watch_backwards(root, hooks.backward_ended)
