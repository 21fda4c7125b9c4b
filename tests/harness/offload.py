"""Parameters that are offloaded to the CPU, also where there is no GPU to offload from.

There FSDP1 can't pin memory, and so the adapter refuses it: here both do without, and do all else but the copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import fsdp
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy
from torch.distributed.fsdp._flat_param import FlatParamHandle

from fsdp_zpp.fsdp1 import wrapping

from .adapter import Adapter, Fsdp1, Fsdp2
from .pool import device_type


def offloading(adapter: Adapter) -> Adapter:
    """Return the same adapter with offloaded parameters."""
    assert isinstance(adapter, Fsdp1 | Fsdp2)
    policy = CPUOffload(offload_params=True) if isinstance(adapter, Fsdp1) else offload_policy()
    name = "cpu_offload" if isinstance(adapter, Fsdp1) else "offload_policy"
    return replace(adapter, arguments=(*adapter.arguments, (name, policy)))


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
    replaced = [
        (Tensor, "pin_memory", lambda self, *unused: self),
        # At the end of a backward FSDP1 waits for gradients to arrive, and streams of a CPU can't be waited for.
        (torch.cpu.Stream, "synchronize", mock.Mock()),
        (FlatParamHandle, "prepare_gradient_for_backward", _prepare_gradient_for_backward),
        (fsdp, "CPUOffloadPolicy", _Unpinned),
        (wrapping, "_check_offload", mock.Mock()),  # private, since the check is just what stands in the way
    ]
    with ExitStack() as stack:
        for owner, name, new in replaced if device_type() == "cpu" else ():
            stack.enter_context(mock.patch.object(owner, name, new, create=True))
        yield
