"""Private names of torch's fully_shard: how its hooks step out of torch.compile and of functorch's transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_common

Method = TypeVar("Method", bound=Callable[..., object])

# torch steps out of functorch's transforms to communicate from 2.13 on.
without_functorch: Callable[[Method], Method] = getattr(
    _fsdp_common, "_disable_functorch_if_active", lambda method: method
)


def without_dynamo(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of torch's for which dynamo is disabled once.

    From torch 2.13 on, its decorator makes a wrapper that disables dynamo anew in every call, which takes longer than
    much of what the methods do. A method that something else has wrapped is left as it is.
    """
    decorator = getattr(_fsdp_common, "_dynamo_disable", None)
    if decorator is None or method.__code__ is not decorator(lambda: None).__code__:
        return method
    return torch.compiler.disable(method.__wrapped__)  # type: ignore[attr-defined]
