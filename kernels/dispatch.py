"""Which calls need torch's dispatcher."""

from __future__ import annotations

import torch
from torch import Tensor


def is_plain(*tensors: Tensor) -> bool:
    """Whether an op may be run without being dispatched: on tensors that are nothing but that, with nobody looking.

    A Python op's dispatch takes as long as several launches, and a sharded model runs a handful of ops for each unit
    and step.
    """
    if torch.compiler.is_compiling():
        return False
    return all(type(tensor) is Tensor and not tensor.requires_grad for tensor in tensors)
