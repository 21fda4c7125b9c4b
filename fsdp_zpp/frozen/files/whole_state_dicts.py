"""State dicts that hold the quantized weights, too, while a framework makes or loads them.

A quantized weight is in no state dict. A framework that writes a whole model to one file knows no other source of
weights, and FullyShardedDataParallel refuses a file with names that it does not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from fsdp_zpp.module_names import original_path, parameter_name
from fsdp_zpp.runtime.model_ranks import ranks_of
from fsdp_zpp.runtime.tensors_of_model import tensors_of

from ..decoded import DecodedWeight, decoded_weights_of
from ..full_tensors import on_first_rank
from ..modules import frozen_sites


def quantized_names(model: nn.Module) -> set[str]:
    """Return the names of a model's quantized weights, as they were before it was wrapped."""
    return {parameter_name(path, name) for path, _, name, _ in frozen_sites(model)}


def dequantized_weights(model: nn.Module) -> dict[str, Tensor]:
    """Copy the quantized weights, dequantized, to the CPU of the model's first rank, by all of their FQNs. Collective.

    Args:
        model: The model, sharded or not.
    """
    tensors = [tensor for tensor in tensors_of(model, decoded_weights_of) if isinstance(tensor.full, DecodedWeight)]
    return on_first_rank(tensors, ranks_of(model), all_names=True)


@contextmanager
def with_quantized_weights(model: nn.Module) -> Iterator[None]:
    """Add the quantized weights, dequantized, to ``model.state_dict()`` in this context; each call is collective.

    Only the model's first rank gets them, on the CPU, as the rank does to which full state dicts go.
    """

    def add(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: object) -> None:
        state.update({prefix + name: tensor for name, tensor in dequantized_weights(model).items()})

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
