"""Refuses what fully_shard can't do with a strategy: on every rank, before anything is sent or sharded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.runtime.packed_weights import packed
from fsdp_zpp.runtime.rank_layout import RankLayout
from fsdp_zpp.runtime.shared_parameters import Shared, Units
from fsdp_zpp.runtime.validation import check_dtypes, check_exchanges, check_instance
from fsdp_zpp.torch_internals import major_minor

from ._torch import is_managed
from .data_parallel_mesh import names_of_node

UNITS = Units(
    is_unit=lambda module: isinstance(module, FSDPModule),
    is_torchs=lambda module, parameter: isinstance(parameter, DTensor) and is_managed(module),
)

_TAKES_INTEGERS = major_minor(torch.__version__) >= (2, 13)
"""True if torch's ``fully_shard`` takes frozen integers; before 2.13, parameters had to be able to have gradients."""
_REMEDY = "pass others in ignored_params"


def check_arguments(
    own: list[tuple[str, nn.Parameter]], strategy: Strategy, group: dist.ProcessGroup, arguments: dict[str, Any]
) -> RankLayout:
    """Raise if a strategy can't shard so.

    Args:
        own: What is to be sharded, with names.
        strategy: How.
        group: The ranks to shard over.
        arguments: What torch's ``fully_shard`` will be called with.

    Returns:
        Where the ranks lie.

    Raises:
        TypeError, ValueError, NotImplementedError: Saying what to do instead.
    """
    check_strategy(strategy)
    layout = RankLayout.of(strategy, group)
    # Even if all is left to torch, which would say that integers can't have gradients.
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
    """Raise if a call would shard what another one has sharded: torch would raise in its own terms, or not at all.

    Args:
        shared: The parameter that :data:`UNITS` has found, if any.
        modules: The modules that the call shards.
        call: The call, as errors name it.

    Raises:
        ValueError: If there is one.
    """
    if shared is None:
        return
    if any(map(is_managed, modules)):
        raise ValueError(
            f"{shared.name} is sharded already, with a module around it; shard layers before the model, so that what "
            "is left to the model is what no layer has"
        )
    raise ValueError(
        f"{call}: {UNITS.explain(shared, modules[0], modules)}: it is shared by two units, but fully_shard shards a "
        "parameter in one unit alone; shard both modules in one call, fully_shard([a, b], strategy=...), or only the "
        "module around them"
    )


def has_shards(module: nn.Module) -> bool:
    """Return whether a parameter is a DTensor: no file format takes one, even if each rank holds all of it."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def check_strategy(strategy: object) -> None:
    """Raise a TypeError unless ``strategy`` is a :class:`Strategy`."""
    if not isinstance(strategy, Strategy):
        check_instance("strategy", strategy)
        raise TypeError(f"strategy must be a Strategy such as Strategy.zeropp(), got {strategy!r}")


def _check_reshard(strategy: Strategy, reshard_after_forward: object) -> None:
    if reshard_after_forward is True and strategy.parameters == "N" and strategy.optimizer != "N":
        raise ValueError(
            f"reshard_after_forward=True contradicts {strategy.levels!r}, whose parameter scope N keeps the "
            "parameters unsharded until they change; leave it out, or choose parameter scope I or G"
        )
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return
    raise ValueError(
        f"reshard_after_forward must be a bool or None with a Strategy, got {reshard_after_forward!r}; to gather "
        "inside nodes in the backward, use Strategy('IGG', gpus_per_node=...), which makes its process groups once and "
        "not for each layer"
    )


def _check_nodes(strategy: Strategy, layout: RankLayout, mesh: DeviceMesh, names: tuple[str, ...]) -> None:
    """Raise if a strategy shards inside nodes, and these are no dimensions of the SPMD mesh: torch flattens none."""
    size = layout.topology.gpus_per_node
    if strategy.optimizer == "I" and names_of_node(mesh, names, size) is None:
        shape = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        raise NotImplementedError(
            f"{strategy.levels!r} shards inside nodes of {size} ranks, which are no data-parallel dimensions of the "
            f"mesh {shape} that dp_mesh_dims names: parameters are placed along whole dimensions; make the mesh with "
            "one for the nodes and one for the ranks of a node, or use optimizer scope G or N"
        )


def _check_mesh(mesh: DeviceMesh | None) -> None:
    if mesh is None or mesh.ndim == 1:
        return
    names: tuple[object, ...] = mesh.mesh_dim_names or tuple(mesh.shape)
    raise ValueError(
        "a Strategy takes the 1-D mesh of the ranks to shard over, or a 2-D one of nodes x ranks of a node with names, "
        f"got {mesh.ndim} dimensions {names}; of a mesh with other parallelisms pass the data-parallel dimensions, as "
        'in mesh["dp"], or name them in dp_mesh_dims='
    )


def named_own_parameters(modules: list[nn.Module], ignored: Iterable[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that are to be sharded, with names: without ``ignored`` and those of an earlier call."""
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
