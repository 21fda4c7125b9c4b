"""Makes transformers' ``save_pretrained`` raise on a quantized base: it would write the unquantized rest alone."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from ..support import model_name
from .module import frozen_modules

_METHOD = "save_pretrained"


def guard_save_pretrained(model: nn.Module) -> None:
    """Make ``save_pretrained`` of ``model`` and its submodules raise while any of their weights are quantized."""
    for module in model.modules():
        # PeftModel's own save_pretrained writes only adapters, which are complete.
        if hasattr(type(module), _METHOD) and not hasattr(type(module), "get_base_model"):
            vars(module)[_METHOD] = functools.partial(_save_pretrained, module)


def _save_pretrained(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    weights = {weight for _, _, weight in frozen_modules(module)}
    if weights:
        raise RuntimeError(
            f"{len(weights)} weights of this {model_name(module)} are frozen and quantized, and save_pretrained "
            "would leave them out; fsdp_zpp.save_frozen_params(model, path) writes the quantized base and "
            "fsdp_zpp.save_adapter(model, path) an adapter. For a checkpoint in full precision, call "
            "fsdp_zpp.dequantize_frozen_params(model) first, on every rank and before sharding"
        )
    return getattr(type(module), _METHOD)(module, *args, **kwargs)
