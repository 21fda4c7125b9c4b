"""The methods of FSDPModule that a program calls between its ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .program import Tune


def _divide(unit: Any, value: int, units: list[Any]) -> None:
    unit.set_gradient_divide_factor(float(value))
    unit.set_force_sum_reduction_for_comms(True)  # gloo can't multiply before it sums


def _others(value: int, units: list[Any]) -> list[Any]:
    return [each for at, each in enumerate(units) if value >> at & 1 and hasattr(each, "unshard")]


def _unshard(unit: Any, value: int, units: list[Any]) -> None:
    handle = unit.unshard(async_op=value > 0)
    if value == 1:
        handle.wait()  # else the forward does


METHODS: dict[str, Callable[[Any, int, list[Any]], None]] = {
    "divide factor": _divide,
    "reshard after forward": lambda unit, value, units: unit.set_reshard_after_forward(bool(value), recurse=False),
    "forward prefetch": lambda unit, value, units: unit.set_modules_to_forward_prefetch(_others(value, units)),
    "backward prefetch": lambda unit, value, units: unit.set_modules_to_backward_prefetch(_others(value, units)),
    "unshard": _unshard,
    "reshard": lambda unit, value, units: unit.reshard(),
}


def tune(units: list[Any], op: Tune) -> None:
    """Call a unit's method, if it is a unit."""
    if hasattr(units[op.unit], "unshard"):
        METHODS[op.what](units[op.unit], op.value, units)
