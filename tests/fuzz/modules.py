"""The modules that a :class:`Model` describes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .program import Branch, Model, Unit, Use

HIDDEN = 7


class InTheMiddleError(Exception):
    """What a program raises itself."""


class Scale(nn.Module):
    """A factor for each value."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _branch(branch: Branch, width: int) -> nn.Module:
    module: nn.Module
    if branch.kind == "mlp":
        module = nn.Sequential(nn.Linear(width, HIDDEN, bias=False), nn.Tanh(), nn.Linear(HIDDEN, width))
    elif branch.kind in ("linear", "affine"):
        module = nn.Linear(width, width, bias=branch.kind == "affine")
    else:
        module = nn.LayerNorm(width) if branch.kind == "norm" else Scale(width)
    return module.requires_grad_(not branch.frozen)


class Block(nn.Module):
    """The residual block of a :class:`Unit`."""

    def __init__(self, unit: Unit, width: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(_branch(branch, width) for branch in unit.branches)
        if unit.tied:
            self.branches[1].weight = self.branches[0].weight
        self.to(torch.bfloat16 if unit.half else torch.float32)

    def forward(self, x: Tensor, use: tuple[int, ...]) -> Tensor:
        out = x * 1.0
        for i in use:
            branch = self.branches[i]
            dtype = next(module.weight.dtype for module in branch.modules() if hasattr(module, "weight"))
            out = out + torch.tanh(branch(x.to(dtype))).to(x.dtype)
        return out


class Net(nn.Module):
    """An embedding, blocks and the root's own branches."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.embedding = nn.Linear(model.width, model.width)
        self.blocks = nn.ModuleList(Block(unit, model.width) for unit in model.units)
        self.root = Block(Unit(model.root), model.width)
        if model.tied:
            self.root.branches[0].weight = self.embedding.weight

    def forward(self, x: Tensor, order: tuple[int, ...], use: Use, between: Callable[[int, Tensor], Tensor]) -> Tensor:
        """``between(i, x)`` sees, and may replace, what the i-th call of a block begins with."""
        x = torch.tanh(self.embedding(x))
        for i, block in enumerate(order):
            x = self.blocks[block](between(i, x), use[block])
        return self.root(between(len(order), x), use[-1])
