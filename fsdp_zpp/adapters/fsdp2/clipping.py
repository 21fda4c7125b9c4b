"""Clipping the gradients of units that are sharded over different ranks, which DTensor can't add up."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from .sharded_by import sharded_by


def explain_clipping_errors() -> None:
    """Let ``torch.nn.utils.clip_grad_norm_`` name the strategies of what it can't clip together."""
    original = clip_grad.clip_grad_norm_

    @functools.wraps(original)
    def clip_grad_norm_(parameters: Any, *args: Any, **kwargs: Any) -> Tensor:
        given = parameters
        if isinstance(parameters, GeneratorType):  # as which torch must get it, since it treats an empty one apart
            given = list(parameters)
            parameters = (parameter for parameter in given)
        try:
            return original(parameters, *args, **kwargs)
        except RuntimeError as error:
            if reason := _cause([given] if isinstance(given, Tensor) else given):
                raise ValueError(reason) from error
            raise

    clip_grad.clip_grad_norm_ = clip_grad_norm_
    torch.nn.utils.clip_grad_norm_ = clip_grad_norm_


def _cause(parameters: Iterable[Tensor]) -> str:
    """Return why ``parameters`` can't be clipped together; nothing if all are sharded over the same ranks."""
    strategies = {
        tuple(parameter.device_mesh.mesh.flatten().tolist()): sharded_by(parameter) or "torch's own fully_shard"
        for parameter in parameters
        if isinstance(parameter, DTensor) and parameter.grad is not None
    }
    if len(strategies) < 2:
        return ""
    named = " and by ".join(strategies.values())
    return (
        f"gradients can't be clipped together that are sharded over different ranks, by {named}; "
        "give all parts of a model the same third letter and gpus_per_node, or clip each part on its own"
    )
