"""The gradient of the first step is within the codecs' error of stock's, parameter by parameter.

A block holds values of a unit's matrices, so its scale is no larger than the largest gradient of one on some rank.
Parameters of one dimension are sent as they are.
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
    """Runs a program up to the first step that finds gradients, and measures the largest ones on any rank."""

    def __init__(self, program: Program, strategy: Any) -> None:
        super().__init__(program, strategy)
        self.largest = {p: torch.zeros(()) for model in self.models for p in model.parameters()}

    def measure(self) -> dict[str, float]:
        """What may share a parameter's blocks: the sum over micro-batches of the largest value, 0 for exact parameters.

        By the name that gradients have in traces.
        """
        for number, op in enumerate(self.program.ops):
            if isinstance(op, ops.Step):
                if self._any_gradient():
                    break
                continue
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
        shared = {}
        for spec, (rest, *units) in zip(self.program.models, self.fsdp_units(), strict=True):
            if spec.listed:
                units = [units[0] + units[1], *units[2:]]
            for unit in (rest, *units):
                largest = max((float(self.largest[p]) for p in unit if p.ndim > 1), default=0.0)
                shared |= {p: largest * (p.ndim > 1) for p in unit}
        return {
            f"gradient of model {i}: {name}": shared[p]
            for i, model in enumerate(self.models)
            for name, p in model.named_parameters(remove_duplicate=False)
        }

    def _any_gradient(self) -> bool:
        """Whether a rank has a gradient; none has one after a micro-batch that has failed. Collective."""
        found = torch.tensor(float(any(p.grad is not None for p in self.largest)))
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found)


def gradient_errors(program: Program, ours: Trace, stock: Trace) -> list[str]:
    """Which gradients of the first step are farther from stock's than codecs explain. Collective."""
    shared = Measured(program, None).measure()
    hops = [ERROR.get(type(codec), 0.0) for codec in program.strategy.gradient_codecs]
    # Replicas of the optimizer state gather the mean, which is encoded again.
    share = sum(hops) * (1 if program.strategy.optimizer == "G" else 2) * MARGIN
    wrong = []
    for name, theirs in stock.gradients.items():
        error = float((ours.gradients[name] - theirs).abs().max()) if name in ours.gradients else float("inf")
        if not error <= share * shared[name] + 1e-5 * (1 + float(theirs.abs().max())) and theirs.isfinite().all():
            wrong.append(f"{name} is {error:.3g} from stock's, with blocks of values up to {shared[name]:.3g}")
    return wrong
