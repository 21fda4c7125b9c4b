"""Selects the parameters of a model that are worth quantizing, and says why the others are not.

Chosen are the weights of nn.Linear and nn.Embedding, and stacks of matrices, which hold the experts of MoE layers:
parameters of three dimensions, the first greater than 1, of modules that are not torch.nn's own. Vectors, the routers
of MoE layers, convolutions, and position embeddings of shape [1, positions, width] stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter, FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_zpp.collectives.agreement import check_agreement
from fsdp_zpp.module_names import model_name, parameter_name
from fsdp_zpp.runtime.packed_weights import holds_packed_values
from fsdp_zpp.runtime.rank_layout import launched_node_size
from fsdp_zpp.runtime.tensors_of_model import reshard
from fsdp_zpp.runtime.validation import DTYPES

from ._torch_sharded import sharded_parameters
from .finite import refuse_infinite_values
from .packed_linear import PackedLinear, packed_linear

SHARDED = "sharded by FSDP already"
PACKED = "packed already"
PLAIN = "not stored quantized"
OTHERWISE_SHARDED = "sharded by another parallelism"


@dataclass(eq=False)  # found by identity
class Candidate:
    """A weight and all modules that use it.

    Attributes:
        parameter: The weight.
        sites: For each module that uses it: the module's path, the module, and its name there.
        packed: Unpacks it if another library has packed it; None if it is plain.
    """

    parameter: nn.Parameter
    sites: list[tuple[str, nn.Module, str]]
    packed: PackedLinear | None = None

    @property
    def shape(self) -> torch.Size:
        """Return the weight's shape, unpacked."""
        return self.parameter.shape if self.packed is None else self.packed.shape

    @property
    def name(self) -> str:
        """Return the path of the weight, by its first module."""
        path, _, own_name = self.sites[0]
        return f"{path}.{own_name}".removeprefix(".")


@dataclass
class Selection:
    """Weights to quantize, and parameters that stay as they are.

    Attributes:
        chosen: The weights to quantize, in the order of the model.
        left: Names and values of frozen parameters that stay as they are, by the reason.
    """

    chosen: list[Candidate] = field(default_factory=list)
    left: dict[str, list[tuple[str, nn.Parameter]]] = field(default_factory=dict)

    def leave(self, candidate: Candidate, reason: str) -> None:
        """Leave a weight that was chosen as it is."""
        self.chosen.remove(candidate)
        self.left.setdefault(reason, []).append((candidate.name, candidate.parameter))

    def leave_plain(self) -> None:
        """Leave all weights that no library has packed: there are no codes of them to keep."""
        for candidate in [each for each in self.chosen if each.packed is None]:
            self.leave(candidate, PLAIN)

    @property
    def left_names(self) -> dict[str, tuple[str, ...]]:
        """Return the names of parameters that stay as they are, by the reason."""
        return {reason: tuple(name for name, _ in parameters) for reason, parameters in self.left.items()}

    def refuse_infinite(self) -> None:
        """Raise if weights that are to be quantized have NaN or infinite values on this rank.

        Raises:
            ValueError: It names the weight.
        """
        for candidate in self.chosen:
            if candidate.packed is None:
                refuse_infinite_values(candidate.parameter.detach(), candidate.name, "load it again")

    def refuse_sharded(self, remedy: str) -> None:
        """Raise if weights that would be quantized are sharded already, by FSDP or by another parallelism.

        Raises:
            ValueError: It names the first of them and the ``remedy``.
        """
        if sharded := self.left.get(SHARDED):
            raise ValueError(f"{sharded[0][0]} is sharded by FSDP already; {remedy}")
        if sharded := self.left.get(OTHERWISE_SHARDED):
            raise ValueError(
                f"{sharded[0][0]} is sharded by another parallelism (tensor parallelism, or FSDP around this module), "
                "and a frozen base is made of whole weights; call quantize_frozen_params before FSDP shards them, or "
                "pass them in ignored_params, which leaves them as they are"
            )

    def check_agreement(
        self,
        call: str,
        model: nn.Module,
        group: dist.ProcessGroup | None,
        gpus_per_node: int | None,
        facts: dict[str, object],
    ) -> None:
        """Raise on every rank of ``group`` unless all ranks select the same by the same arguments. Collective.

        Args:
            call: The public function that was called, for the error.
            model: The model.
            group: The ranks; None means this process alone.
            gpus_per_node: The node size that the user gave.
            facts: Other arguments of the call, by name.

        Raises:
            ValueError: If they differ.
        """
        if group is None:
            return
        # A size that was given differs from the same size by default: only the default one follows a strategy later.
        nodes = gpus_per_node or f"{launched_node_size(group)} (as launched)"
        chosen = {f"weight {c.name}": f"{c.parameter.dtype} {list(c.parameter.shape)}" for c in self.chosen}
        check_agreement(group, f"{call}({model_name(model)})", {"gpus_per_node": nodes} | facts | chosen)


def select(model: nn.Module, min_numel: int, ignored: Collection[Tensor] = (), unpack: bool = False) -> Selection:
    """Choose frozen weights, tied ones once. See the top of this file.

    Args:
        model: The model. Parts that FSDP has sharded are resharded.
        min_numel: Weights with fewer values stay as they are.
        ignored: Parameters that stay as they are.
        unpack: Whether to choose weights that other libraries have packed, too; see packed_linear.py.
    """
    reshard(model)  # what fully_shard has gathered of a parameter is a plain tensor, and the parameter still FSDP's
    selection, seen = Selection(), set()
    ignored_ids, adapters = {id(tensor) for tensor in ignored}, _adapter_modules(model)
    sites_of, sharded, under_fsdp = _sites_by_parameter(model), sharded_parameters(model), _under_fully_shard(model)
    for path, module in model.named_modules():
        shapes = {name: shape for name, (_, shape) in sharded[module].items()}
        # FullyShardedDataParallel does not have modules show all of what it has sharded.
        shown = module._parameters | {name: parameter for name, (parameter, _) in sharded[module].items()}
        for name, parameter in shown.items():
            if parameter is None or parameter.requires_grad or id(parameter) in seen:
                continue
            is_sharded = name in shapes and _fits(module, name, shapes[name])
            if isinstance(parameter, FlatParameter) and not is_sharded:
                continue  # what else it holds may be a weight
            seen.add(id(parameter))
            sites = sites_of.get(id(parameter), [(path, module, name)])
            packed = packed_linear(parameter, [site for _, site, _ in sites]) if unpack and not is_sharded else None
            if id(parameter) in ignored_ids:
                reason: str | None = "to be ignored"
            elif any(id(site) in adapters for _, site, _ in sites):
                reason = "an adapter's"
            elif is_sharded:
                # Before the other checks: a sharded parameter may have another shape and class now.
                by_another = isinstance(parameter, DTensor) and module not in under_fsdp
                reason = OTHERWISE_SHARDED if by_another else SHARDED
            else:
                reason = _unfit(parameter, sites, min_numel, packed)
            if reason is None:
                selection.chosen.append(Candidate(parameter, sites, packed))
                if packed is not None:  # its scales go with it
                    seen |= {
                        id(each)
                        for name in packed.beside
                        for each in [module._parameters.get(name)]
                        if each is not None
                    }
            else:
                selection.left.setdefault(reason, []).append((parameter_name(path, name), parameter))
    return selection


def _under_fully_shard(model: nn.Module) -> set[nn.Module]:
    """Return the modules below ``model`` that ``fully_shard`` was called on, and all modules inside them."""
    return {part for module in model.modules() if isinstance(module, FSDPModule) for part in module.modules()}


def _unfit(
    parameter: nn.Parameter, sites: list[tuple[str, nn.Module, str]], min_numel: int, packed: PackedLinear | None
) -> str | None:
    """Return why a parameter can't or should not be quantized; None if it should be."""
    kind = type(parameter)
    if parameter.dim() == 1:
        return "1-D"
    for _, module, name in sites:
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
    """Return whether a parameter is a weight of the kind that is quantized. See the top of this file."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        return name == "weight"
    of_torch = any(cls.__module__.startswith("torch.nn.") and cls is not nn.Module for cls in type(module).__mro__)
    return len(shape) == 3 and shape[0] > 1 and not of_torch


def _sites_by_parameter(model: nn.Module) -> dict[int, list[tuple[str, nn.Module, str]]]:
    """Return for each parameter, by its id: the path of each of its modules, the module, and its name there."""
    sites: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                sites.setdefault(id(parameter), []).append((path, module, name))
    return sites


def _adapter_modules(model: nn.Module) -> set[int]:
    """Return the ids of the modules of PEFT's adapters: inactive ones are frozen, but are not part of the base."""
    modules = set()
    for module in model.modules():
        for name in (*getattr(module, "adapter_layer_names", ()), "modules_to_save"):
            container = getattr(module, name, None)
            if isinstance(container, nn.Module):
                modules |= {id(inner) for inner in container.modules()}
    return modules
