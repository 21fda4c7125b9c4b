"""Which calls need torch's dispatcher: ops that are run without it where nobody would notice.

A Python op's dispatch takes as long as several launches, and a sharded model runs a handful of ops for each unit and
step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def is_plain(*tensors: Tensor) -> bool:
    """Whether an op may be run without being dispatched: on tensors that are nothing but that, with nobody looking."""
    if torch.compiler.is_compiling():
        return False
    return all(type(tensor) is Tensor and not tensor.requires_grad for tensor in tensors)


class Op(Generic[P, R]):
    """A ``torch.library`` op of the namespace ``fsdp_zpp``; see :func:`op`."""

    def __init__(self, function: Callable[P, R], mutates_args: tuple[str, ...], name: str) -> None:
        self._function = function
        self._op: Any = torch.library.custom_op(
            f"fsdp_zpp::{name}", function, mutates_args=mutates_args, device_types=("cpu", "cuda")
        )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        return (self._function if is_plain(*tensors) else self._op)(*args, **kwargs)

    def register_fake(self, fake: Callable[P, R]) -> None:
        """Have ``fake`` stand for the op while it is traced."""
        self._op.register_fake(fake)


def op(name: str, mutates_args: tuple[str, ...] = ()) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Make a function of tensors, passed by position, the op ``fsdp_zpp::<name>``.

    Args:
        name: The op's.
        mutates_args: The arguments that it writes to.
    """
    return lambda function: Op(function, mutates_args, name)
