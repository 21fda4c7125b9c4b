"""The parameters and buffers of a model, tied ones once, by their names in the model without adapters.

[Note: Names in files]
Files hold the base, and must be readable whether or not PEFT's adapters, FSDP or activation checkpointing wrap the
model. So a tensor's name in files is its FQN without what those insert, which is found from the modules themselves.
Tensors of adapters have no name in the base. A tied tensor has several names, of which files have one or more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .base import original_path
from .module import frozen_sites
from .weight import FrozenWeight

_PASSED = ("original_module", "token_adapter")
"""The children that hold the wrapped module in PEFT's wrappers of whole modules."""


@dataclass(eq=False)
class ModelTensor:
    """A parameter or buffer, and all places where it is registered.

    Attributes:
        tensor: The parameter or buffer.
        sites: The modules on which it is registered, with its name on each.
        paths: Its FQNs in the model.
        names: Its FQNs in the base; none if it belongs to adapters alone.
        persistent: Whether it is in state dicts.
    """

    tensor: Tensor
    sites: list[tuple[nn.Module, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    persistent: bool = False

    @property
    def name(self) -> str:
        """Its name in errors."""
        return (self.names or self.paths)[0]

    @property
    def keys(self) -> list[str]:
        """The names that files may have for it."""
        return list(dict.fromkeys([*self.paths, *self.names]))

    @property
    def needs_a_value(self) -> bool:
        """Whether files of the base must have it; not if it is an adapter's, or is trainable and has a value."""
        if not self.names or not self.persistent:
            return False
        return self.tensor.is_meta or not self.tensor.requires_grad

    def fill(self, value: Tensor, device: torch.device) -> None:
        """Set it to ``value`` in all its modules; if it is on the meta device, put it on ``device``."""
        if not self.tensor.is_meta:
            with torch.no_grad():
                self.tensor.copy_(value)
            return
        fresh: Tensor = value.to(device, self.tensor.dtype)
        if isinstance(self.tensor, nn.Parameter):
            fresh = nn.Parameter(fresh, requires_grad=self.tensor.requires_grad)
        for module, name in self.sites:
            setattr(module, name, fresh)
        self.tensor = fresh


def model_tensors(model: nn.Module) -> list[ModelTensor]:
    """All parameters and buffers of ``model``, tied ones once, in the model's order."""
    found: dict[int, ModelTensor] = {}
    for path, base, module in walk(model):
        for registry in (module._parameters, module._buffers):
            for name, tensor in registry.items():
                if tensor is None:
                    continue
                one = found.setdefault(id(tensor), ModelTensor(tensor))
                one.sites.append((module, name))
                one.paths.append(_join(path, name))
                if base is not None:
                    one.names.append(_join(base, name))
                one.persistent |= registry is module._parameters or name not in module._non_persistent_buffers_set
    return list(found.values())


def frozen_names(model: nn.Module) -> dict[FrozenWeight, list[str]]:
    """The quantized weights of ``model`` with their names in the base; more than one if tied."""
    bases = {path: base for path, base, _ in walk(model)}
    names: dict[FrozenWeight, list[str]] = {}
    for path, _, name, weight in frozen_sites(model):
        if (base := bases[path]) is not None:
            names.setdefault(weight, []).append(_join(base, name))
    return names


def walk(model: nn.Module) -> Iterator[tuple[str, str | None, nn.Module]]:
    """Each module's FQN, its FQN in the base (None for an adapter's), and the module; shared ones by every FQN."""
    yield from _walk(model, "", "")


def _walk(module: nn.Module, path: str, base: str | None) -> Iterator[tuple[str, str | None, nn.Module]]:
    inserted = _inserted_children(module)
    yield path, None if inserted is not None else base, module
    for name, child in module._modules.items():
        if child is None:
            continue
        if base is None or (inserted is not None and name not in inserted):
            below = None
        elif inserted is not None:
            below = base
        else:
            below = original_path(_join(base, name))
        yield from _walk(child, _join(path, name), below)


def _inserted_children(module: nn.Module) -> tuple[str, ...] | None:
    """The children that take the place of ``module`` in the base if PEFT has inserted it; None if it has not."""
    children = module._modules
    if hasattr(module, "adapter_layer_names"):
        if "base_layer" in children:
            return ("base_layer",)
        if "original_module" in children:
            return _PASSED
    if hasattr(module, "peft_config"):
        if "base_model" in children:  # a PeftModel
            return ("base_model",)
        if "model" in children and hasattr(module, "inject_adapter"):  # its tuner
            return ("model",)
    return None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
