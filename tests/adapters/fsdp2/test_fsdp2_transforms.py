"""How torch's hooks step out of torch.compile: once, and only past torch's own wrappers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_common

from fsdp_zpp.adapters.fsdp2._torch_transforms import without_dynamo

# torch has the decorator from 2.13 on.
decorate: Callable[[Any], Any] = getattr(_fsdp_common, "_dynamo_disable", lambda method: method)


@pytest.mark.skipif(not hasattr(_fsdp_common, "_dynamo_disable"), reason="this torch does not disable dynamo there")
def test_a_hook_of_torchs_is_not_compiled() -> None:
    hook = without_dynamo(decorate(lambda x: x if torch.compiler.is_compiling() else x + 1))

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = hook(x * 2)
        return y - 1

    assert step(torch.ones(())).item() == 2
    assert hook(1) == 2


def test_what_a_tool_has_wrapped_stays_wrapped() -> None:
    called = []

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(*args: Any) -> Any:
            called.append(args)
            return method(*args)

        return wrapper

    assert without_dynamo(watched(decorate(lambda x: x + 1)))(1) == 2
    assert called == [(1,)]
