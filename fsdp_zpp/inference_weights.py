"""Full weights of a sharded model, for an inference engine."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_zpp.comm.agreement import agree
from fsdp_zpp.comm.hops import AllGathers
from fsdp_zpp.frozen._torch_modules import FrozenModule, plain_class
from fsdp_zpp.frozen.hugging_face import adapter_tensors, as_plain, decoded_weights_of, path_of, peft_model_in
from fsdp_zpp.runtime.api import DTYPES, check_module, ranks_of
from fsdp_zpp.runtime.full_tensors import FullTensor, GatherInTurn, Pending, TensorOfModel, gets, tensors_of
from fsdp_zpp.runtime.unit import is_packed

from .names import WRAPPERS, base_fqns, join_fqn, original_path

# ---- stand in
#
# Stand-ins for modules of a sharded model: copies of the modules, with full tensors in place of shards.
#
# Each kind of PEFT layer has its own methods to merge adapters. They need full tensors, which stand-ins have.

Values = Mapping[nn.Module, Mapping[str, Tensor]]  # full tensors by module and name


def stand_in(module: nn.Module, values: Values, memo: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return a copy of ``module``, without wrappers, whose parameters are ``values``. Nothing communicates.

    Lists, dicts and sets are copied, since methods may add to them; everything else is shared with the original.
    ``memo`` has the stand-ins that were made before.
    """
    wrapped = next((module._modules[name] for name in WRAPPERS if name in module._modules), None)
    if wrapped is not None:
        return stand_in(wrapped, values, memo)
    if module in memo:
        return memo[module]
    cls = plain_class(module) if isinstance(module, FrozenModule) else type(module)
    copied: nn.Module = nn.Module.__new__(cls)
    memo[module] = copied
    full = values.get(module, {})
    for name, value in vars(module).items():
        if name not in full:  # otherwise, ``value`` is a tensor that FSDP has gathered
            vars(copied)[name] = copy.copy(value) if isinstance(value, (list, dict, set)) else value
    copied._parameters.update({name: nn.Parameter(tensor, requires_grad=False) for name, tensor in full.items()})
    copied._modules.update(
        {name: stand_in(child, values, memo) for name, child in module._modules.items() if child is not None}
    )
    return copied


# ---- merged layer
#
# A layer with adapters, gathered as a whole and merged by PEFT's own method.


class MergedLayer:
    """A layer of PEFT's that merges its adapters once, for all parameters of its base layer.

    ``inputs`` are the parameters of the base layer and of active adapters.
    """

    def __init__(self, layer: nn.Module, inputs: Sequence[TensorOfModel]) -> None:
        self._layer, self._inputs = layer, inputs
        self._pending: list[Pending] = []
        self._merged: dict[str, Tensor] = {}
        self.is_started = False

    @property
    def nbytes(self) -> int:
        # This leaves out the memory that PEFT allocates while it merges.
        return sum(tensor.full.peak_nbytes(None) for tensor in self._inputs)

    def start(self, to: int | None, gathers: AllGathers) -> list[Pending]:
        """Start to gather the inputs, each in its own dtype; return the pending tensors."""
        self.is_started = True
        self._pending = [tensor.full.start(None, to, gathers) for tensor in self._inputs]
        return self._pending

    def take(self, name: str, to: int | None) -> Tensor | None:
        """Return the merged parameter ``name`` of the base layer; None if this rank gets nothing."""
        if self._pending:
            values: dict[nn.Module, dict[str, Tensor]] = {}
            for tensor, pending in zip(self._inputs, self._pending, strict=True):
                full = pending.wait()
                if full is not None:
                    for module, own_name in tensor.sites:
                        values.setdefault(module, {})[own_name] = full
            self._pending = []
            if gets(to):
                self._merged = _merge(self._layer, values)
        return self._merged.pop(name, None)


@torch.no_grad()
def _merge(layer: nn.Module, values: Values) -> dict[str, Tensor]:
    copied: Any = stand_in(layer, values, {})
    # As PEFT's merge_and_unload does: some layers have a method of their own.
    if hasattr(copied, "unload_and_optionally_merge_module"):
        base = copied.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    else:
        copied.merge()
        base = copied.get_base_layer()
    return {name: parameter.detach() for name, parameter in base.named_parameters()}


class MergedParameter(FullTensor):
    """The parameter ``name`` of a base layer, with adapters merged into it; ``base`` is the unmerged parameter."""

    def __init__(self, layer: MergedLayer, name: str, base: FullTensor) -> None:
        self._layer, self._name = layer, name
        self.shape, self.stored = base.shape, base.stored

    def peak_nbytes(self, dtype: torch.dtype | None) -> int:
        # Count the whole layer for each parameter: the first parameter to start gathers all of the layer.
        return self._layer.nbytes + self.nbytes(dtype) * (self.as_delivered(dtype) != self.stored)

    def start(self, dtype: torch.dtype | None, to: int | None, gathers: AllGathers) -> Pending:
        pending = Pending(self, dtype, to)
        if not self._layer.is_started:
            pending.works = [work for each in self._layer.start(to, gathers) for work in each.works]
        return pending

    def finish(self, out: Tensor | None, dtype: torch.dtype | None, to: int | None) -> Tensor | None:
        merged = self._layer.take(self._name, to)
        return None if merged is None else merged.to(self.as_delivered(dtype))


# ---- merged names
#
# Tensors of a base model, with adapters merged into them and the names that they have without PEFT.

Tensors = Mapping[nn.Module, Mapping[str, TensorOfModel]]  # by module and name


def merged_tensors(model: nn.Module, tensors: Sequence[TensorOfModel]) -> list[TensorOfModel]:
    """Return the ``tensors`` of the base in ``model``, with active adapters merged into the weights that they adapt.

    If only one of two tied weights has an adapter, each name gets the weight of its own module.

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
        if layer is not None and layer not in made:  # ``module`` is its base layer: ``base`` is the layer's FQN
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
    """Return the outermost of PEFT's layers that wrap base layers, by FQN."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: dict[str, nn.Module] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        path = original_path(path)
        wraps = "base_layer" in module._modules and isinstance(module, BaseTunerLayer)
        if wraps and not any(each in layers for each in _ancestors(path)[:-1]):
            layers[path] = module
    return layers


def _ancestors(path: str) -> list[str]:
    """Return the paths of a module's ancestors and its own, outermost first."""
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _base_modules(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield, for each module of the base, its FQN in ``model``, its FQN in the base, and the module.

    If an adapter trains a copy of a module (``modules_to_save``), the copy is yielded instead of the module.
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
    """Yield the FQNs of each original module and of its copy that an active adapter trains."""
    for path, module in modules.items():
        copies = module._modules.get("modules_to_save")
        if copies is None or module._modules.get("original_module") is None:
            continue
        active: Collection[str] = getattr(module, "active_adapters", ())
        names = [name for name in active if name in copies._modules]
        yield from ((f"{path}.original_module", f"{path}.modules_to_save.{name}") for name in names)


def _inputs(layer: Any, own: Tensors, adapters: Collection[str]) -> list[TensorOfModel]:
    """Return the parameters that a layer needs for its merge: all but those of inactive adapters."""
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


# ---- adapter names
#
# The tensors of one PEFT adapter, with their names in PEFT's files.


def active_adapter_tensors(model: nn.Module) -> list[TensorOfModel]:
    """Return the tensors of the active adapter, by their names in the files of ``save_adapter``.

    Raises:
        ImportError: If peft is not installed.
        ValueError: If there is no PEFT model, or not exactly one active adapter, or if PEFT computes some
            tensors of the adapter's files from its parameters.
    """
    peft_model: Any = peft_model_in(model)
    from peft import get_peft_model_state_dict

    active = list(peft_model.active_adapters)
    if len(active) != 1:
        raise ValueError(
            f"adapters_only=True hands out the active adapter, but {active} are active; choose one with "
            "model.set_adapter(name)"
        )
    prefix = path_of(peft_model, model)
    tensors = adapter_tensors(model, peft_model)
    by_name = {name.removeprefix(prefix): tensor for tensor in tensors for name in tensor.names}
    # PEFT selects and renames entries of a state dict of meta tensors, as it does for its files.
    state = {name: torch.empty(tensor.full.shape, device="meta") for name, tensor in by_name.items()}
    tensor_of = {id(value): by_name[name] for name, value in state.items()}
    if not peft_model.peft_config[active[0]].is_prompt_learning:
        with as_plain(peft_model, {}):
            # With save_embedding_layers, PEFT may add frozen embeddings, and access the network to compare them.
            files: dict[str, Tensor] = get_peft_model_state_dict(
                peft_model, state_dict=state, adapter_name=active[0], save_embedding_layers=False
            )
    else:
        files = {"": torch.empty(0)}
    if any(id(value) not in tensor_of for value in files.values()):
        raise ValueError(
            f"the files of the adapter {active[0]!r} have tensors that PEFT computes from its parameters; write them "
            "with save_adapter instead"
        )
    result: dict[TensorOfModel, list[str]] = {}
    for name, value in files.items():
        result.setdefault(tensor_of[id(value)], []).append(name)
    return [replace(tensor, names=names) for tensor, names in result.items()]


# ---- gathered weights
#
# ``gathered_weights`` hands out the weights of a sharded model in full, tensor by tensor.


@overload
def gathered_weights(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    adapters_only: bool = False,
    merged: bool = False,
    rank: None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Iterator[tuple[str, Tensor]]: ...


@overload
def gathered_weights(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    adapters_only: bool = False,
    merged: bool = False,
    rank: int,
    process_group: dist.ProcessGroup | None = None,
) -> Iterator[tuple[str, Tensor | None]]: ...


def gathered_weights(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    adapters_only: bool = False,
    merged: bool = False,
    rank: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Iterator[tuple[str, Tensor | None]]:
    """Return an iterator over the names and full tensors of a model, for an inference engine. Collective.

    By default these are the tensors of the full state dict, bit for bit and by the same names, in full precision
    even under mixed precision. A tied tensor comes under each of its names; a quantized weight comes decoded, under
    its former name. Entries ``_extra_state`` are left out. The tensors are yours: nothing else refers to them.

    A few tensors are gathered at a time, the next ones while you use the current one. Together with the current one
    they take at most the memory of the largest unit, or of two tensors if that is more. Tensors that you keep come on
    top, as do, with ``merged``, the copies that PEFT makes of one weight.

    All ranks must iterate to the end, or leave at the same tensor. Don't change the model meanwhile. With local steps
    each node hands out its own weights, as in state dicts; within :func:`agreed_weights`, all hand out the agreed ones.

    Args:
        model: A model, sharded by either FSDP or not.
        dtype: The dtype to which floating-point tensors are cast: fp32, bf16 or fp16. Shards are cast before they are
            sent if that makes them smaller. Default: no cast.
        adapters_only: Hand out only the active PEFT adapter, by its names in the files that ``save_adapter`` writes.
        merged: Hand out the base model with the active PEFT adapters merged into it, by its names without PEFT.
        rank: The global rank that gets the tensors; the others take part and get None instead. Default: all ranks.
        process_group: The ranks of the model. Default: those that shard it, or all ranks if it is not sharded.

    Returns:
        An iterator of names and tensors, in the same order on all ranks.

    Raises:
        TypeError: If an argument has the wrong type, on any rank; every rank raises.
        ValueError: If an argument is out of range, on any rank, or ranks pass different ones; every rank raises.
        ImportError: If ``adapters_only`` or ``merged`` is given and peft is not installed.

    Examples:
        >>> for name, tensor in gathered_weights(model, dtype=torch.bfloat16):
        ...     engine.load_weights([(name, tensor)])
    """
    group = ranks_of(model, process_group)

    def check() -> list[TensorOfModel]:
        check_module(model)
        _check_arguments(dtype, adapters_only, merged, rank, group)
        if adapters_only:
            return active_adapter_tensors(model)
        tensors = tensors_of(model, decoded_weights_of)
        if merged or dtype is not None:
            _refuse_packed(tensors)
        return merged_tensors(model, tensors) if merged else tensors

    def summary(tensors: Sequence[TensorOfModel]) -> str:
        listed = [(tensor.names, tuple(tensor.full.shape), tensor.full.stored) for tensor in tensors]
        return repr((dtype, adapters_only, merged, rank, listed))

    differs = "called gathered_weights with other arguments or another model than"
    tensors = agree(group, check, summary, differs, call="gathered_weights")
    return _named(GatherInTurn(tensors, dtype, rank))


def _named(turn: GatherInTurn) -> Iterator[tuple[str, Tensor | None]]:
    with closing(iter(turn)) as gathered:
        for tensor, value in gathered:
            for name in tensor.names:
                yield name, value
            del value


def _refuse_packed(tensors: Sequence[TensorOfModel]) -> None:
    for tensor in tensors:
        for module, name in tensor.sites:
            parameter = module._parameters.get(name)
            by_bitsandbytes = any(cls.__module__.partition(".")[0] == "bitsandbytes" for cls in type(module).__mro__)
            # Casts and merges would misread bytes that another quantizer has packed.
            if by_bitsandbytes or (parameter is not None and is_packed(parameter)):
                raise ValueError(
                    f"{tensor.names[0]} is packed by another quantizer, so it can be handed out as it is stored, but "
                    "neither cast nor merged; quantize the base by quantize_frozen_params(model, NF4()) instead"
                )


def _check_arguments(
    dtype: object, adapters_only: object, merged: object, rank: object, group: dist.ProcessGroup | None
) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, or None, got {dtype!r}")
    for name, value in (("adapters_only", adapters_only), ("merged", merged)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, got {value!r}")
    if adapters_only and merged:
        raise ValueError("adapters_only=True leaves out the base that merged=True would merge adapters into; pass one")
    if rank is None:
        return
    ranks = [0] if group is None else dist.get_process_group_ranks(group)
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(f"rank must be a rank of the model, or None for all, got {rank!r}")
    if rank not in ranks:
        raise ValueError(f"rank must be a rank of the model: one of {ranks}, got {rank}")
