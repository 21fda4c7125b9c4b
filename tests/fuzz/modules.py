"""The modules that a :class:`Model` describes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
    return module.requires_grad_(not branch.frozen).to(torch.bfloat16 if branch.half else torch.float32)


class Block(nn.Module):
    """The residual block of a :class:`Unit`."""

    def __init__(self, unit: Unit, width: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(_branch(branch, width) for branch in unit.branches)
        if unit.tied:
            self.branches[1].weight = self.branches[0].weight
        if unit.half:
            self.to(torch.bfloat16)
        self.nested = unit.nested
        self.recomputed = unit.checkpointing if unit.checkpointing and unit.checkpointing.startswith("inside") else None

    def forward(self, x: Tensor, use: tuple[int, ...]) -> Tensor:
        if self.recomputed:
            return _recompute(self._sum_of_branches, self.recomputed, x, use)
        return self._sum_of_branches(x, use)

    def _sum_of_branches(self, x: Tensor, use: tuple[int, ...]) -> Tensor:
        out = x * 1.0
        for i in use:
            branch = self.branches[i]
            dtypes = (module.weight.dtype for module in branch.modules() if hasattr(module, "weight"))
            dtype = x.dtype if self.nested and i == 0 else next(dtypes, x.dtype)
            out = out + torch.tanh(branch(x.to(dtype))).to(x.dtype)
        return out


class Net(nn.Module):
    """An embedding, blocks and the root's own branches."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.embedding = nn.Linear(model.width, model.width)
        self.blocks = nn.ModuleList(Block(unit, model.width) for unit in model.units)
        self.root = Block(Unit(model.root), model.width)
        self.recomputed = [unit.checkpointing for unit in model.units]
        if model.tied:
            self.root.branches[0].weight = self.embedding.weight
        if model.rootless:
            self.embedding.requires_grad_(False)
            self.root.requires_grad_(False)

    def forward(self, x: Tensor, order: tuple[int, ...], use: Use, between: Callable[[int, Tensor], Tensor]) -> Tensor:
        """``between(i, x)`` sees, and may replace, what the i-th call of a block begins with."""
        x = torch.tanh(self.embedding(x))
        for i, block in enumerate(order):
            x, how = between(i, x), self.recomputed[block]
            if how and how.startswith("outside"):
                x = _recompute(self.blocks[block], how, x, use[block])
            else:
                x = self.blocks[block](x, use[block])
        return self.root(between(len(order), x), use[-1])


def _recompute(function: Callable[..., Tensor], how: str, *args: object) -> Tensor:
    return checkpoint(function, *args, use_reentrant=how.endswith(" reentrant"))
