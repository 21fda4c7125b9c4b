"""Parameters that are offloaded to the CPU, under either FSDP, also where there is no GPU to offload from.

On CPUs the copies between the host and the device are none, but all else that torch and the adapters do differently
for offloaded parameters is done. FSDP1 pins memory, which torch can't without an accelerator, and so the adapter
refuses it: here both do without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import fsdp
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp.sharded_grad_scaler import _GeneralMultiDeviceReplicator

from fsdp_zpp.adapters.fsdp1 import validation

from .adapter import Adapter
from .fsdp1 import Fsdp1
from .fsdp2 import Fsdp2
from .pool import device_type


def offloading(adapter: Adapter) -> Adapter:
    """Return the same adapter with offloaded parameters."""
    if isinstance(adapter, Fsdp1):
        return replace(adapter, arguments=(*adapter.arguments, ("cpu_offload", CPUOffload(offload_params=True))))
    assert isinstance(adapter, Fsdp2)
    return replace(adapter, arguments=(*adapter.arguments, ("offload_policy", offload_policy())))


def offload_policy() -> CPUOffloadPolicy:
    """Return the policy of FSDP2, which pins memory if there is a GPU."""
    return CPUOffloadPolicy(pin_memory=device_type() != "cpu")


@dataclass
class _Unpinned(CPUOffloadPolicy):
    pin_memory: bool = False


_prepare = FlatParamHandle.prepare_gradient_for_backward


def _prepare_gradient_for_backward(self: FlatParamHandle) -> None:
    """Do not add to a gradient of an earlier backward, which FSDP1 tells from others by its device."""
    _prepare(self)
    if self._offload_params and hasattr(self.flat_param, "_saved_grad_shard"):
        del self.flat_param._saved_grad_shard


@contextmanager
def without_pinning() -> Iterator[None]:
    """Return a context in which FSDP1 offloads on a CPU, and who names no policy of FSDP2 gets one that can."""
    with ExitStack() as stack:
        if device_type() == "cpu":
            stack.enter_context(mock.patch.object(Tensor, "pin_memory", lambda self, *unused: self))
            # At the end of a backward FSDP1 waits for gradients to arrive, and streams of a CPU can't be waited for.
            stack.enter_context(mock.patch.object(torch.cpu.Stream, "synchronize", create=True))
            stack.enter_context(
                mock.patch.object(FlatParamHandle, "prepare_gradient_for_backward", _prepare_gradient_for_backward)
            )
            stack.enter_context(mock.patch.object(fsdp, "CPUOffloadPolicy", _Unpinned))
            # Private, since the check is just what stands in the way.
            stack.enter_context(mock.patch.object(validation, "_check_offload"))
        yield


def group_for_scaling() -> dist.ProcessGroup | None:
    """Return a group of all ranks that communicates on CPUs, too, as a scaler of FSDP2's offloaded gradients does."""
    return None if device_type() == "cpu" else dist.new_group(backend="cpu:gloo,cuda:nccl")


_get = _GeneralMultiDeviceReplicator.get


def _get_and_wait(self: _GeneralMultiDeviceReplicator, device: torch.device) -> Tensor:
    copy = _get(self, device)
    if device.type == "cpu" and self.master.device.type != "cpu":
        torch.accelerator.synchronize()
    return copy


@contextmanager
def scales_that_have_arrived() -> Iterator[None]:
    """Return a context in which torch's gradient scaler unscales on the CPU with what it has copied there.

    The copy from a GPU is asynchronous, and torch's scaler multiplies by it without a wait, with or without a strategy.
    """
    with mock.patch.object(_GeneralMultiDeviceReplicator, "get", _get_and_wait):
        yield
