"""Private names of torch's flat parameters: original parameters that were given other memory, by ``p.data = ...``.

FSDP copies them to the shard before it gathers. Whatever else reads the shard, or has parameters show it again, must
have them copied first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fsdp_zpp.torch_internals import Needed, check_needed

_FLAT = "torch.distributed.fsdp._flat_param.FlatParameter"
_HANDLE = "torch.distributed.fsdp._flat_param.FlatParamHandle"
_NEEDED = (
    Needed(_HANDLE, "flat_param uses_sharded_strategy", "copying parameters that were replaced"),
    Needed(_FLAT, "_local_shard _params _param_infos", "the same"),
)
check_needed("adapter for FullyShardedDataParallel", _NEEDED)


def copy_replaced(handle: Any) -> None:
    """Copy the values of parameters that were replaced to the shard, from FSDP's lazy initialization on."""
    if hasattr(handle.flat_param, "_local_shard"):
        with _gradients_left_alone(handle):
            handle.prepare_read()


@contextmanager
def _gradients_left_alone(handle: Any) -> Iterator[None]:
    """Keep FSDP, which copies replaced parameters to its own, from doing so with gradients if nothing is sharded."""
    flat_param = handle.flat_param
    if handle.uses_sharded_strategy or not flat_param._params:
        yield
        return
    # Whether there are any does not show whether they count: a flat gradient stays until the forward after zero_grad().
    shown = [getattr(module, name, None) for name, module, _ in flat_param._param_infos]
    held = [each for each in (flat_param, *flat_param._params, *shown) if isinstance(each, Tensor)]
    gradients = [each.grad for each in held]
    for each in held:
        each.grad = None
    try:
        yield
    finally:
        for each, gradient in zip(held, gradients, strict=True):
            if gradient is not None:
                each.grad = gradient
