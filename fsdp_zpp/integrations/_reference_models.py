"""Reference models of frameworks that call accelerate's ``fsdp2_prepare_model`` themselves, sharded by a strategy.

LLaMA-Factory's and ms-swift's trainers do, in their constructors, and import it by name each time.
"""

from __future__ import annotations

import functools
from typing import Any

from accelerate import Accelerator
from accelerate.utils import fsdp_utils
from torch import nn

from .accelerate import ShardingAccelerator

_FUNCTION = "fsdp2_prepare_model"
_IS_REPLACED = "_fsdp_zpp_prepares"


def prepare_references_by_strategy() -> None:
    """Replace accelerate's ``fsdp2_prepare_model`` by one that leaves models to accelerators with a strategy."""
    original: Any = getattr(fsdp_utils, _FUNCTION)
    if hasattr(original, _IS_REPLACED):
        return

    @functools.wraps(original)
    def prepare(accelerator: Accelerator, model: nn.Module) -> nn.Module:
        if not isinstance(accelerator, ShardingAccelerator):
            return original(accelerator, model)  # type: ignore[no-any-return]
        return accelerator.prepare_model(model, evaluation_mode=True)

    setattr(prepare, _IS_REPLACED, True)
    setattr(fsdp_utils, _FUNCTION, prepare)
