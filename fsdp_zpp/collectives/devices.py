"""Devices: which one computes on this machine, and which one a process group takes tensors from."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def accelerator() -> torch.device | None:
    """Return the kind of accelerator that this machine has; None if it computes on the CPU.

    A CUDA build of torch often runs on machines without a GPU, where it still names CUDA unless told to look.
    """
    return torch.accelerator.current_accelerator(check_available=True)


def collective_device(group: dist.ProcessGroup, device: torch.device | None = None) -> torch.device:
    """Return the device on which collectives of ``group`` take small tensors."""
    kind = accelerator()
    if kind is None or "gloo" in dist.get_backend(group):
        return torch.device("cpu")
    if device is not None and device.type == kind.type:
        return device
    return getattr(group, "bound_device_id", None) or torch.device(kind.type, torch.accelerator.current_device_index())


def for_collectives(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return ``tensor`` on a device from which collectives of ``group`` take it: the accelerator if they do."""
    if tensor.device.type != "cpu":
        return tensor
    kind, backend = accelerator(), dist.get_backend(group)
    # With CPU offload a group may have several backends, "cpu:gloo,cuda:nccl".
    takes_accelerators = "gloo" not in backend or "ccl" in backend
    return tensor.to(kind) if kind is not None and takes_accelerators else tensor


def takes_cpu_tensors_only(group: dist.ProcessGroup) -> bool:
    """Return whether not all collectives of ``group`` take an accelerator's tensors, as those of gloo alone don't."""
    return dist.get_backend(group) == "gloo"


def default_device_type() -> str:
    """Return the device type of the mesh that torch's FSDP makes if it is given none."""
    kind = accelerator()
    return "cpu" if kind is None else kind.type


def compute_device(group: dist.ProcessGroup | None, device: torch.device | str | int | None) -> torch.device | None:
    """Return the device for the codes of a frozen base, given the user's ``device``; None means its weights' own."""
    kind = accelerator()
    if isinstance(device, int):
        return torch.device("cpu" if kind is None else kind.type, device)
    if device is not None:
        return torch.device(device)
    if kind is None or group is None or dist.get_backend(group) == "gloo":
        return None
    return torch.device(kind.type, torch.accelerator.current_device_index())
