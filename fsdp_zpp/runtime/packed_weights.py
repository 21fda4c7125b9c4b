"""Parameters whose bytes are packed values: QLoRA's base, torchao's tensors, and others that a codec must not encode.

bitsandbytes keeps two 4-bit codes in a byte, and for FSDP shows the bytes as bf16 (``bnb_4bit_quant_storage``). Seen as
numbers they are noise, and rounding them leaves other codes. A unit that holds such a parameter is gathered as it is.

Parameters that encode themselves for the all-gather, as torchao's float8 weights do, are trained weights all the same;
see [Note: Own bytes] in the adapter to fully_shard.

[Note: Packed bytes]
Under fully_shard, units that hold packed values are gathered by this library even where torch's would do: torch
copies shards by ``_foreach_copy_``, which on GPUs goes through fp32 and makes one NaN of all. About one in a thousand
packed byte pairs reads as a NaN in bf16 (bitsandbytes, issue 1945). No copy in this library may promote them either.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

K = TypeVar("K", bound=Hashable)


def holds_packed_values(parameter: Tensor) -> bool:
    """Return whether the elements of ``parameter`` stand for other values, so that its bytes must not change.

    Call it before FSDP shards the parameter: shards are plain tensors.
    """
    if isinstance(parameter, DTensor):
        return holds_packed_values(parameter._local_tensor)
    return (
        hasattr(parameter, "__tensor_flatten__")  # consists of other tensors, of which it is computed
        or encodes_itself(parameter)
        or getattr(parameter, "quant_state", None) is not None
        # Also before bitsandbytes has packed them, which it does when they are moved to a GPU.
        or any(cls.__module__.partition(".")[0] == "bitsandbytes" for cls in type(parameter).__mro__)
    )


def encodes_itself(parameter: Tensor) -> bool:
    """Return whether ``parameter`` decides itself what FSDP gathers, as torchao's float8 weights do."""
    return hasattr(parameter._local_tensor if isinstance(parameter, DTensor) else parameter, "fsdp_pre_all_gather")


def packed(parameters: Iterable[tuple[K, Tensor]]) -> dict[K, Tensor]:
    """Return the parameters that hold packed values, by the keys that they come with."""
    # Most are plain, and a call for each would be a third of all that sharding a module takes.
    candidates = ((key, p) for key, p in parameters if type(p) is not nn.Parameter or "quant_state" in vars(p))
    return {key: parameter for key, parameter in candidates if holds_packed_values(parameter)}


def packed_sites(model: nn.Module) -> set[tuple[nn.Module, str]]:
    """Return the modules below ``model`` that have packed parameters, with the names there."""
    sites = ((module, *named) for module in model.modules() for named in module._parameters.items())
    return set(packed(((module, name), p) for module, name, p in sites if p is not None))


def packed_facts(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the facts about packed parameters on which ranks must agree; see [Note: Agreement] in agreement.py."""
    return {f"values in {name}": f"packed as {type(parameter).__name__}" for name, parameter in parameters.items()}
