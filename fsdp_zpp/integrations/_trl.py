"""TRL's trainers shard reference models in their constructors; here they do so by the strategy.

``prepare_fsdp``, which each of TRL's modules imports by name, calls torch's own ``fully_shard``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

from accelerate import Accelerator
from torch import nn

from .accelerate import ShardingAccelerator

Prepare = Callable[[nn.Module, Accelerator], nn.Module]
_FUNCTION = "prepare_fsdp"
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


def _preparing(original: Prepare) -> Prepare:
    @functools.wraps(original)
    def prepare(model: nn.Module, accelerator: Accelerator) -> nn.Module:
        if not isinstance(accelerator, ShardingAccelerator):
            return original(model, accelerator)
        return accelerator.prepare_model(model, evaluation_mode=True).eval()

    setattr(prepare, _IS_REPLACED, True)
    return prepare
