"""Saving PEFT adapters of sharded models in the files that PEFT itself writes and reads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from .base import original_path

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
    """Write adapters as ``PeftModel.from_pretrained(base, path)`` reads them, on any number of GPUs. Collective.

    Rank 0 writes ``adapter_config.json`` and ``adapter_model.safetensors``, adapters other than ``"default"`` in
    folders of their names. The model in memory stays as it is, frozen base and all.

    Args:
        model: A PEFT model, plain or sharded by either FSDP, or a module that holds one.
        path: The folder.
        adapters: Names of adapters. Default: all.
        process_group: The ranks of the model. Default: all of them.
        **options: Further arguments of ``PeftModel.save_pretrained``.

    Raises:
        ImportError: If peft is not installed.
        ValueError: If there is no PEFT model in ``model``, or no adapter of a name.
        RuntimeError: If rank 0 could not write the files; on every rank.
    """
    peft_model = peft_model_in(model)
    names = list(peft_model.peft_config)
    if unknown := set(adapters or ()) - set(names):
        raise ValueError(f"there is no adapter {sorted(unknown)} in this model; there are {names}")
    state = adapter_state(model)
    error = ""
    if not dist.is_initialized() or dist.get_rank(process_group) == 0:
        try:
            selected = list(adapters) if adapters is not None else names
            with _original_paths(peft_model):
                peft_model.save_pretrained(os.fspath(path), selected_adapters=selected, state_dict=state, **options)
        except Exception as failure:  # whatever it is, the other ranks are to hear of it
            error = f"{type(failure).__name__}: {failure}"
    if dist.is_initialized():
        said = [error]
        first = 0 if process_group is None else dist.get_global_rank(process_group, 0)
        dist.broadcast_object_list(said, src=first, group=process_group)
        (error,) = said
    if error:
        raise RuntimeError(f"the adapter could not be saved to {os.fspath(path)}: {error}")


def peft_model_in(model: nn.Module) -> PeftModel:
    """The PEFT model that ``model`` is or wraps.

    Raises:
        ImportError: If peft is not installed.
        ValueError: If there is none.
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ImportError("save_adapter needs peft; install fsdp_zpp[peft]") from error
    found = next((module for module in model.modules() if isinstance(module, PeftModel)), None)
    if found is None:
        raise ValueError(f"there is no PeftModel in this {type(model).__name__}; make one with peft.get_peft_model")
    return found


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """Whole tensors, on the CPU, of adapters and of all that is trained, by the names that PEFT has for them.

    Collective; on other ranks than the first they may be missing. Of FSDP's own full state dicts, the one of
    FullyShardedDataParallel takes frozen parameters along, and the one of fully_shard what a forward left gathered.
    """
    peft_model = peft_model_in(model)
    prefix = next(original_path(path) for path, module in model.named_modules() if module is peft_model)
    start = f"{prefix}." if prefix else ""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    with _unsharded(model) if _has_fsdp1(model) else nullcontext():
        found = {}
        for name, parameter in model.named_parameters():
            name = original_path(name).removeprefix(start)
            if parameter.requires_grad or "lora_" in name or "modules_to_save" in name:
                found[name] = _whole(parameter.detach())
    return found


@contextmanager
def _original_paths(peft_model: PeftModel) -> Iterator[None]:
    """PEFT chooses by the paths of modules what of a state dict to save, so they must be without FSDP's wrappers."""

    def named_modules(*arguments: Any, **options: Any) -> Iterator[tuple[str, nn.Module]]:
        for path, module in nn.Module.named_modules(peft_model, *arguments, **options):
            yield original_path(path), module

    peft_model.named_modules = named_modules  # type: ignore[method-assign]
    try:
        yield
    finally:
        del peft_model.named_modules


def _has_fsdp1(model: nn.Module) -> bool:
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def _unsharded(model: nn.Module) -> AbstractContextManager[Any]:
    """All of the model, whole, on the first rank; what is quantized is no part of it."""
    elsewhere = any(parameter.device.type != "cpu" for parameter in model.parameters())
    return FullyShardedDataParallel.summon_full_params(
        model, writeback=False, offload_to_cpu=elsewhere, rank0_only=elsewhere
    )


def _whole(tensor: Tensor) -> Tensor:
    """A copy of a whole tensor on the CPU. Collective, if it is sharded."""
    if isinstance(tensor, DTensor):
        # Offloaded shards are on the CPU, where the collectives of GPUs can't gather them.
        on_device: Any = tensor.to(tensor.device_mesh.device_type)
        tensor = on_device.full_tensor()
    return tensor.to("cpu", copy=True)
