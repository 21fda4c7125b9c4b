"""``fully_shard`` with a strategy, and clipping of its gradients."""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import takewhile
from types import GeneratorType
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from fsdp_zpp._torch_compat import Patch, major_minor
from fsdp_zpp.comm.agreement import agree, check_agreement, parameter_facts
from fsdp_zpp.comm.mesh import ProcessMesh, accelerator, own_rank, ranks_on_each_node
from fsdp_zpp.frozen.frozen_base import holds_base
from fsdp_zpp.frozen.hugging_face import guard_save_pretrained
from fsdp_zpp.frozen.quantize import left_to_shard, log_frozen, prepare_frozen, quantize_for
from fsdp_zpp.names import check_keywords, model_name
from fsdp_zpp.runtime._torch_flat_parts import is_flattened
from fsdp_zpp.runtime._torch_rank_layout import (
    DataParallelMesh,
    MeshInfo,
    RankLayout,
    arguments_of,
    data_parallel_names,
    flattened,
    info_on_spmd_mesh,
    mesh_infos,
    mesh_over,
    names_of_node,
    placement_and_mesh,
    placing,
    read_mesh,
    takes_mesh_per_parameter,
)
from fsdp_zpp.runtime.api import (
    AdapterUnits,
    Shared,
    check_dtypes,
    check_exchanges,
    check_module,
    hold,
    refuse_strategy,
    strategy_facts,
)
from fsdp_zpp.runtime.lifecycle import repeated_if_failed, set_up_model, weights_moved
from fsdp_zpp.runtime.links import find_links
from fsdp_zpp.runtime.unit import (
    StrategyUnit,
    attach,
    encodes_itself,
    packed,
    packed_facts,
    strategies_below,
    strategy_for,
    unwrapped,
)
from fsdp_zpp.strategy.strategy import Strategy, override_for

from . import _torch_group, _torch_weights
from ._torch_weights import is_managed

# ---- gradient norm
#
# torch adds up norms as DTensors, which must be on one mesh. Here each rank takes the norm of its shards, and ranks add
# up these norms along the mesh dimensions that shard the parameters. Other dimensions replicate, and ranks skip them,
# so copies count once.

Groups = tuple[dist.ProcessGroup, ...]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    pp_mesh: DeviceMesh | None = None,
) -> Tensor:
    """Clip the gradients of ``parameters``, in place, by their norm over all ranks that shard them. Collective.

    It does the same as ``torch.nn.utils.clip_grad_norm_``, also where parameters are sharded over different meshes,
    which torch refuses: modules with different optimizer scopes, experts on a mesh of their own, tensor parallelism for
    some of the parameters. Ranks must pass the same parameters in the same order, with or without gradients. A rank
    outside a parameter's mesh is taken to hold a copy of the parameter. So experts that differ between ranks must be
    DTensors, sharded over these ranks.

    Args:
        parameters: Parameters that are sharded by ``fully_shard``, this library's or torch's, and plain ones, whose
            gradients count as they are.
        max_norm: The largest norm that the gradients may have afterwards.
        norm_type: The order of the norm, above 0; ``math.inf`` is the largest absolute value.
        error_if_nonfinite: Whether a norm that is NaN or infinite raises.
        foreach: As torch's.
        pp_mesh: The 1-D mesh of pipeline stages. Pass it if each rank has only the parameters of its own stages; the
            norm is then that of the whole model.

    Returns:
        The norm before clipping: a 0-dimensional tensor, the same on all ranks.

    Raises:
        ValueError: If ``norm_type`` is not above 0, or a parameter belongs to ``FullyShardedDataParallel``.
        RuntimeError: If ``error_if_nonfinite`` is set and the norm is not finite.

    Examples:
        >>> fsdp_zpp.clip_grad_norm_(model.parameters(), 1.0)
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type must be above 0, got {norm_type}; 2.0 and math.inf are the usual ones")
    if any(map(is_flattened, parameters)):
        raise ValueError(
            "clip_grad_norm_ got a parameter of FullyShardedDataParallel, which does not show over which ranks it is "
            "sharded; call model.clip_grad_norm_(max_norm) of the outermost FullyShardedDataParallel"
        )
    norms = [
        _reduced(_norm_of_own(members, norm_type, foreach), norm_type, groups)
        for groups, members in _by_groups(parameters).items()
    ]
    total = torch.zeros(())
    if norms:
        total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    if pp_mesh is not None:
        total = _reduced(total.to(pp_mesh.device_type), norm_type, (pp_mesh.get_group(),))
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of the gradients is {total.item()}, so they can't be clipped; find what made them so, or pass "
            "error_if_nonfinite=False"
        )
    clip_grads_with_norm_([_with_own(p.grad) for p in parameters if p.grad is not None], max_norm, total, foreach)
    return total


def _by_groups(parameters: Iterable[Tensor]) -> dict[Groups, list[Tensor]]:
    """Group parameters by the process groups that add up their norms, in the same order on all ranks."""
    found: dict[Groups, list[Tensor]] = {}
    for parameter in parameters:
        groups: Groups = ()
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            dims = [dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate()]
            groups = tuple(map(mesh.get_group, dims))
        found.setdefault(groups, []).append(parameter)
    return found


def _norm_of_own(parameters: Sequence[Tensor], norm_type: float, foreach: bool | None) -> Tensor:
    shards = [_own_gradient(parameter) for parameter in parameters if parameter.grad is not None]
    shards = [shard for shard in shards if shard.numel()]  # an empty tensor has no largest value
    first = parameters[0]
    device = first.device_mesh.device_type if isinstance(first, DTensor) else first.device
    norm = get_total_norm(shards, norm_type, foreach=foreach) if shards else torch.zeros(())
    return norm.to(device, torch.float32)


def _own_gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if not isinstance(gradient, DTensor):
        return gradient
    assert isinstance(parameter, DTensor)
    if gradient.placements != parameter.placements:  # partial sums of tensor parallelism
        gradient = gradient.redistribute(placements=parameter.placements)
    return gradient.to_local()


def _with_own(gradient: Tensor) -> Tensor:
    """Return a tensor whose gradient is this rank's part of ``gradient``."""
    # Scale local tensors: torch can't scale DTensors of different meshes together, and torch 2.11 scales only a copy of
    # partial DTensors.
    own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    holder = own.detach()
    holder.grad = own
    return holder


def _reduced(norm: Tensor, norm_type: float, groups: Groups) -> Tensor:
    """Return the norm over all ranks of ``groups``; each group is one dimension of the mesh, reduced in turn."""
    for group in groups:
        if math.isinf(norm_type):
            norm = torch.where(norm.isnan(), math.inf, norm)  # MAX may lose NaNs
            dist.all_reduce(norm, dist.ReduceOp.MAX, group)
        else:
            norm = norm.pow(norm_type)
            dist.all_reduce(norm, dist.ReduceOp.SUM, group)
            norm = norm.pow(1.0 / norm_type)
    return norm


# ---- clipping


def explain_clipping_errors(original: Any) -> Callable[..., Any]:
    """Have torch's ``clip_grad_norm_`` name this library's function if it fails on parameters of several meshes."""

    def clip_grad_norm_(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = parameters
        if isinstance(parameters, GeneratorType):  # torch handles an empty generator separately
            given = list(parameters)
            parameters = (parameter for parameter in given)
        try:
            return original(parameters, *args, **kwargs)
        except RuntimeError as error:
            tensors = [given] if isinstance(given, Tensor) else given
            if len({p.device_mesh for p in tensors if isinstance(p, DTensor) and p.grad is not None}) > 1:
                raise ValueError(
                    "torch can't clip gradients together that are sharded over different meshes, as those of modules "
                    "with different optimizer scopes; call fsdp_zpp.clip_grad_norm_(parameters, max_norm), which can"
                ) from error
            raise

    return clip_grad_norm_


# ---- parts
#
# A part of a ``fully_shard`` call has the parameters that one strategy shards over one mesh.
#
# torch makes a parameter group of each part. A call has several parts if ``shard_placement_fn`` gives parameters a
# mesh of their own, as torchtitan does with experts, or if the strategy has overrides for submodules.

Named = list[tuple[str, nn.Parameter]]
_MeshKey = tuple[DeviceMesh, str]
"""A parameter's own mesh, and the data-parallel dimensions of the mesh as text."""


@dataclass(eq=False)
class MeshPart:
    """Parameters that one strategy shards over one mesh.

    Attributes:
        over: The mesh, and the strategy without its overrides.
        arguments: The arguments of ``fully_shard``; ``mesh`` and ``dp_mesh_dims`` are those of the part.
        placements: The results of the call's ``shard_placement_fn`` for the parameters, without meshes.
        path: The part's path within the module; empty for the part that has the call's own mesh and strategy.
        mesh_info: torch's mesh info, if torch can't derive it from the arguments.
        has_own_mesh: Whether the part has another mesh than the call; :func:`split` then reads that mesh.
    """

    over: DataParallelMesh
    own: Named
    arguments: dict[str, Any]
    placements: dict[nn.Parameter, Shard | None] = field(default_factory=dict)
    path: str = ""
    mesh_info: MeshInfo | None = None
    has_own_mesh: bool = False

    def summary(self) -> tuple[object, ...]:
        """Return the facts that must agree on all ranks; meshes count by names and shape, as their ranks may differ."""
        mesh = self.arguments["mesh"] if self.has_own_mesh else None
        shape = None if mesh is None else (mesh.mesh_dim_names, mesh.shape)
        return self.path, self.over.strategy, shape, [name for name, _ in self.own], list(self.placements.values())


def split(modules: list[nn.Module], strategy: Strategy, call: MeshPart, given: dict[str, Any]) -> list[MeshPart]:
    """Split a call by mesh and strategy. Collective over the call's ranks, then over those of each part.

    ``call`` has all parameters, with the strategy of the first module; ``given`` has the arguments as the user gave
    them, before :func:`read_mesh` changes them.
    """
    planned = agree(
        call.over.group if call.over.compared else None,
        lambda: _plan(modules, strategy, call, given),
        summary=lambda plan: str([each.summary() for each in plan]),
        difference="gave parameters other meshes or strategies than",
    )
    for part in planned:
        if part.has_own_mesh:
            part.over = read_mesh(part.over.strategy, part.arguments)
    return planned or [call]


def _plan(modules: list[nn.Module], strategy: Strategy, call: MeshPart, given: dict[str, Any]) -> list[MeshPart]:
    place = call.arguments.get("shard_placement_fn")
    outer, strategies = replace(strategy, overrides=(), gpus_per_node=None), dict[nn.Parameter, Strategy]()
    for module in modules:
        for each, own in strategies_below(module, outer, strategy).items():
            strategies |= dict.fromkeys(each.parameters(recurse=False), own)
    first = override_for(type(unwrapped(modules[0])), strategy.overrides) or outer
    # Parts inherit the node size of a mesh of nodes x ranks, but not one that the first module's override sets.
    gpus_per_node = strategy.gpus_per_node if first.gpus_per_node is not None else call.over.strategy.gpus_per_node
    parts: dict[tuple[_MeshKey | None, Strategy], MeshPart] = {}
    for name, parameter in call.own:
        placement, info = placement_and_mesh(None if place is None else place(parameter))
        if placement is not None and not isinstance(placement, Shard):
            raise ValueError(
                f"shard_placement_fn returned {placement!r} for {name}; it must return a Shard or None, or a "
                "ShardPlacementResult with one of them and a mesh"
            )
        mesh = _own_mesh(info, given)
        key = (None if mesh is None else (mesh["mesh"], str(mesh["dp_mesh_dims"])), strategies[parameter])
        if key not in parts:
            over = replace(call.over, strategy=_with_nodes(key[1], gpus_per_node, call.over.group, mesh))
            parts[key] = MeshPart(over, [], call.arguments | (mesh or {}), has_own_mesh=mesh is not None)
        parts[key].own.append((name, parameter))
        parts[key].placements[parameter] = placement
    if len(parts) > 1:
        _check_several(modules, call, [mesh for mesh, _ in parts])
        taken = {""}
        for key, part in parts.items():
            if key != (None, first):
                levels = zip(*(name.split(".")[:-1] for name, _ in part.own), strict=False)
                shared = takewhile(lambda level: len(set(level)) == 1, levels)
                part.path = _unused(taken, ".".join(level[0] for level in shared))
    return list(parts.values())


def _check_several(modules: list[nn.Module], call: MeshPart, meshes: list[_MeshKey | None]) -> None:
    """Raise if a module can't have several parts; ``meshes`` has the mesh of each, None for the call's."""
    name = type(modules[0]).__name__
    if any(holds_base(module) for module in modules):
        raise ValueError(
            f"{name} has weights that are quantized already, and is to be sharded over several meshes or by several "
            "strategies, so it is not known to which of them these weights belong; leave them unquantized and pass "
            "frozen= to the strategies"
        )
    by_themselves = "first shard each module that the overrides name by a call of its own"
    if not takes_mesh_per_parameter():
        raise ValueError(
            f"overrides give parameters of {name} different strategies, and torch makes several groups of a module "
            f"only from 2.12 on; {by_themselves}"
        )
    if meshes.count(None) > 1 and not call.over.compared:
        raise ValueError(
            f"overrides give parameters of {name} different strategies on a mesh of several dimensions; {by_themselves}"
        )


def _own_mesh(info: MeshInfo | None, call: dict[str, Any]) -> dict[str, Any] | None:
    """Return a parameter's own mesh as arguments of ``fully_shard``; None if it has the mesh of the call."""
    if info is None:
        return None
    own = arguments_of(info)
    if call["mesh"] is None:  # all ranks
        mesh: DeviceMesh = own["mesh"]
        of_all = mesh.ndim == 1 and dist.get_process_group_ranks(mesh.get_group()) == list(range(dist.get_world_size()))
        return None if of_all and own["dp_mesh_dims"] is None else own
    return None if all(own[name] == call.get(name) for name in own) else own


def _with_nodes(
    strategy: Strategy, gpus_per_node: int | None, group: dist.ProcessGroup, own: dict[str, Any] | None
) -> Strategy:
    if strategy.gpus_per_node is not None or gpus_per_node is None:
        return strategy
    if own is None:
        return replace(strategy, gpus_per_node=gpus_per_node)
    node_of = {rank: place // gpus_per_node for place, rank in enumerate(dist.get_process_group_ranks(group))}
    mesh: DeviceMesh = own["mesh"]
    dims = own["dp_mesh_dims"]
    ranks = (mesh if dims is None else mesh[data_parallel_names(mesh, dims)]).mesh.flatten().tolist()
    size = ranks_on_each_node([node_of.get(rank, -1) for rank in ranks])
    own_nodes = "leave gpus_per_node to torchrun, or give the overrides for these parameters one of their own"
    if not node_of.keys() >= set(ranks):
        raise ValueError(
            f"gpus_per_node={gpus_per_node} counts the ranks {list(node_of)}, and a parameter's mesh has others, "
            f"{ranks}; {own_nodes}"
        )
    if size is None:
        raise ValueError(
            f"gpus_per_node={gpus_per_node} puts the ranks of a parameter's mesh, {ranks}, on nodes in unequal shares "
            f"or out of order; {own_nodes}"
        )
    return replace(strategy, gpus_per_node=size)


def _unused(taken: set[str], path: str) -> str:
    free = path
    while free in taken:
        free = f"{path or 'part'} {len(taken) + 1}"
    taken.add(free)
    return free


# ---- units

logger = logging.getLogger("fsdp_zpp")


def make_unit(
    part: MeshPart, modules: list[nn.Module], holds_packed: bool, others: Collection[nn.Parameter]
) -> tuple[StrategyUnit, bool]:
    """Check a part of a call on every rank, make its unit, and quantize its frozen parameters. Collective.

    Returns the unit, and whether its strategy is torch's own FULL_SHARD. Sets the part's ``mesh`` argument to a mesh
    of the ranks to shard over.
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
    if holds_packed and (raw := _not_to_be_encoded(named_own_parameters(modules, ignored))):  # these stay packed
        changes = any(parameter.is_floating_point() for parameter in raw)  # torch may change NaNs
        can_gather = not layout.stock or _can_gather(unit.ranks, over.compared, arguments, changes)
        unit.leave_weights_uncoded(in_place_of_torch=can_gather)
    unit.stock = layout.stock and unit.gather is None
    if layout.stock:
        unit.reductions.leave_to_torch()
    return unit, layout.stock


def _not_to_be_encoded(parameters: list[tuple[str, nn.Parameter]]) -> list[Tensor]:
    # A trained weight that encodes itself can be asked only after it is sharded; see ``lazy_init`` in _torch_group.py.
    return [p for p in packed(parameters).values() if not (p.requires_grad and encodes_itself(p))]


def _unit_for(part: MeshPart, layout: RankLayout) -> StrategyUnit:
    arguments = part.arguments
    mesh = arguments["mesh"]
    unit = StrategyUnit(part.over.strategy, layout.mesh())
    if unit.scopes.optimizer != "G" and unit.ranks.topology.world > 1:
        sharded_over = unit.ranks.intra if unit.scopes.optimizer == "I" else own_rank()
        assert sharded_over is not None
        if (dims := arguments.get("dp_mesh_dims")) is not None:
            size = layout.topology.gpus_per_node
            of_node = names_of_node(mesh, dims.shard_names, size) if unit.scopes.optimizer == "I" else ()
            assert of_node is not None  # check_arguments has checked it
            ranks = flattened(mesh, of_node) if of_node else DeviceMesh.from_group(own_rank(), mesh.device_type)
            replicate = dims.shard_names[: len(dims.shard_names) - len(of_node)]
            part.mesh_info = info_on_spmd_mesh(ranks, mesh, replicate, dims)
        elif mesh is None:
            kind = accelerator()
            arguments["mesh"] = DeviceMesh.from_group(sharded_over, "cpu" if kind is None else kind.type)
        else:
            arguments["mesh"] = mesh_over(sharded_over, mesh)
    return unit


def _can_gather(ranks: ProcessMesh, one_mesh: bool, arguments: dict[str, Any], changes: bool) -> bool:
    """Return whether a stock unit can gather in place of torch; if not, warn if torch ``changes`` packed values."""
    reshard = arguments["reshard_after_forward"]
    elsewhere = any(arguments.get(name) is not None for name in ("shard_placement_fn", "dp_mesh_dims"))
    if one_mesh and not elsewhere and (reshard is None or isinstance(reshard, bool)):
        return True
    if changes and ranks.rank == 0:
        _warn_of_packed_values()
    return False


@cache  # warns once for all layers
def _warn_of_packed_values() -> None:
    logger.warning(
        "fully_shard: packed values are gathered by torch, for reshard_after_forward is a number of ranks, mesh has "
        "several dimensions, or shard_placement_fn or dp_mesh_dims was given; on GPUs torch changes those that read as "
        "NaN: pack them with bnb_4bit_quant_storage=torch.uint8, or pass a bool, a 1-D mesh and no more"
    )


# ---- validation

UNITS = AdapterUnits(
    is_unit=lambda module: isinstance(module, FSDPModule),
    is_torchs=lambda module, parameter: isinstance(parameter, DTensor) and is_managed(module),
)

_TAKES_INTEGERS = major_minor(torch.__version__) >= (2, 13)
"""True if torch's ``fully_shard`` takes frozen integers; before 2.13, it refuses dtypes that can't have gradients."""
_REMEDY = "pass others in ignored_params"


def check_arguments(
    own: list[tuple[str, nn.Parameter]], strategy: Strategy, group: dist.ProcessGroup, arguments: dict[str, Any]
) -> RankLayout:
    """Raise if a strategy can't shard parameters by these arguments of ``fully_shard``; return the layout."""
    check_strategy(strategy)
    layout = RankLayout.of(strategy, group)
    # Check dtypes even for a stock strategy: torch's error would only say that integers can't have gradients.
    check_dtypes(packed(own).items() if layout.stock else own, _REMEDY, takes_integers=_TAKES_INTEGERS)
    if layout.stock:
        return layout
    _check_reshard(strategy, arguments["reshard_after_forward"])
    if arguments.get("dp_mesh_dims") is None:
        _check_mesh(arguments["mesh"])
    else:
        _check_nodes(strategy, layout, arguments["mesh"], arguments["dp_mesh_dims"].shard_names)
    _check_offload(arguments.get("offload_policy"))
    _check_precision(strategy, arguments.get("mp_policy"))
    if strategy.local_steps is not None:
        check_exchanges(strategy.local_steps, own)
    return layout


def refuse_shared(shared: Shared | None, modules: list[nn.Module], call: str) -> None:
    # torch's own error would not name the remedy, and torch does not always raise.
    if shared is None:
        return
    if any(map(is_managed, modules)):
        raise ValueError(
            f"{shared.name} is sharded already, with a module around it; shard layers before the model, so that what "
            "is left to the model is what no layer has"
        )
    raise ValueError(
        f"{call}: {shared}, but fully_shard shards a parameter in one unit alone; shard both modules in one call, "
        "fully_shard([a, b], strategy=...), or only the module around them"
    )


def has_shards(module: nn.Module) -> bool:
    """Return whether a parameter is a DTensor: no file format takes DTensors, even if each rank holds all values."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def check_strategy(strategy: object) -> None:
    if not isinstance(strategy, Strategy):
        refuse_strategy(strategy)


def _check_reshard(strategy: Strategy, reshard_after_forward: object) -> None:
    if reshard_after_forward is True and strategy.parameters == "N" and strategy.optimizer != "N":
        raise ValueError(
            f"reshard_after_forward=True contradicts {strategy.levels!r}, whose parameter scope N keeps the "
            "parameters unsharded until they change; leave it out, or choose parameter scope I or G"
        )
    if not (reshard_after_forward is None or isinstance(reshard_after_forward, bool)):
        raise ValueError(
            f"reshard_after_forward must be a bool or None with a Strategy, got {reshard_after_forward!r}; to gather "
            "inside nodes in the backward, use Strategy('IGG', gpus_per_node=...), which makes its process groups once "
            "and not for each layer"
        )


def _check_nodes(strategy: Strategy, layout: RankLayout, mesh: DeviceMesh, names: tuple[str, ...]) -> None:
    """Raise if a strategy shards inside nodes, but no dimensions of the SPMD mesh span exactly one node."""
    size = layout.topology.gpus_per_node
    if strategy.optimizer == "I" and names_of_node(mesh, names, size) is None:
        shape = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        raise NotImplementedError(
            f"{strategy.levels!r} shards inside nodes of {size} ranks, which are no data-parallel dimensions of the "
            f"mesh {shape} that dp_mesh_dims names: parameters are placed along whole dimensions; make the mesh with "
            "one for the nodes and one for the ranks of a node, or use optimizer scope G or N"
        )


def _check_mesh(mesh: DeviceMesh | None) -> None:
    if mesh is not None and mesh.ndim != 1:
        raise ValueError(
            "a Strategy takes the 1-D mesh of the ranks to shard over, or a 2-D one of nodes x ranks of a node with "
            f"names, got {mesh.ndim} dimensions {mesh.mesh_dim_names or tuple(mesh.shape)}; of a mesh with other "
            'parallelisms pass the data-parallel dimensions, as in mesh["dp"], or name them in dp_mesh_dims='
        )


def named_own_parameters(modules: list[nn.Module], ignored: Iterable[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters to shard, with names: all but ``ignored`` and those that an earlier call sharded."""
    inner = [child for module in modules for child in module.modules() if isinstance(child, FSDPModule)]
    others = {id(p) for child in inner for p in child.parameters()} | {id(p) for p in ignored}
    return [(name, p) for module in modules for name, p in module.named_parameters() if id(p) not in others]


def _check_offload(policy: object) -> None:
    if isinstance(policy, CPUOffloadPolicy) and policy.pin_memory and not torch.accelerator.is_available():
        raise ValueError(
            f"{policy} needs an accelerator to pin memory for; pass CPUOffloadPolicy(pin_memory=False), or none"
        )


def _check_precision(strategy: Strategy, policy: object) -> None:
    if strategy.frozen is not None and getattr(policy, "param_dtype_override_fn", None) is not None:
        raise ValueError(
            f"mp_policy has a param_dtype_override_fn, but frozen={strategy.frozen} gives all weights one dtype; leave "
            "the function out, or leave out frozen= and call quantize_frozen_params(model, dtype=...) yourself"
        )


# ---- sharding


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
        mesh: The 1-D mesh of the data-parallel ranks; it may be a dimension of a larger mesh. Default: all ranks.
            The strategy's ``gpus_per_node`` counts ranks of this mesh. A 2-D mesh, as HSDP takes it, is read as
            nodes x ranks of a node. With ``dp_mesh_dims``, pass the whole SPMD mesh.
        reshard_after_forward: As torch's, except that an int is refused; parameter scope ``I`` keeps a secondary
            shard inside each node instead. On one node, ``Strategy("GGG")`` takes all of torch's arguments: it is
            torch's ``fully_shard`` itself, except for modules that hold packed values.
        **arguments: As torch's: ``mp_policy``, ``offload_policy``, ``shard_placement_fn``, ``ignored_params``,
            ``dp_mesh_dims``. In a mesh that ``shard_placement_fn`` gives, ranks are on the same nodes as in ``mesh``.

    Returns:
        ``module``, whose class is now torch's ``FSDPModule``.

    Raises:
        TypeError: If ``strategy`` is not a ``Strategy``, or a parameter has a dtype that no strategy can shard.
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
    groups = _torch_group.adopt_groups(modules[0], units, paths, infos, _on_lazy_init)
    for unit, path, group, is_stock in zip(units, paths, groups, stock, strict=True):
        if group is not None or is_stock:  # else the modules have no parameters of this part
            for each in modules:
                attach(each, unit, path)
    sharded_here = {id(parameter) for part in parts for _, parameter in part.own}
    unit_name = model_name(modules[0])
    for (owner, own_name), (name, parameter) in sites.items():
        # Skip quantized weights: they are no longer parameters, and several units may share one.
        if id(parameter) in sharded_here and own_name in owner._parameters:
            hold((owner, own_name), name, parameter, unit_name)
    for each in modules:
        guard_save_pretrained(each, has_shards)
    return sharded


PATCHES = (
    Patch(
        "torch.distributed.fsdp.FSDPModule._apply",
        "a move or cast of the model keeps our marks on parameters, and what was gathered of it is stale",
        functools.partial(_torch_weights.after_moves, weights_moved),
    ),
    *(
        Patch(
            f"torch.nn.utils{module}.clip_grad_norm_",
            "gradients of units that are sharded over different ranks get an error that names the remedy",
            explain_clipping_errors,
        )
        for module in ("", ".clip_grad")
    ),
)
"""The functions of torch that this library replaces.

Besides, torch's parameter groups get the class :class:`_torch_group.StrategyGroup` if they have a strategy, and the
module states of their model get :class:`_torch_group.WatchedState`.
"""


def install() -> None:
    for patch in PATCHES:
        patch.apply()


# torch's ``fully_shard`` has the attribute ``state``, which users call.
fully_shard.state = _torch_weights.state_of  # type: ignore[attr-defined]


def _agreed_parts(
    modules: list[nn.Module], strategy: Strategy, arguments: dict[str, Any]
) -> tuple[list[MeshPart], bool]:
    """Return the parts of a call, and whether any parameter holds packed values; raise if ranks shard differently."""
    overrides = strategy.overrides if isinstance(strategy, Strategy) else ()
    given = dict(arguments)
    over = read_mesh(strategy_for(modules[0], strategy) if overrides else strategy, arguments)
    ranks = over.group if over.compared else None
    call = f"fully_shard({', '.join(model_name(module) for module in modules)})"
    if not all(isinstance(module, nn.Module) for module in modules):  # raise on the ranks that passed modules, too
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
    whole = MeshPart(over, own, arguments)
    is_split = isinstance(strategy, Strategy) and (overrides or arguments.get("shard_placement_fn") is not None)
    return split(modules, strategy, whole, given) if is_split else [whole], bool(held)


def _on_lazy_init(root: nn.Module) -> None:
    with repeated_if_failed(root, _torch_weights.init_groups_lazily):
        below = _torch_weights.groups_below(root)
        groups = [group for group in below if isinstance(group, _torch_group.StrategyGroup)]
        others = [_torch_weights.numel_of(group) for group in below if group not in groups]
        for group in groups:
            group.unit.sharded = group
        model, members = model_name(root), [group.unit for group in groups]
        prepare_frozen(root)
        hooks = set_up_model(root, model, members, others)
        log_frozen(root, model, members)
        _torch_group.watch_backwards(root, hooks.backward_ended)
