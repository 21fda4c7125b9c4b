"""The gradient of the first step is within the codecs' error of stock's, parameter by parameter.

A block holds values of one parameter, so its scale is no larger than that parameter's gradient on some rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fsdp_zpp import Int4, Int8

from . import program as ops
from .laws import MARGIN
from .program import Program
from .trace import Trace
from .unsharded import Unsharded

ERROR = {Int8: 1 / 254, Int4: 1 / 14}
"""Of a codec, as a share of the largest value of a block."""


class Measured(Unsharded):
    """Runs a program up to its first step, and measures the largest gradient of each parameter on any rank."""

    def __init__(self, program: Program, strategy: Any) -> None:
        super().__init__(program, strategy)
        self.largest = {p: torch.zeros(()) for model in self.models for p in model.parameters()}

    def measure(self) -> dict[str, float]:
        """The sum over micro-batches of the largest value, by the name that gradients have in traces."""
        for number, op in enumerate(self.program.ops):
            if isinstance(op, ops.Step):
                break
            self.number = number
            before = {p: 0 if p.grad is None else p.grad.clone() for p in self.largest}
            getattr(self, "do_" + type(op).__name__.lower())(op)
            if isinstance(op, ops.Resume):
                self.largest = {p: torch.zeros(()) for model in self.models for p in model.parameters()}
            elif isinstance(op, ops.MicroBatch):
                for p in self.largest:
                    largest = torch.zeros(()) if p.grad is None else (p.grad - before[p]).abs().max().float()
                    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
                    self.largest[p] += largest
        return {
            f"gradient of model {i}: {name}": float(self.largest[p])
            for i, model in enumerate(self.models)
            for name, p in model.named_parameters(remove_duplicate=False)
        }


def gradient_errors(program: Program, ours: Trace, stock: Trace) -> list[str]:
    """Which gradients of the first step are farther from stock's than codecs explain. Collective."""
    largest = Measured(program, None).measure()
    hops = [ERROR.get(type(codec), 0.0) for codec in program.strategy.gradient_codecs]
    # Replicas of the optimizer state gather the mean, which is encoded again.
    share = sum(hops) * (1 if program.strategy.optimizer == "G" else 2) * MARGIN
    wrong = []
    for name, theirs in stock.gradients.items():
        error = float((ours.gradients[name] - theirs).abs().max()) if name in ours.gradients else float("inf")
        if not error <= share * largest[name] + 1e-5 and theirs.isfinite().all():
            wrong.append(f"{name} is {error:.3g} from stock's, with {largest[name]:.3g} as its largest value on a rank")
    return wrong
