"""A frozen base in models of transformers and PEFT, and in their state dicts."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from fsdp_zpp._torch_compat import replace_function
from fsdp_zpp.comm.agreement import agree, from_first_rank
from fsdp_zpp.comm.mesh import collective_device
from fsdp_zpp.names import how_to_install, model_name, original_path, parameter_name
from fsdp_zpp.runtime.api import check_folder, check_module, ranks_of
from fsdp_zpp.runtime.full_tensors import FullTensor, GatherInTurn, TensorOfModel, gets, tensors_of

from ._torch_modules import FrozenModule, frozen_sites, frozen_tensor, frozen_weights_of, replaced
from .weight import FrozenWeight

if TYPE_CHECKING:
    from peft import PeftModel


# ---- patches
#
# Patches PEFT to add adapters to a quantized base, and ``save_pretrained`` not to save a part of a model.
#
# PEFT looks at a model's parameters to find tied weights, targets and word embeddings, and to count elements. Frozen
# weights are not parameters, since FSDP must not see them. So while a method of ``_LOOKING_AT_PARAMETERS`` runs, the
# FrozenTensors that modules show are registered as parameters.
#
# For ``target_parameters``, PEFT parametrizes a layer during each forward. If the parameter is a frozen weight, PEFT
# parametrizes a stand-in module instead.
#
# transformers' ``save_pretrained`` would leave out quantized weights. For a sharded model, both it and PEFT's method
# would write the part that one rank holds, or nothing. The patched methods raise in these cases, unless the caller
# passes a state dict with all weights.

logger = logging.getLogger("fsdp_zpp")

# Methods that look at the parameters of their object, or of their arguments.
_LOOKING_AT_PARAMETERS = (
    ("peft.peft_model", "PeftModel", "__init__"),
    ("peft.peft_model", "PeftModel", "add_adapter"),
    ("peft.peft_model", "PeftModel", "get_nb_trainable_parameters"),
    ("peft.tuners.tuners_utils", "BaseTuner", "inject_adapter"),
)
_COMPUTING_WITH_PARAMETER = ("peft.tuners.lora.layer", "ParamWrapper", "_activate_lora")


def show_to_peft() -> None:
    """Patch PEFT to see frozen weights, if it is imported or may be later; see the top of this section."""
    # Importing PEFT takes seconds, so don't import it for a process without Hugging Face's libraries.
    if not {"peft", "transformers"} & set(sys.modules):
        return
    try:
        importlib.import_module("peft")
    except ImportError:
        return
    _patch_peft()


@functools.cache
def _patch_peft() -> None:
    for module, cls, method in _LOOKING_AT_PARAMETERS:
        _wrap(module, cls, method, _with_parameters_shown)
    _wrap(*_COMPUTING_WITH_PARAMETER, _with_stand_in)


def refuse_lost_ties(model: nn.Module) -> None:
    """Raise ValueError if a sharded model has tied adapters: FSDP does not keep their tie."""
    modules = list(model.modules())
    if not any(isinstance(module, (FullyShardedDataParallel, FSDPModule)) for module in modules):
        return
    for configs in [vars(module).get("peft_config") for module in modules]:
        for name, config in configs.items() if isinstance(configs, dict) else ():
            if getattr(config, "target_modules_to_tie", None):
                raise ValueError(
                    f"the adapter {name!r} has ensure_weight_tying=True and targets a tied embedding: PEFT makes the "
                    "adapters of tied layers views of one memory, but FSDP shards each on its own, so they would "
                    "differ after the first step. Train the embedding by modules_to_save or trainable_token_indices, "
                    "which stay tied, or target it without ensure_weight_tying"
                )


def _wrap(module: str, cls: str, method: str, how: Callable[..., Callable[..., object]]) -> None:
    owner = getattr(importlib.import_module(module), cls, None)
    if not hasattr(owner, method):
        logger.warning("this version of peft has no %s.%s; add adapters before you quantize the base", cls, method)
    else:
        replace_function(owner, method, how)


def _with_parameters_shown(original: Callable[..., object]) -> Callable[..., object]:
    """Return ``original``, wrapped: while it runs, modules among its arguments have frozen weights as parameters."""

    def method(self: nn.Module, *args: object, **kwargs: object) -> object:
        registered: list[tuple[FrozenModule, str]] = []
        # Before nn.Module.__init__, self has no submodules to walk.
        for model in (*([self] if "_modules" in vars(self) else []), *args, *kwargs.values()):
            for _, module, name, weight in frozen_sites(model) if isinstance(model, nn.Module) else ():
                # PEFT's methods call each other, and only the outermost one registers weights and removes them.
                if name not in module._parameters:
                    module._parameters[name] = frozen_tensor(weight)  # type: ignore[assignment]  # acts as one
                    registered.append((module, name))
        try:
            return original(self, *args, **kwargs)
        finally:
            for module, name in registered:
                module._parameters.pop(name, None)

    return method


def _with_stand_in(original: Callable[..., AbstractContextManager[object]]) -> Callable[..., object]:
    @contextmanager
    def method(self: Any, active_adapters: list[str]) -> Iterator[None]:
        base, name = self.get_base_layer(), self.parameter_name
        if not isinstance(base, FrozenModule) or name not in frozen_weights_of(base):
            with original(self, active_adapters):
                yield
            return
        stand_in = nn.Module()
        stand_in.register_buffer(name, frozen_tensor(frozen_weights_of(base)[name]))
        # On this instance alone: the original calls get_base_layer to parametrize the layer, and again to undo that.
        self.get_base_layer = lambda: stand_in
        try:
            with original(self, active_adapters), replaced(base, name, lambda: getattr(stand_in, name)):
                yield
        finally:
            del self.get_base_layer

    return method


_METHOD = "save_pretrained"
_IS_SHARDED = "_fsdp_zpp_is_sharded"


def guard_save_pretrained(model: nn.Module, is_sharded: Callable[[nn.Module], bool] | None = None) -> None:
    """Make ``save_pretrained`` of ``model`` and its submodules raise if it would leave quantized weights out.

    With ``is_sharded``, ``save_pretrained`` also raises if it would write one rank's part. ``is_sharded(module)`` says
    whether each rank holds only a part of the module's weights, and must say the same on all ranks.
    """
    for module in model.modules():
        if hasattr(type(module), _METHOD):
            if is_sharded is not None:
                vars(module)[_IS_SHARDED] = is_sharded
            # On the instance, since other models of this class may not be quantized.
            vars(module)[_METHOD] = functools.partial(_save_pretrained, module)


def _save_pretrained(module: nn.Module, *args: object, **kwargs: object) -> object:
    method = getattr(type(module), _METHOD)
    bound = inspect.signature(method).bind_partial(module, *args, **kwargs).arguments
    arguments = {**bound, **bound.get("kwargs", {})}
    is_sharded = vars(module).get(_IS_SHARDED)
    gathers = getattr(module, "is_distributed_loading_by_transformers", False)  # then transformers gathers by itself
    if arguments.get("state_dict") is None and is_sharded is not None and not gathers and is_sharded(module):
        # Ranks with is_main_process=False would write nothing, but must raise as well, since rank 0 raises.
        raise RuntimeError(
            f"this {model_name(module)} is sharded, and save_pretrained would write what one rank holds of it; call "
            "fsdp_zpp.save_adapter(model, path) to save an adapter, or pass state_dict= a full state dict, which all "
            "ranks gather: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
            "cpu_offload=True)) of torch.distributed.checkpoint.state_dict"
        )
    if hasattr(type(module), "get_base_model"):  # a PeftModel, which writes only adapters
        return method(module, *args, **kwargs)
    # Ranks that write nothing leave nothing out.
    left_out = _left_out(module, arguments.get("state_dict") or {}) if arguments.get("is_main_process", True) else 0
    if left_out:
        raise RuntimeError(
            f"{left_out} weights of this {model_name(module)} are frozen and quantized, and save_pretrained would "
            "leave them out; call fsdp_zpp.save_frozen_params(model, path) to save the quantized base, or "
            "fsdp_zpp.save_adapter(model, path) to save an adapter. For a checkpoint in full precision, pass "
            "state_dict=accelerator.get_state_dict(model), or call fsdp_zpp.dequantize_frozen_params(model) first, on "
            "every rank and before sharding"
        )
    return method(module, *args, **kwargs)


def _left_out(module: nn.Module, state: Mapping[str, object]) -> int:
    present = {weight for path, _, name, weight in frozen_sites(module) if parameter_name(path, name) in state}
    return len({weight for *_, weight in frozen_sites(module)} - present)


# ---- peft saving
#
# ``save_adapter`` saves PEFT adapters of sharded models in PEFT's own file format.


def save_adapter(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    adapters: Sequence[str] | None = None,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> None:
    """Save adapters in the files that ``PeftModel.from_pretrained(base, path)`` reads. Collective.

    The model's first rank writes ``adapter_config.json`` and ``adapter_model.safetensors``; each adapter but
    ``"default"`` goes to a subfolder of its name. The files can be read on any number of GPUs. The model in memory does
    not change.

    Args:
        model: A PEFT model, plain or sharded by either FSDP, or a module that contains one.
        path: The folder.
        adapters: Names of adapters. Default: all.
        process_group: The ranks of the model; the first one writes. Default: the ranks that shard the model, or
            all ranks if it is not sharded.
        **options: Further arguments of ``PeftModel.save_pretrained``.

    Raises:
        ImportError: If peft is not installed.
        TypeError: If an argument has the wrong type, on any rank; every rank raises.
        ValueError: If ``model`` contains no PEFT model, or ``adapters`` has an unknown name, on any rank.
        RuntimeError: If the first rank can't write the files; every rank raises.
    """
    group = ranks_of(model, process_group)
    peft_model, selected = agree(
        group,
        lambda: _check(model, path, adapters),
        lambda checked: repr(list(checked[0].peft_config)),
        "called save_adapter with a model of other adapters than",
    )
    state = adapter_state(model, group)  # on all ranks, since it is collective
    error = ""
    if group is None or dist.get_rank(group) == 0:
        try:
            with as_plain(peft_model, state):
                peft_model.save_pretrained(os.fspath(path), selected_adapters=selected, state_dict=state, **options)
        except Exception as failure:  # whatever it is, the other ranks wait for the outcome
            error = f"{type(failure).__name__}: {failure}"
    if error := from_first_rank(error, group):
        raise RuntimeError(f"the adapter could not be saved to {os.fspath(path)}: {error}")


def _check(model: nn.Module, path: object, adapters: object) -> tuple[PeftModel, list[str]]:
    check_module(model)
    check_folder(path)
    peft_model = peft_model_in(model)
    names = list(peft_model.peft_config)
    if adapters is None:
        return peft_model, names
    if isinstance(adapters, str) or not isinstance(adapters, Collection):
        raise TypeError(f"adapters must be a list of names such as {names[:1]}, got {adapters!r}")
    if unknown := [name for name in adapters if name not in names]:
        raise ValueError(f"there is no adapter {unknown} in this model; choose from {names}")
    return peft_model, list(adapters)


def peft_model_in(model: nn.Module) -> PeftModel:
    """Return the PEFT model that ``model`` is or contains."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ImportError(f"adapters need peft: {how_to_install('peft')}") from error
    peft_model = next((module for module in model.modules() if isinstance(module, PeftModel)), None)
    if peft_model is None:
        raise ValueError(f"there is no PeftModel in this {type(model).__name__}; make one with peft.get_peft_model")
    return peft_model


def adapter_state(model: nn.Module, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Gather full tensors of adapters and of everything trainable, by their names in PEFT. Collective.

    Only the first rank of ``group`` gets them; the others get an empty dict.
    """
    peft_model = peft_model_in(model)
    state = on_first_rank(adapter_tensors(model, peft_model), group, all_names=True)  # as PEFT does
    prefix = path_of(peft_model, model)
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


def adapter_tensors(model: nn.Module, peft_model: PeftModel) -> list[TensorOfModel]:
    """Return the tensors of all adapters, active or not, and of everything trainable."""
    # Inactive adapters are frozen, so requires_grad would miss them. An adapter's name is part of its tensors' FQNs.
    adapters = peft_model.peft_config.keys()
    return [
        tensor
        for tensor in tensors_of(model)
        if (tensor.is_buffer and any(name in adapters for _, name in tensor.sites))
        or (not tensor.is_buffer and (tensor.full.requires_grad or not adapters.isdisjoint(tensor.names[0].split("."))))
    ]


def path_of(peft_model: PeftModel, model: nn.Module) -> str:
    """Return the prefix that names of ``peft_model`` have in ``model``."""
    path = next(original_path(path) for path, module in model.named_modules() if module is peft_model)
    return f"{path}." if path else ""


@contextmanager
def as_plain(peft_model: PeftModel, state: dict[str, Tensor]) -> Iterator[None]:
    """Let ``peft_model`` save the tensors of :func:`adapter_state` in this context, as an unsharded model does."""

    # PEFT chooses the tensors to save by FQN, so leave wrappers out of the FQNs.
    def named_modules(
        memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        for path, module in nn.Module.named_modules(peft_model, memo, prefix, remove_duplicate):
            yield original_path(path), module

    encoders = getattr(peft_model, "prompt_encoder", nn.ModuleDict())
    with ExitStack() as stack:
        # PEFT saves the outputs of prompt encoders, so the encoders need full parameters.
        for path, module in encoders.named_modules():
            for name, parameter in list(module._parameters.items()):
                whole = state.get(parameter_name(f"prompt_encoder.{path}", name))
                if parameter is not None and whole is not None:
                    full = {name: nn.Parameter(whole, requires_grad=False)}
                    stack.enter_context(patch.dict(module._parameters, full))
        stack.enter_context(patch.multiple(peft_model, named_modules=named_modules))  # on this instance alone
        yield


# ---- full tensors
#
# Gathers full tensors of a sharded model on its first rank, for files that other programs read.


def on_first_rank(
    tensors: Iterable[TensorOfModel], group: dist.ProcessGroup | None, *, all_names: bool = False
) -> dict[str, Tensor]:
    """Copy tensors to the CPU of the first rank of ``group``; all ranks must pass the same tensors. Collective.

    With ``all_names``, a tied tensor appears under all of its names, with a copy for each, as in torch's full state
    dicts; otherwise only under its first name.
    """
    first = None if group is None else dist.get_global_rank(group, 0)
    copies: dict[str, Tensor] = {}
    for tensor, value in GatherInTurn(tensors, to=first):
        for name in tensor.names if all_names else tensor.names[:1]:
            if value is not None:
                copies[name] = value.to("cpu", copy=name != tensor.names[0])
    return copies


# ---- decoded
#
# A frozen weight as a full tensor of the model: codes are gathered and decoded.


@dataclass(frozen=True)
class DecodedWeight(FullTensor):
    weight: FrozenWeight

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.weight.shape

    @property
    def stored(self) -> torch.dtype:  # type: ignore[override]
        return self.weight.dtype

    def finish(self, out: Tensor | None, dtype: torch.dtype | None, to: int | None) -> Tensor | None:
        weight, device = self.weight, self.weight.device
        group = weight.placement.mesh.group
        if device.type == "cpu" and group is not None:  # codes stay on the CPU until a forward
            device = collective_device(group)
        if not gets(to):
            weight.holder.gathered_payload(weight, device)  # collective
            return None
        return weight.dense(self.as_delivered(dtype), device)


def decoded_weights_of(module: nn.Module) -> dict[str, DecodedWeight]:
    return {name: DecodedWeight(weight) for name, weight in frozen_weights_of(module).items()}


# ---- whole state dicts
#
# Adds quantized weights to state dicts while a framework saves a model, and removes them while it loads one.
#
# Quantized weights are in no state dict. But a framework that writes a whole model to one file takes weights only from
# state dicts, and FullyShardedDataParallel refuses to load names that it does not know.


def quantized_names(model: nn.Module) -> set[str]:
    return {parameter_name(path, name) for path, _, name, _ in frozen_sites(model)}


def dequantized_weights(model: nn.Module) -> dict[str, Tensor]:
    """Copy the dequantized weights to the CPU of the model's first rank, by all of their FQNs. Collective."""
    tensors = [tensor for tensor in tensors_of(model, decoded_weights_of) if isinstance(tensor.full, DecodedWeight)]
    return on_first_rank(tensors, ranks_of(model), all_names=True)


def with_quantized_weights(model: nn.Module) -> AbstractContextManager[object]:
    """Add the dequantized weights to ``model.state_dict()``, in this context; each call is collective.

    Only the model's first rank gets them, on the CPU, as in torch's full state dicts.
    """

    def add(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: object) -> None:
        state.update({prefix + name: tensor for name, tensor in dequantized_weights(model).items()})

    return model.register_state_dict_post_hook(add)  # as a context, a handle removes its hook at the end


def without_quantized_weights(model: nn.Module) -> AbstractContextManager[object]:
    """Make ``model.load_state_dict`` skip the values of quantized weights, in this context."""
    quantized = quantized_names(model)

    def drop(module: nn.Module, state: dict[str, Tensor], prefix: str, *arguments: object) -> None:
        for key in [key for key in state if original_path(key.removeprefix(prefix)) in quantized]:
            del state[key]

    return model.register_load_state_dict_pre_hook(drop)
