"""Parameters and buffers of a model, tied ones once, with the names that they have in files."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fsdp_zpp.module_names import base_fqns, join_fqn

from ..modules import frozen_sites
from ..weight import FrozenWeight


@dataclass(eq=False)  # compared and hashed by identity, since comparing tensors compares their values
class ModelTensor:
    """A parameter or buffer, and all places where it is registered.

    Attributes:
        tensor: The parameter or buffer.
        sites: The modules on which it is registered, with its name on each.
        paths: Its FQNs in the model.
        names: Its FQNs in the base; none if only adapters use it.
        persistent: Whether it is in state dicts.
    """

    tensor: Tensor
    sites: list[tuple[nn.Module, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    persistent: bool = False

    @property
    def name(self) -> str:
        """Return its name in errors."""
        return (self.names or self.paths)[0]

    @property
    def keys(self) -> list[str]:
        """Return the names that it may have in files."""
        return list(dict.fromkeys([*self.paths, *self.names]))

    @property
    def needs_a_value(self) -> bool:
        """Return whether files of the base must have it: unless it is an adapter's, or trainable with a value."""
        if not self.names or not self.persistent:
            return False
        return self.tensor.is_meta or not self.tensor.requires_grad

    def fill(self, value: Tensor, device: torch.device) -> None:
        """Set the tensor to ``value`` in all its modules; if it is on the meta device, put it on ``device``."""
        if not self.tensor.is_meta:
            with torch.no_grad():  # in place: whoever holds the tensor, an optimizer say, keeps it
                self.tensor.copy_(value)
            return
        fresh: Tensor = value.to(device, self.tensor.dtype)
        if isinstance(self.tensor, nn.Parameter):
            fresh = nn.Parameter(fresh, requires_grad=self.tensor.requires_grad)
        for module, name in self.sites:
            setattr(module, name, fresh)
        self.tensor = fresh


def model_tensors(model: nn.Module) -> list[ModelTensor]:
    """Return all parameters and buffers of ``model``, tied ones once, in the model's order."""
    tensors: dict[int, ModelTensor] = {}
    for path, base, module in base_fqns(model):
        for registry in (module._parameters, module._buffers):
            for name, tensor in registry.items():
                if tensor is None:
                    continue
                entry = tensors.setdefault(id(tensor), ModelTensor(tensor))
                entry.sites.append((module, name))
                entry.paths.append(join_fqn(path, name))
                if base is not None:
                    entry.names.append(join_fqn(base, name))
                # A tied tensor is in state dicts if any of its places puts it there.
                entry.persistent |= registry is module._parameters or name not in module._non_persistent_buffers_set
    return list(tensors.values())


def frozen_names(model: nn.Module) -> dict[FrozenWeight, list[str]]:
    """Return the quantized weights of ``model`` with their names in the base, several if tied."""
    bases = {path: base for path, base, _ in base_fqns(model)}
    names: dict[FrozenWeight, list[str]] = {}
    for path, _, name, weight in frozen_sites(model):
        if (base := bases[path]) is not None:
            names.setdefault(weight, []).append(join_fqn(base, name))
    return names
