"""Ops on a backend that their tensors' device would not choose."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fsdp_zpp.kernels import _ops, triton_backend


def on_triton(op: Callable[..., Any], *args: Any) -> Any:
    """Run an op in Triton: compiled for tensors on a GPU, interpreted for those on a CPU."""
    with patch.object(_ops, "backend_for", lambda tensor: triton_backend):
        call = op.__wrapped__(*args)  # type: ignore[attr-defined]
    return call(*[arg for arg in args if isinstance(arg, Tensor | float)])


def as_stored(values: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return fp32 values as a kernel stores them. The interpreter, unlike GPUs, truncates to bf16."""
    if device.type == "cpu" and dtype == torch.bfloat16:
        values = (values.view(torch.int32) & -0x10000).view(torch.float32)
    return values.to(dtype)
