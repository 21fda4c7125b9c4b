"""TRL's trainers shard reference models in their constructors, and send weights to vLLM; here both go by the strategy.

``prepare_fsdp``, which each of TRL's modules imports by name, calls torch's own ``fully_shard``. ``VLLMGeneration``
iterates over full parameters in ``_iter_named_params``, for a server as for an engine in the same process.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.utils import is_peft_model
from torch import Tensor, nn

from fsdp_zpp.inference.gathered_weights import gathered_weights

from .accelerate import ShardingAccelerator

Prepare = Callable[[nn.Module, Accelerator], nn.Module]
NamedTensors = Iterator[tuple[str, Tensor]]
_FUNCTION = "prepare_fsdp"
_PARAMETERS = "_iter_named_params"
_IS_REPLACED = "_fsdp_zpp_prepares"


def prepare_by_strategy(trainer: type) -> None:
    """Replace ``prepare_fsdp`` in the modules of ``trainer`` and its bases by one that knows strategies.

    Args:
        trainer: The class of a trainer, of TRL or not.
    """
    for cls in trainer.__mro__:
        module = sys.modules.get(cls.__module__)
        original = vars(module).get(_FUNCTION) if cls.__module__.startswith("trl.") else None
        if original is not None and not hasattr(original, _IS_REPLACED):
            setattr(module, _FUNCTION, _preparing(original))
    sync_by_strategy()


def _preparing(original: Prepare) -> Prepare:
    @functools.wraps(original)
    def prepare(model: nn.Module, accelerator: Accelerator) -> nn.Module:
        if not isinstance(accelerator, ShardingAccelerator):
            return original(model, accelerator)
        return accelerator.prepare_model(model, evaluation_mode=True).eval()

    setattr(prepare, _IS_REPLACED, True)
    return prepare


def sync_by_strategy() -> None:
    """Have TRL's sync of weights to vLLM, if it is imported, take them from ``gathered_weights``.

    TRL's own asks each parameter for its full tensor and merges adapters in place; bases that we quantize are no
    parameters, and layers that the last forward left unsharded are no DTensors.
    """
    module = sys.modules.get("trl.generation.vllm_generation")
    cls = getattr(module, "VLLMGeneration", None)
    original = getattr(cls, _PARAMETERS, None)
    if original is not None and not hasattr(original, _IS_REPLACED):
        setattr(cls, _PARAMETERS, _gathering(original))


def _gathering(original: Callable[[Any], NamedTensors]) -> Callable[[Any], NamedTensors]:
    @functools.wraps(original)
    def iterate(generation: Any) -> NamedTensors:
        if not isinstance(generation.accelerator, ShardingAccelerator):
            return original(generation)
        return _each_once(gathered_weights(generation.model, merged=is_peft_model(generation.model)))

    setattr(iterate, _IS_REPLACED, True)
    return iterate


def _each_once(weights: NamedTensors) -> NamedTensors:
    """Leave out further names of tied tensors, which vLLM ties itself."""
    previous = None
    for name, tensor in weights:
        if tensor is not previous:
            yield name, tensor
        previous = tensor
