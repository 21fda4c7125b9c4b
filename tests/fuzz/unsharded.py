"""Runs a program without FSDP, in fp64: the judge where ours and stock differ by more than usual rounding.

Some programs magnify rounding (a layer norm of three nearly equal values, 16 bits over many steps), and now and then
stock is the one that is wrong. What counts is that ours is about as near to this run as stock is, or nearer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import program as ops
from .modules import Net
from .run import Run, Trace, halved

NOT_FARTHER = 4.0
"""How many times as far from the judge as stock ours may be."""


class Unsharded(Run):
    """One run of a program on plain modules, whose gradients ranks average before each step."""

    def make(self, i: int, seed: int) -> Any:
        torch.manual_seed(seed * 10 + i)
        net = Net(self.program.models[i]).double()
        net.register_forward_pre_hook(lambda module, args: (args[0].double(), *args[1:]))
        return net

    @contextmanager
    def _micro_batch(self, sync: bool) -> Iterator[None]:
        yield

    def _clip(self, model: nn.Module, norm: float) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), norm)

    def _forget_accumulated(self, units: Any, i: int) -> None:
        """Nothing but ``.grad`` holds gradients."""

    def show_weights(self, when: str) -> None:
        for i, model in enumerate(self.models):
            for name, value in model.state_dict().items():
                self.trace.shown[f"{when}: weight of model {i}: {name}"] = value.clone()

    def do_step(self, op: ops.Step) -> None:
        own = {p: p.grad for model in self.models for p in model.parameters() if p.requires_grad}
        for p, gradient in own.items():
            used = torch.tensor(float(gradient is not None))
            total = torch.zeros_like(p) if gradient is None else gradient.clone()
            dist.all_reduce(used)
            dist.all_reduce(total)
            p.grad = total / dist.get_world_size() if used else None
        super().do_step(op)
        for p, gradient in own.items():
            p.grad = gradient

    @torch.no_grad()
    def do_write(self, op: ops.Write) -> None:
        for model in self.models:
            for p in model.parameters():
                p.mul_(0.75)

    def do_load(self, op: ops.Load) -> None:
        for model in self.models:
            model.load_state_dict(halved(model.state_dict()))
        if op.assign:
            self.optimizers = self.make_optimizers()

    def do_move(self, op: ops.Move) -> None:
        """Changes no value."""


def is_as_exact(ours: Trace, stock: Trace, exact: Trace) -> bool:
    """Whether ours is about as near to the judge as stock, in all losses together and in all weights of a moment."""
    if exact.error is not None:
        return False
    far: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for name in stock.shown:  # it names tied weights once
        truth = exact.shown[name]
        moment = name.partition(" weight")[0] if " weight" in name else "losses"
        distances = (ours.shown[name].double() - truth, stock.shown[name].double() - truth, truth)
        far[moment] = [before + each.square().sum().item() for before, each in zip(far[moment], distances, strict=True)]
    return all(
        ours_far**0.5 <= NOT_FARTHER * stock_far**0.5 + 1e-6 * size**0.5 for ours_far, stock_far, size in far.values()
    )
