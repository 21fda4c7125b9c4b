"""All tensors of a model's state dict, as what can be had in full, by their FQNs without wrappers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from fsdp_zpp.module_names import parameter_name

from ._torch_flat_parts import FlatPart, Site, flat_parts, is_flat, original_dtypes
from .full_tensors import FullTensor, Whole, full_tensor_of
from .part_of_flat import PartOfFlat


@dataclass(eq=False)
class TensorOfModel:
    """A parameter or persistent buffer, or what stands for one.

    Attributes:
        full: How it is had in full.
        unit: The path of its unit; see :func:`unit_path`.
        is_buffer: Whether it is a buffer.
        sites: The modules that have it, with its name on each.
        names: Its names in the state dict, several if it is tied.
    """

    full: FullTensor
    unit: str
    is_buffer: bool = False
    sites: list[Site] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


Others = Callable[[nn.Module], Mapping[str, FullTensor]]
"""Returns tensors of a module itself that are neither parameters nor buffers, by name; tied ones must be equal."""


@torch.no_grad()  # so that taking the shard of a parameter records no autograd function
def tensors_of(model: nn.Module, others: Others = lambda module: {}) -> list[TensorOfModel]:
    """Return all tensors of a model, tied ones once, in the order of its modules.

    Parameters that a forward left unsharded are sharded again, or modules would show them in mixed precision's dtype.

    Args:
        model: The model, sharded or not.
        others: Finds further tensors.
    """
    reshard(model)
    flat: dict[nn.Module, dict[str, FlatPart]] = {}
    for part in flat_parts(model):
        for module, name in part.sites:
            flat.setdefault(module, {})[name] = part
    dtypes = original_dtypes(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[object, TensorOfModel] = {}
    for path, module in modules.items():
        parts = flat.get(module, {})
        own: dict[str, Tensor] = {name: p for name, p in module._parameters.items() if p is not None and not is_flat(p)}
        buffers = {name: b for name, b in module._buffers.items() if name not in module._non_persistent_buffers_set}
        own |= {name: buffer for name, buffer in buffers.items() if buffer is not None}
        everything: dict[str, Tensor | FlatPart | FullTensor] = {**own, **parts, **others(module)}
        for name, tensor in everything.items():
            key = id(tensor) if isinstance(tensor, Tensor) else tensor
            fqn = parameter_name(path, name)
            if key not in found:
                full = _in_full(tensor, dtypes)
                found[key] = TensorOfModel(full, unit_path(path, modules), is_buffer=name in buffers)
            found[key].sites.append((module, name))
            found[key].names.append(fqn)
    return list(found.values())


def _in_full(tensor: Tensor | FlatPart | FullTensor, dtypes: Mapping[Tensor, torch.dtype]) -> FullTensor:
    if isinstance(tensor, FlatPart):
        return PartOfFlat(tensor)
    if isinstance(tensor, FullTensor):
        return tensor
    return Whole(tensor, dtypes[tensor]) if tensor in dtypes else full_tensor_of(tensor)


def in_units(tensors: Iterable[TensorOfModel]) -> list[list[tuple[TensorOfModel, FullTensor]]]:
    """Group tensors by their units, for :class:`GatherInTurn`."""
    units: dict[str, list[tuple[TensorOfModel, FullTensor]]] = {}
    for tensor in tensors:
        units.setdefault(tensor.unit, []).append((tensor, tensor.full))
    return list(units.values())


def unit_path(path: str, modules: Mapping[str, nn.Module]) -> str:
    """Return the path of the unit that the module at ``path`` belongs to.

    It is the innermost module that FSDP wraps or the outermost item of an ``nn.ModuleList``, whichever is further down;
    a module in neither is a unit of its own.

    Args:
        path: The path.
        modules: All modules of the model, by path.
    """
    parts = path.split(".")
    ancestors = [".".join(parts[:i]) for i in range(1, len(parts) + 1)]
    wrapped = [a for a in ancestors if isinstance(modules[a], (FullyShardedDataParallel, FSDPModule))]
    items = [a for a in ancestors if isinstance(modules[a.rpartition(".")[0]], nn.ModuleList)]
    return max(wrapped[-1:] + items[:1] or [path], key=len)  # the longer path is further down


def reshard(model: nn.Module) -> None:
    """Make ``model.parameters()`` the shards: a forward without a backward leaves those of the root unsharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
