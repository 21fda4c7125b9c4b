"""The modules that a :class:`Model` describes, and optimizers by name: torch's, and small ones that write otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .program import Branch, Model, Unit, Use

HIDDEN = 7


class InTheMiddleError(Exception):
    """An error that a program raises itself."""


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
        self.rootless = model.rootless
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


RATE = 0.1


class Optimizer(torch.optim.Optimizer):
    """An optimizer of ours."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": RATE})  # which schedulers look for

    def with_gradients(self) -> list[Any]:
        """Return the parameters that have a gradient."""
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]


class ReplacesData(Optimizer):
    """SGD that gives parameters other memory."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.with_gradients():
            p.data = p.data - RATE * p.grad


class ScheduleFree(Optimizer):
    """Schedule-free SGD (arXiv 2405.15682): weights differ between training and evaluation."""

    BETA = 0.9
    steps, evaluates = 0, False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.steps += 1
        for p in self.with_gradients():
            z = self.state[p].setdefault("z", p.detach().clone())
            p.lerp_(z, 1 / self.steps)
            p.add_(p.grad, alpha=RATE * (self.BETA * (1 - 1 / self.steps) - 1))
            z.sub_(p.grad, alpha=RATE)

    @torch.no_grad()
    def eval(self) -> None:
        """Give parameters the values to evaluate with."""
        for p, state in self.state.items() if not self.evaluates else ():
            p.lerp_(state["z"], 1 - 1 / self.BETA)
        self.evaluates = True

    @torch.no_grad()
    def train(self) -> None:
        """Give parameters the values to train with again."""
        for p, state in self.state.items() if self.evaluates else ():
            p.lerp_(state["z"], 1 - self.BETA)
        self.evaluates = False


class Sam(Optimizer):
    """Sharpness-aware minimization (arXiv 2010.01412), with an ascent that needs no norm over ranks."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        climbed = [(p, 0.5 * p.grad) for p in self.with_gradients()]
        for p, ascent in climbed:
            p.add_(ascent)
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        for p, ascent in climbed:
            p.sub_(ascent)
        for p in self.with_gradients():
            p.sub_(p.grad, alpha=RATE)
        return loss


def make_optimizer(name: str, parameters: list[nn.Parameter], coarse: bool) -> torch.optim.Optimizer:
    """An optimizer by its name in ``Program``; ``coarse`` rounding of gradients makes small ones zero."""
    kind, _, how = name.partition(" ")
    arguments: dict[str, Any] = {how: True} if how in ("fused", "foreach") else {}
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.2, momentum=0.5, weight_decay=0.1, **arguments)
    if kind == "adamw":  # a large epsilon, or rounding would decide where a gradient is near zero
        epsilon = 1.0 if coarse else 0.01
        return torch.optim.AdamW(parameters, lr=0.05, eps=epsilon, weight_decay=0.3, **arguments)
    if kind == "lbfgs":  # a fixed number of evaluations, which would else depend on rounding
        return torch.optim.LBFGS(
            parameters, lr=0.1, max_iter=2, history_size=2, tolerance_grad=0.0, tolerance_change=0.0
        )
    return {"replaces-data": ReplacesData, "schedule-free": ScheduleFree, "sam": Sam}[kind](parameters)
