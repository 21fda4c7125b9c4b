"""Optimizers by name: torch's own in all implementations, and small ones of the kinds that write weights otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

RATE = 0.1


class ReplacesData(torch.optim.Optimizer):
    """SGD that gives parameters other memory."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in _with_gradients(self):
            p.data = p.data - RATE * p.grad


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (arXiv 2405.15682): weights differ between training and evaluation."""

    BETA = 0.9

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": RATE})  # which schedulers look for
        self.steps, self.evaluates = 0, False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.steps += 1
        for p in _with_gradients(self):
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


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization (arXiv 2010.01412), with an ascent that needs no norm over ranks."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        climbed = [(p, 0.5 * p.grad) for p in _with_gradients(self)]
        for p, ascent in climbed:
            p.add_(ascent)
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        for p, ascent in climbed:
            p.sub_(ascent)
        for p in _with_gradients(self):
            p.sub_(p.grad, alpha=RATE)
        return loss


def make(name: str, parameters: list[nn.Parameter], coarse: bool) -> torch.optim.Optimizer:
    """An optimizer.

    Args:
        name: Its name, as in ``Program.optimizer``.
        parameters: What it has.
        coarse: Whether gradients are rounded so coarsely that small ones become zero.
    """
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


def _with_gradients(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
