"""Refuses NaN and infinite values in a base: with one of them, all values of its block decode to NaN.

A model on such a base has a loss of NaN from the first step on, and nothing points to the base.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .weight import ReadValues, Sliceable


def refuse_infinite_values(values: Tensor, name: str, remedy: str) -> None:
    """Raise if a tensor has NaN or infinite values.

    Raises:
        ValueError: It names the tensor and the ``remedy``.
    """
    if values.is_meta or not values.numel() or not values.is_floating_point():
        return
    # Both are NaN if any value is.
    if not torch.stack(torch.aminmax(values)).isfinite().all():
        raise ValueError(f"{name} has values that are NaN or infinite, which no codec can represent; {remedy}")


def finite_values(read: ReadValues, name: str, remedy: str) -> ReadValues:
    """Wrap ``read`` so that it raises for NaN and infinite values, as :func:`refuse_infinite_values` does."""

    def checked(first: int, last: int) -> Tensor:
        values = read(first, last)
        refuse_infinite_values(values, name, remedy)
        return values

    return checked


class FiniteSlice:
    """A slice of a file, which raises if values that are read from it are NaN or infinite.

    Args:
        of: The slice.
        name: The tensor in errors.
        remedy: What to do.
    """

    def __init__(self, of: Sliceable, name: str, remedy: str) -> None:
        self._of, self._name, self._remedy = of, name, remedy

    def __getitem__(self, index: slice) -> Tensor:
        values = self._of[index]
        refuse_infinite_values(values, self._name, self._remedy)
        return values
