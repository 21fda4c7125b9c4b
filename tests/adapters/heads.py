"""A trunk with heads, of which each forward uses some, on each rank others if asked to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Adapter
from torch import Tensor, nn

WIDTH = 6
HEADS = {"a": 3, "b": 5, "c": 3, "d": 4}
"""Outputs of each head: two are of one size, and none divides by the ranks."""


class Heads(nn.Module):
    """A trunk and some heads, of which a forward uses what ``uses`` says, in that order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, size) for name, size in HEADS.items()})
        self.uses: str = "abcd"
        self.runs_all = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        losses = {name: self.heads[name](x).square().mean() for name in (HEADS if self.runs_all else self.uses)}
        return sum((losses[name] for name in self.uses), start=x.square().mean())


def shard_heads(adapter: Adapter, strategy: Any, apart: bool, **arguments: Any) -> tuple[Any, Heads]:
    """In a worker: the sharded model, and what is inside of it; ``apart`` makes every head a unit."""
    net = Heads().to(models.device())
    if apart:
        for name, head in net.heads.items():
            net.heads[name] = adapter.wrap(head, strategy, **arguments)
    return adapter.wrap(net, strategy, **arguments), net


def inputs(step: int, micro_batch: int) -> Tensor:
    """Other ones on each rank."""
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + 7919 * dist.get_rank())
    return torch.randn(2, WIDTH, generator=generator).to(models.device())


def average(parameters: Iterable[nn.Parameter]) -> None:
    """Give every parameter that any rank has used the mean of its gradients."""
    for p in parameters:
        used = torch.tensor(float(p.grad is not None), device=models.device())
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(gradient)
        dist.all_reduce(used)
        p.grad = gradient / dist.get_world_size() if used else None
