"""The trace of a run, and laws of codecs beside staying near stock.

- Weights that a forward computes with are within the codec's error of the full-precision weights, as no stale one is.
- Weights that are frozen for good do not change.

:class:`fuzz.references.Measured` has the law for gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fsdp_zpp import Int4, Int4Delta, Int8, Strategy

from . import program as ops
from .features import is_left_out
from .program import Program


@dataclass
class Trace:
    """The results of a run."""

    shown: dict[str, Tensor] = field(default_factory=dict)  # losses and weights, by the number of the op
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the first step
    facts: dict[str, str] = field(default_factory=dict)  # of parameters, as modules show them
    wrong: list[str] = field(default_factory=list)  # without any comparison
    error: str | None = None  # the exception that ended it
    replicas_differ: bool = False  # in the end

    @property
    def says(self) -> str | None:
        """The exception alone, without where it was raised."""
        return None if self.error is None else self.error.partition("\n")[0]


MARGIN = 1.05
"""For rounding of scales."""
IN_16_BITS = 2.0**-7


def weight_error(strategy: Strategy) -> float:
    """The largest error of a gathered weight, as a share of the largest weight."""
    if isinstance(strategy.weights, Int4Delta):
        return 0.1  # of changes, each of which is a part of the weight at the rates of programs
    return {Int8: 1 / 254, Int4: 1 / 14}.get(type(strategy.weights), 0.0)  # type: ignore[call-overload]


class SeenWeights:
    """The weights that forwards have computed with."""

    def __init__(self, program: Program) -> None:
        self.bound = max(map(weight_error, program.strategies)) * MARGIN + IN_16_BITS * program.has_half + 1e-6
        self.of_exact = IN_16_BITS * program.has_half + 1e-6  # of parameters of one dimension
        self._seen: dict[tuple[int, str], list[Tensor]] = {}

    def watch(self, i: int, net: nn.Module) -> None:
        """Note the weights of the i-th model whenever a module of it runs."""
        for name, module in net.named_modules():
            if isinstance(getattr(module, "weight", None), nn.Parameter):
                module.register_forward_pre_hook(lambda module, args, key=(i, name): self._note(key, module))

    def _note(self, key: tuple[int, str], module: Any) -> None:
        self._seen.setdefault(key, []).append(module.weight.detach().float().clone())

    def forget(self) -> None:
        """Begin anew."""
        self._seen.clear()

    def check(self, i: int, full: dict[str, Tensor]) -> list[str]:
        """Return the weights of the i-th model that were seen and are not near the full ones."""
        largest = max(float(value.abs().max()) for value in full.values())
        wrong = []
        for (model, name), seen in self._seen.items():
            truth = full.get(f"{name}.weight")
            if model != i or truth is None:
                continue
            error = max(float((each.cpu() - truth).abs().max()) for each in seen)
            bound = self.bound if truth.ndim > 1 else self.of_exact
            if not error <= bound * largest and truth.isfinite().all():
                saw = f"a forward saw {name}.weight {error:.3g} from its value"
                wrong.append(f"{saw}, the largest weight is {largest:.3g}")
        return wrong


def changed_though_frozen(program: Program, trace: Trace) -> list[str]:
    """Return the weights that have changed from the start to the end, though they were frozen all along."""
    writes = any(isinstance(op, ops.Load | ops.Write) or op == ops.Event("load_in_place") for op in program.ops)
    if program.with_frozen or writes:
        return []
    frozen = tuple(
        f"start: weight of model {i}: blocks.{unit}.branches.{b}."
        for i, model in enumerate(program.models)
        for unit, each in enumerate(model.units)
        for b, branch in enumerate(each.branches)
        if branch.frozen and not (each.tied and b < 2)
    )
    ends = {name: name.replace("start", "end", 1) for name in trace.shown if name.startswith(frozen)}
    changed = [end for start, end in ends.items() if not trace.shown[start].equal(trace.shown[end])]
    return [f"{end} has changed though it is frozen" for end in changed]


def has_gradient_law(program: Program) -> bool:
    """Return whether weights are exact until the first step, and nothing is fed back to its gradient."""
    s = program.strategy
    return (
        program.adapter == "fsdp2"
        and not is_left_out("gradient law")
        and any(isinstance(codec, Int4 | Int8) for codec in s.gradient_codecs)
        and s.weights is None
        and s.error_feedback is None
        and program.inner is None
        and not (program.has_half or program.scaler or program.interleaved)
        and not any(op.what == "divide factor" for op in program.ops if isinstance(op, ops.Tune))
        and program.optimizer not in ("sam", "lbfgs")
    )
