"""A model with layers that bitsandbytes has packed, beside plain ones."""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import torch
from harness import models
from torch import Tensor, nn

WIDTH = 64


def packed_linear(seed: int, storage: torch.dtype = torch.bfloat16, width: int = WIDTH, **options: Any) -> nn.Module:
    """A linear layer of QLoRA's."""
    torch.manual_seed(seed)
    values = torch.randn(width, width).bfloat16().to(models.device()) / 8
    arguments: dict[str, Any] = {"quant_type": "nf4", "quant_storage": storage, "blocksize": 64} | options
    layer = bnb.nn.Linear4bit(
        width, width, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4", quant_storage=storage
    )
    layer.weight = bnb.nn.Params4bit(values, requires_grad=False, module=layer, **arguments)
    layer.weight = layer.weight._quantize(models.device())
    return layer.to(models.device())


class Packed(nn.Module):
    """Two packed layers, then a plain frozen one, and a trainable one."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.second = packed_linear(6, **options), packed_linear(2, **options)
        self.plain = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.trained = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.ones_(self.plain.weight)
        nn.init.ones_(self.trained.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.trained(self.second(self.first(x)) + self.plain(x))


def make(**options: Any) -> Packed:
    """The model in bf16, the same on every rank."""
    return Packed(**options).to(models.device(), torch.bfloat16)


def x(rows: int = 4) -> Tensor:
    """An input."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(5)).bfloat16().to(models.device())
