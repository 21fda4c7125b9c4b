"""Tensors of a base model with adapters merged into them, by the names that they have without PEFT."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import nn

from fsdp_zpp.frozen.hugging_face.peft_saving import peft_model_in
from fsdp_zpp.module_names import base_fqns, join_fqn, original_path
from fsdp_zpp.runtime.tensors_of_model import TensorOfModel

from .merged_layer import MergedLayer, MergedParameter

Tensors = Mapping[nn.Module, Mapping[str, TensorOfModel]]
"""The tensors of a model, by module and name."""


def merged_tensors(model: nn.Module, tensors: Sequence[TensorOfModel]) -> list[TensorOfModel]:
    """Return the tensors of the base model, with the active adapters merged into those that have some.

    Each name has what its module computes with: of tied weights, one may have an adapter and the other not.

    Args:
        model: A PEFT model, or one that contains one.
        tensors: Its tensors.

    Raises:
        ImportError: If peft is not installed.
        ValueError: If there is no PEFT model, or its adapters can't be merged.
    """
    peft_model: Any = peft_model_in(model)
    _check_mergeable(peft_model)
    own: dict[nn.Module, dict[str, TensorOfModel]] = {}
    for tensor in tensors:
        for module, name in tensor.sites:
            own.setdefault(module, {})[name] = tensor
    layers = _outermost_layers(model)
    made: dict[str, tuple[MergedLayer, str]] = {}
    result: dict[object, TensorOfModel] = {}
    for path, base, module in _base_modules(model):
        layer = next((each for each in _ancestors(path) if each in layers), None)
        if layer is not None and layer not in made:  # what it wraps comes first, whose FQN in the base is its own
            made[layer] = MergedLayer(layers[layer], _inputs(layers[layer], own, peft_model.peft_config)), base
        for name, tensor in own.get(module, {}).items():
            fqn = join_fqn(base, name)
            if layer is None or tensor.is_buffer:
                result.setdefault(tensor, replace(tensor, names=[])).names.append(fqn)
            else:
                merged, root = made[layer]
                full = MergedParameter(merged, fqn.removeprefix(f"{root}."), tensor.full)
                result[layer, fqn] = replace(tensor, full=full, names=[fqn])
    return list(result.values())


def _check_mergeable(peft_model: Any) -> None:
    for name in peft_model.active_adapters:
        if peft_model.peft_config[name].is_prompt_learning:
            raise ValueError(
                f"merged=True merges adapters into weights, but {name!r} is a "
                f"{peft_model.peft_config[name].peft_type.value} adapter, which changes none"
            )


def _outermost_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return PEFT's layers that wrap base layers, by FQN, but for those inside of others."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: dict[str, nn.Module] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        path = original_path(path)
        wraps = "base_layer" in module._modules and isinstance(module, BaseTunerLayer)
        if wraps and not any(each in layers for each in _ancestors(path)[:-1]):
            layers[path] = module
    return layers


def _ancestors(path: str) -> list[str]:
    """Return a path and those of all that it lies in, outermost first."""
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _base_modules(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield each module of the base with its FQN and its FQN in the base.

    Where an adapter trains a copy of a module (``modules_to_save``), it is the copy.
    """
    modules = {original_path(path): module for path, module in model.named_modules(remove_duplicate=False)}
    copies = dict(_trained_copies(modules))
    for path, base, module in base_fqns(model):
        if base is None:
            continue
        path = original_path(path)
        original = next((each for each in _ancestors(path) if each in copies), None)
        if original is not None:
            module = modules[copies[original] + path.removeprefix(original)]
        yield path, base, module


def _trained_copies(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, str]]:
    """Yield the FQN of each module of which an active adapter trains a copy, and that of the copy."""
    for path, module in modules.items():
        copies = module._modules.get("modules_to_save")
        if copies is None or module._modules.get("original_module") is None:
            continue
        active: Collection[str] = getattr(module, "active_adapters", ())
        names = [name for name in active if name in copies._modules]
        yield from ((f"{path}.original_module", f"{path}.modules_to_save.{name}") for name in names)


def _inputs(layer: Any, own: Tensors, adapters: Collection[str]) -> list[TensorOfModel]:
    """Return the parameters that a layer is merged from: not those of adapters that are not active."""
    others = set(adapters) - set(layer.active_adapters)
    containers = {name.rpartition(".")[2] for name in (*layer.adapter_layer_names, *layer.other_param_names)}
    inputs: dict[TensorOfModel, None] = {}
    for path, module in layer.named_modules():
        for name, tensor in own.get(module, {}).items():
            parts = original_path(f"{path}.{name}").split(".")
            is_others = any(part in containers and key in others for part, key in pairwise(parts))
            if not tensor.is_buffer and not is_others:
                inputs[tensor] = None
    return list(inputs)
