"""State dicts that hold the quantized weights, too, while a framework makes or loads them.

A quantized weight is in no state dict. A framework that writes a whole model to one file knows no other source of
weights, and FullyShardedDataParallel refuses a file with names that it does not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from fsdp_zpp.module_names import original_path, parameter_name

from ..modules import frozen_sites
from ..weight import FrozenWeight


def quantized_names(model: nn.Module) -> set[str]:
    """Return the names of a model's quantized weights, as they were before it was wrapped."""
    return {parameter_name(path, name) for path, _, name, _ in frozen_sites(model)}


def dequantized_weights(model: nn.Module, *, kept: bool = True) -> dict[str, Tensor]:
    """Copy the quantized weights, dequantized, to the CPU, by all of their FQNs without wrappers. Collective.

    One weight at a time is on the device.

    Args:
        model: The model, sharded or not.
        kept: Whether this rank keeps the copies; if not, it only takes part, and returns an empty dict.
    """
    names: dict[FrozenWeight, list[str]] = {}
    for path, _, name, weight in frozen_sites(model):
        names.setdefault(weight, []).append(parameter_name(path, name))
    copies: dict[str, Tensor] = {}
    for weight, paths in names.items():
        whole = weight.dequantize()
        for path in paths if kept else ():  # tied ones are copied, as in torch's own full state dicts
            copies[path] = whole.to("cpu", copy=True)
    return copies


@contextmanager
def with_quantized_weights(model: nn.Module, *, kept: bool) -> Iterator[None]:
    """Add the quantized weights, dequantized, to ``model.state_dict()`` in this context; each call is collective.

    Args:
        model: The model, sharded or not.
        kept: Whether this rank keeps them, on the CPU, as the rank does to which full state dicts go.
    """

    def add(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: object) -> None:
        state.update({prefix + name: tensor for name, tensor in dequantized_weights(model, kept=kept).items()})

    handle = model.register_state_dict_post_hook(add)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def without_quantized_weights(model: nn.Module) -> Iterator[None]:
    """Make ``model.load_state_dict`` skip values for quantized weights, in this context."""
    quantized = quantized_names(model)

    def drop(module: nn.Module, state: dict[str, Tensor], prefix: str, *arguments: object) -> None:
        for key in [key for key in state if original_path(key.removeprefix(prefix)) in quantized]:
            del state[key]

    handle = model.register_load_state_dict_pre_hook(drop)
    try:
        yield
    finally:
        handle.remove()
