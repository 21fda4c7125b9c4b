"""Saves PEFT adapters of sharded models in the files that PEFT itself writes and reads: ``save_adapter``."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from fsdp_zpp.collectives.agreement import agree, from_first_rank
from fsdp_zpp.extras import how_to_install
from fsdp_zpp.module_names import original_path, parameter_name
from fsdp_zpp.runtime.model_ranks import ranks_of
from fsdp_zpp.runtime.tensors_of_model import TensorOfModel, tensors_of
from fsdp_zpp.runtime.validation import check_folder, check_module

from ..full_tensors import on_first_rank

if TYPE_CHECKING:
    from peft import PeftModel


def save_adapter(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    adapters: Sequence[str] | None = None,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> None:
    """Save adapters in the files that ``PeftModel.from_pretrained(base, path)`` reads. Collective.

    The model's first rank writes ``adapter_config.json`` and ``adapter_model.safetensors``; adapters other than
    ``"default"`` go to folders of their names. The files can be read on any number of GPUs. The model in memory does
    not change.

    Args:
        model: A PEFT model, plain or sharded by either FSDP, or a module that contains one.
        path: The folder.
        adapters: Names of adapters. Default: all.
        process_group: The ranks of the model, of which the first writes. Default: those that it is sharded over, or all
            ranks if it is not sharded.
        **options: Further arguments of ``PeftModel.save_pretrained``.

    Raises:
        ImportError: If peft is not installed.
        TypeError: If an argument has the wrong type, on any rank; every rank raises.
        ValueError: If there is no PEFT model in ``model``, or no adapter of one of the names, on any rank.
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
        except Exception as failure:  # any at all: the other ranks wait to hear whether it went well
            error = f"{type(failure).__name__}: {failure}"
    if error := from_first_rank(error, group):
        raise RuntimeError(f"the adapter could not be saved to {os.fspath(path)}: {error}")


def _check(model: nn.Module, path: object, adapters: object) -> tuple[PeftModel, list[str]]:
    """Return the PEFT model in ``model``, and the adapters of it to save."""
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
    """Return the PEFT model that ``model`` is or contains.

    Raises:
        ImportError: If peft is not installed.
        ValueError: If there is none.
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ImportError(f"adapters need peft: {how_to_install('peft')}") from error
    peft_model = next((module for module in model.modules() if isinstance(module, PeftModel)), None)
    if peft_model is None:
        raise ValueError(f"there is no PeftModel in this {type(model).__name__}; make one with peft.get_peft_model")
    return peft_model


def adapter_state(model: nn.Module, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Gather full tensors of adapters and of everything trainable, by the names that PEFT gives them. Collective.

    Ranks of ``group`` other than the first get none but buffers.
    """
    peft_model = peft_model_in(model)
    parameters = [tensor for tensor in adapter_tensors(model, peft_model) if not tensor.is_buffer]
    state = on_first_rank(parameters, group, all_names=True)  # as PEFT stores tied ones
    state |= _adapter_buffers(model, peft_model)
    prefix = path_of(peft_model, model)
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


def adapter_tensors(model: nn.Module, peft_model: PeftModel) -> list[TensorOfModel]:
    """Return the tensors of all adapters, active or not, and of everything trainable."""
    # Adapters that are not active are frozen, so requires_grad alone would miss them; all have a place of their name.
    adapters = peft_model.peft_config.keys()
    return [
        tensor
        for tensor in tensors_of(model)
        if (tensor.is_buffer and any(name in adapters for _, name in tensor.sites))
        or (not tensor.is_buffer and (tensor.full.requires_grad or not adapters.isdisjoint(tensor.names[0].split("."))))
    ]


def path_of(peft_model: PeftModel, model: nn.Module) -> str:
    """Return what names in ``model`` have before those in ``peft_model``, which is it or a part of it."""
    path = next(original_path(path) for path, module in model.named_modules() if module is peft_model)
    return f"{path}." if path else ""


@contextmanager
def as_plain(peft_model: PeftModel, state: dict[str, Tensor]) -> Iterator[None]:
    """Make ``peft_model.save_pretrained(..., state_dict=state)`` save what it would if it were plain, in this context.

    Args:
        peft_model: A sharded model.
        state: The tensors that :func:`adapter_state` returned for it.
    """
    with _original_paths(peft_model), _whole_prompts(peft_model, state):
        yield


def _adapter_buffers(model: nn.Module, peft_model: PeftModel) -> dict[str, Tensor]:
    """Copy the buffers of adapters (VeRA's, say), by all of their names; PEFT registers them under the adapter's."""
    copies: dict[int, Tensor] = {}
    state = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is None or name not in peft_model.peft_config or name in module._non_persistent_buffers_set:
                continue
            if id(buffer) not in copies:
                copies[id(buffer)] = buffer.to("cpu", copy=True)
            state[parameter_name(path, name)] = copies[id(buffer)]
    return state


@contextmanager
def _whole_prompts(peft_model: PeftModel, state: dict[str, Tensor]) -> Iterator[None]:
    """Give prompt encoders full parameters in this context: PEFT saves the prompts that they compute."""
    sharded: list[tuple[nn.Module, str, nn.Parameter]] = []
    encoders = getattr(peft_model, "prompt_encoder", nn.ModuleDict())
    for path, module in encoders.named_modules():
        for name, parameter in list(module._parameters.items()):
            whole = state.get(parameter_name(f"prompt_encoder.{path}", name))
            if parameter is not None and whole is not None:
                sharded.append((module, name, parameter))
                module._parameters[name] = nn.Parameter(whole, requires_grad=False)
    try:
        yield
    finally:
        for module, name, parameter in sharded:
            module._parameters[name] = parameter


@contextmanager
def _original_paths(peft_model: PeftModel) -> Iterator[None]:
    """Give modules their FQNs without wrappers in this context: PEFT chooses what to save by FQNs."""

    def named_modules(
        memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        for path, module in nn.Module.named_modules(peft_model, memo, prefix, remove_duplicate):
            yield original_path(path), module

    vars(peft_model)["named_modules"] = named_modules  # on this instance alone
    try:
        yield
    finally:
        del vars(peft_model)["named_modules"]
