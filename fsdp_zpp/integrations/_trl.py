"""TRL's trainers shard reference models in their constructors: with a strategy, by the strategy.

``prepare_fsdp``, which each of TRL's modules imports by name, calls torch's own ``fully_shard``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from .accelerate import ShardingAccelerator

_FUNCTION = "prepare_fsdp"
_OURS = "_fsdp_zpp_prepares"


def prepare_by_strategy(trainer: type) -> None:
    """Replace ``prepare_fsdp`` in the modules of ``trainer`` and its bases by one that knows strategies.

    Args:
        trainer: The class of a trainer, of TRL or not.
    """
    for cls in trainer.__mro__:
        module = sys.modules.get(cls.__module__)
        original = vars(module).get(_FUNCTION) if cls.__module__.startswith("trl.") else None
        if original is not None and not hasattr(original, _OURS):
            setattr(module, _FUNCTION, _preparing(original))


def _preparing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare(model: Any, accelerator: Any) -> Any:
        if not isinstance(accelerator, ShardingAccelerator):
            return original(model, accelerator)
        return accelerator.prepare_model(model, evaluation_mode=True).eval()

    setattr(prepare, _OURS, True)
    return prepare
