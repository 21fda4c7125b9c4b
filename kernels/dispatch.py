"""Which backend runs an op, and which calls go through torch's dispatcher. Calls on plain tensors skip it.

Dispatching a Python op takes as long as several kernel launches, and a sharded model runs a handful of ops for each
unit and step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def is_plain(*tensors: Tensor) -> bool:
    """Whether an op may skip the dispatcher: it runs on plain tensors, outside of tracing and autograd."""
    if torch.compiler.is_compiling():
        return False
    # Subclasses (fake tensors, DTensor) act in the dispatcher, and so does autograd, which raises in a backward.
    return all(type(tensor) is Tensor and not tensor.requires_grad for tensor in tensors)


def backend_for(tensor: Tensor) -> ModuleType:
    """The module that runs ops on ``tensor``: Triton on CUDA, the reference on CPU, the fake one while tracing."""
    # Backends are imported on use, so that machines without a GPU do not need Triton.
    # Fakes come first: a fake tensor reports the device that it stands for, so is_cuda may be true of it.
    if tensor.is_meta or (type(tensor) is not Tensor and hasattr(tensor, "fake_mode")):
        from . import fake as backend
    elif tensor.is_cuda:
        from . import triton_backend as backend  # type: ignore[no-redef]
    else:
        from . import reference as backend  # type: ignore[no-redef]
    return backend


class Op(Generic[P, R]):
    """A ``torch.library`` op of the namespace ``fsdp_zpp``; see :func:`op`."""

    def __init__(self, function: Callable[P, R], mutates_args: tuple[str, ...], name: str) -> None:
        self._function = function
        self._op: Any = torch.library.custom_op(
            f"fsdp_zpp::{name}", function, mutates_args=mutates_args, device_types=("cpu", "cuda")
        )
        # The same function: it checks arguments while tracing, too, and backend_for then returns the fake backend.
        self._op.register_fake(function)
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
        return (self._function if is_plain(*tensors) else self._op)(*args, **kwargs)


def op(name: str, mutates_args: tuple[str, ...] = ()) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Make a function of tensors the op ``fsdp_zpp::<name>``.

    Args:
        name: The op's.
        mutates_args: The arguments that it writes to.
    """
    return lambda function: Op(function, mutates_args, name)
