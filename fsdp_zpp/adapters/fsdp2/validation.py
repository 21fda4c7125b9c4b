"""What fully_shard with a strategy refuses: on every rank, before anything is sent or sharded."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import Shard

from fsdp_zpp.config.mapping import source_of
from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.runtime.validation import check_dtypes, check_instance, check_no_other_parallelism, topology_for

_SHARDED = "_fsdp_zpp_sharded"


def check_arguments(
    modules: list[nn.Module], strategy: Strategy, group: dist.ProcessGroup, arguments: dict[str, Any]
) -> None:
    """Raise for what a strategy can't do; wraps the ``shard_placement_fn`` in ``arguments`` to check its results.

    Args:
        modules: What is to be sharded.
        strategy: How.
        group: The ranks to shard over.
        arguments: What torch's ``fully_shard`` will be called with.

    Raises:
        TypeError, ValueError, NotImplementedError: Saying what to do instead.
    """
    _check_order(modules, arguments.get("ignored_params") or set())
    if is_stock(strategy, group):
        return
    _check_reshard(strategy, arguments["reshard_after_forward"])
    if arguments.get("dp_mesh_dims") is not None:
        raise NotImplementedError(
            "dp_mesh_dims is not supported with a Strategy; pass mesh= the 1-D data-parallel dimension of your mesh, "
            'as in mesh=mesh["dp"]'
        )
    _check_mesh(arguments["mesh"])
    topology_for(strategy, group)
    _check_dtypes(modules, arguments.get("ignored_params") or set())
    _check_offload(arguments.get("offload_policy"))
    _check_precision(strategy, arguments.get("mp_policy"))
    check_no_other_parallelism(strategy, named_own_parameters(modules))
    if (placement := arguments.get("shard_placement_fn")) is not None:
        arguments["shard_placement_fn"] = _checked_placement(placement)


def mark_sharded(modules: list[nn.Module], before: set[nn.Parameter], by: Strategy) -> None:
    """Note that a strategy has sharded the parameters of ``modules`` but for those that they had ``before``."""
    given = {field.name: getattr(by, field.name) for field in dataclasses.fields(by)}
    defaults = {field.name: field.default for field in dataclasses.fields(by)}
    # As text, which torch.load() takes with weights_only, since parameters are saved with their attributes.
    text = source_of({name: value for name, value in given.items() if value != defaults[name]})
    for module in modules:
        for parameter in module.parameters():
            if parameter not in before:
                setattr(parameter, _SHARDED, text)


def sharded_by(parameter: Tensor) -> str | None:
    """The strategy that has sharded a parameter, as source code; None if torch alone has, or nothing."""
    return getattr(parameter, _SHARDED, None)


def _check_order(modules: list[nn.Module], ignored: Iterable[nn.Parameter]) -> None:
    """Raise if a module around ``modules`` was sharded before them: torch would say so at the first forward only."""
    left_alone = {id(parameter) for parameter in ignored}
    for name, parameter in named_own_parameters(modules):
        if sharded_by(parameter) is not None and id(parameter) not in left_alone:
            raise ValueError(
                f"{name} is sharded already, with a module around it; shard layers before the model, so that what is "
                "left to the model is what no layer has"
            )


def is_stock(strategy: Strategy, group: dist.ProcessGroup) -> bool:
    """Whether torch's ``fully_shard`` does it all by itself on ``group``, with whatever arguments it takes."""
    return strategy.is_plain and topology_for(strategy, group).nodes == 1


def check_strategy(strategy: object) -> None:
    """Raise a TypeError unless ``strategy`` is a :class:`Strategy`."""
    check_instance("strategy", strategy)
    if not isinstance(strategy, Strategy):
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


def _check_mesh(mesh: Any) -> None:
    if mesh is not None and mesh.ndim != 1:
        raise ValueError(
            f"a Strategy takes the 1-D mesh of the ranks to shard over, got {mesh.ndim} dimensions "
            f"{mesh.mesh_dim_names or tuple(mesh.shape)}; the split into nodes is gpus_per_node, and of a mesh with "
            'other parallelisms pass the data-parallel dimension, as in mesh["dp"]'
        )


def _check_dtypes(modules: list[nn.Module], ignored: set[nn.Parameter]) -> None:
    check_dtypes(
        ((name, p) for name, p in named_own_parameters(modules) if p not in ignored), "pass others in ignored_params"
    )


def named_own_parameters(modules: list[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that are to be sharded, not those that an earlier call has sharded."""
    inner = [child for module in modules for child in module.modules() if isinstance(child, FSDPModule)]
    sharded = {p for child in inner for p in child.parameters()}
    for module in modules:
        yield from ((name, p) for name, p in module.named_parameters() if p not in sharded)


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


def _checked_placement(placement: Callable[[nn.Parameter], Any]) -> Callable[[nn.Parameter], Shard | None]:
    @functools.wraps(placement)
    def checked(parameter: nn.Parameter) -> Shard | None:
        result = placement(parameter)
        if result is not None and not isinstance(result, Shard):
            raise ValueError(
                f"shard_placement_fn returned {result!r}; with a Strategy it must return a Shard or None: a mesh of "
                "its own for a parameter can't be combined with the strategy's"
            )
        return result

    return checked
