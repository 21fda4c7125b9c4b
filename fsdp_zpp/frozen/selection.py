"""Which parameters of a model are worth quantizing, and why the others are not.

Chosen are the weights of nn.Linear and nn.Embedding, and stacks of matrices, which hold the experts of MoE layers:
parameters of three dimensions, the first greater than 1, of modules that are not torch.nn's own. Vectors, the routers
of MoE layers, convolutions, and position embeddings of shape [1, positions, width] stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_zpp.module_names import parameter_name
from fsdp_zpp.runtime.packed_weights import holds_packed_values
from fsdp_zpp.runtime.validation import DTYPES

from .packed_linear import PackedLinear, packed_linear
from .sharded_params import FlatParamHandleView, ShardedParamHandle, flat_params_in, sharded_params_in

SHARDED = "sharded by FSDP already"
PACKED = "packed already"
OTHERWISE_SHARDED = "sharded by another parallelism"


@dataclass
class Candidate:
    """A weight and all modules that use it.

    Attributes:
        parameter: The weight.
        sites: For each module that uses it: the module's path, the module, and its name there.
        owner: Gives it up if it is sharded; None if it is plain.
        packed: Unpacks it if bitsandbytes has packed it; None if it is plain.
    """

    parameter: nn.Parameter
    sites: list[tuple[str, nn.Module, str]]
    owner: ShardedParamHandle | None = None
    packed: PackedLinear | None = None

    @property
    def shape(self) -> torch.Size:
        """Its shape, unpacked."""
        return self.parameter.shape if self.packed is None else self.packed.shape

    @property
    def name(self) -> str:
        """The path of the weight, by its first module."""
        path, _, own_name = self.sites[0]
        return f"{path}.{own_name}".removeprefix(".")


@dataclass
class Selection:
    """The weights to quantize, and the parameters that stay as they are.

    Attributes:
        chosen: The weights to quantize, in the order of the model.
        left: Names and values of frozen parameters that stay as they are, by the reason.
        to_open: Flat parameters that must be taken apart before the weights in them can be chosen.
    """

    chosen: list[Candidate] = field(default_factory=list)
    left: dict[str, list[tuple[str, nn.Parameter]]] = field(default_factory=dict)
    to_open: list[FlatParamHandleView] = field(default_factory=list)


def select(
    model: nn.Module,
    min_numel: int,
    ignored: Collection[Tensor] = (),
    take_sharded: bool = False,
    only: Collection[Tensor] | None = None,
    unpack: bool = False,
) -> Selection:
    """Choose frozen weights, tied ones once. See the top of this file.

    Args:
        model: The model.
        min_numel: Weights with fewer values stay as they are.
        ignored: Parameters that stay as they are.
        take_sharded: Whether to choose sharded weights, too, if their owner gives them up.
        only: The parameters to look at. Default: all.
        unpack: Whether to choose weights that bitsandbytes has packed in 4 bits, too.
    """
    selection = Selection()
    ignored_ids, only_ids = {id(tensor) for tensor in ignored}, {id(tensor) for tensor in only or ()}
    trainable_uses, seen = _sites_by_parameter(model), set()
    adapters, owners = _adapter_modules(model), sharded_params_in(model)
    later, stuck = _in_flattened(model, selection, take_sharded) if only is None else (set(), {})
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.requires_grad or id(parameter) in seen:
                continue
            if id(parameter) in later or (only is not None and id(parameter) not in only_ids):
                continue
            seen.add(id(parameter))
            sites, owner = trainable_uses[id(parameter)], owners.get(id(parameter))
            packed = packed_linear(parameter, [site for _, _, site in sites]) if unpack and owner is None else None
            if id(parameter) in ignored_ids:
                reason: str | None = "to be ignored"
            elif any(id(site) in adapters for _, _, site in sites):
                reason = "an adapter's"
            elif _fits(module, name, stuck.get(id(parameter), parameter.shape)) and (
                id(parameter) in stuck or parameter.dim() < 2 or _stays(parameter, owner, take_sharded)
            ):
                # Before the other checks: a sharded parameter may have another shape and class now.
                foreign = owner is None and isinstance(parameter, DTensor)
                reason = OTHERWISE_SHARDED if foreign else SHARDED
            else:
                kind = type(parameter) if owner is None else owner.kind
                reason = _unfit(parameter, kind, [(site, own) for _, own, site in sites], min_numel, packed)
            if reason is None:
                places = [(where, site, own) for where, own, site in sites]
                selection.chosen.append(Candidate(parameter, places, owner, packed))
            else:
                selection.left.setdefault(reason, []).append((parameter_name(path, name), parameter))
    return selection


def refuse_sharded(selection: Selection, remedy: str) -> None:
    """Raise if weights that would be quantized stay with FSDP or with another parallelism.

    Raises:
        ValueError: It names one of them and the ``remedy``.
    """
    if sharded := selection.left.get(SHARDED):
        raise ValueError(
            f"{sharded[0][0]} is sharded by FSDP already; {remedy}, or wrap it with Strategy(..., frozen=...), which "
            "quantizes what it wraps"
        )
    if sharded := selection.left.get(OTHERWISE_SHARDED):
        raise ValueError(
            f"{sharded[0][0]} is sharded by another parallelism (tensor parallelism, or FSDP around this module), and "
            "a frozen base is made of whole weights; pass such weights in ignored_params, which leaves them as they are"
        )


def _in_flattened(model: nn.Module, selection: Selection, take_sharded: bool) -> tuple[set[int], dict[int, torch.Size]]:
    """Add flat parameters to take apart to ``selection``.

    Returns:
        The ids of the parameters in them, which are looked at later; and, with the shapes that they had, the ids of the
        parameters that stay flattened.
    """
    later: set[int] = set()
    stuck: dict[int, torch.Size] = {}
    paths = {module: path for path, module in model.named_modules()}
    for holder in flat_params_in(model):
        ids = {id(parameter) for parameter in holder.parameters}
        # A flat parameter may hold parameters of modules outside of model, if that is only a part.
        fitting = [(site, own) for site, own, shape in holder.sites if site in paths and _fits(site, own, shape)]
        weights = [site._parameters.get(own) for site, own in fitting]
        if not ids and fitting and not holder.requires_grad:
            # Modules show only the flat parameter, so the loop over their parameters does not find this weight.
            name = parameter_name(paths[fitting[0][0]], fitting[0][1])
            selection.left.setdefault(SHARDED, []).append((name, nn.Parameter()))
        elif take_sharded and holder.can_open and any(w is not None and not w.requires_grad for w in weights):
            selection.to_open.append(holder)
            later |= ids
        else:
            shown = [(site._parameters.get(own), shape) for site, own, shape in holder.sites]
            stuck |= {id(parameter): shape for parameter, shape in shown if parameter is not None}
    return later, stuck


def _stays(parameter: nn.Parameter, owner: ShardedParamHandle | None, take_sharded: bool) -> bool:
    """Whether it is sharded, and stays so."""
    if owner is None:
        return isinstance(parameter, DTensor)  # by something that no adapter knows of
    return not (take_sharded and owner.can_release)


def _unfit(
    parameter: nn.Parameter,
    kind: type,
    sites: list[tuple[nn.Module, str]],
    min_numel: int,
    packed: PackedLinear | None,
) -> str | None:
    """Why a parameter can't or should not be quantized; None if it should be."""
    if parameter.dim() == 1:
        return "1-D"
    for module, name in sites:
        if not _fits(module, name, parameter.shape):
            return f"of {type(module).__name__}, not nn.Linear or nn.Embedding"
        if hasattr(module, "parametrizations"):
            return "parametrized"
        if getattr(module, "max_norm", None) is not None:
            return "an nn.Embedding with max_norm, which writes to it"
    if packed is None and holds_packed_values(parameter):
        return f"{PACKED} as {kind.__name__}"
    if packed is None and (kind not in (nn.Parameter, Tensor) or parameter.dtype not in DTYPES):
        return f"a {kind.__name__} of {parameter.dtype}"
    if (parameter.numel() if packed is None else packed.shape.numel()) < min_numel:
        return f"smaller than {min_numel} values"
    return None


def _fits(module: nn.Module, name: str, shape: torch.Size) -> bool:
    """Whether a parameter is a weight of the kind that is quantized. See the top of this file."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        return name == "weight"
    of_torch = any(cls.__module__.startswith("torch.nn.") and cls is not nn.Module for cls in type(module).__mro__)
    return len(shape) == 3 and shape[0] > 1 and not of_torch


def _sites_by_parameter(model: nn.Module) -> dict[int, list[tuple[str, str, nn.Module]]]:
    """For each parameter, by its id: the path of each of its modules, its name there, and the module."""
    sites: dict[int, list[tuple[str, str, nn.Module]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                sites.setdefault(id(parameter), []).append((path, name, module))
    return sites


def _adapter_modules(model: nn.Module) -> set[int]:
    """The ids of the modules of PEFT's adapters: inactive ones are frozen, but are not part of the base."""
    found = set()
    for module in model.modules():
        for name in (*getattr(module, "adapter_layer_names", ()), "modules_to_save"):
            container = getattr(module, name, None)
            if isinstance(container, nn.Module):
                found |= {id(inner) for inner in container.modules()}
    return found
