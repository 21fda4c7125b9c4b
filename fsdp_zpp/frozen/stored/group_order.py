"""The groups of inputs that share a scale, where they are not neighbours: GPTQ's ``desc_act``, others' ``actorder``."""

from __future__ import annotations

import hashlib
from functools import cached_property

import torch
from torch import Tensor

from .format import refuse_misfit


class GroupOrder:
    """The group of each input.

    Args:
        group_of: The groups, int32 [inputs] on the CPU.
    """

    def __init__(self, group_of: Tensor) -> None:
        self._on = {group_of.device: group_of}

    @classmethod
    def of(cls, stored: Tensor, inputs: int, groups: int, key: str) -> GroupOrder | None:
        """Return the order that ``stored`` has; None if groups are equally many neighbours, in order.

        Args:
            stored: Integers [inputs]. -1 anywhere means that the groups are neighbours (compressed-tensors).
            inputs: The number of inputs.
            groups: The number of groups.
            key: The name of the tensor, for errors.

        Raises:
            ValueError: If there is no group of some input.
        """
        if stored.shape != (inputs,) or stored.dtype.is_floating_point:
            refuse_misfit(key, f"{stored.dtype} {tuple(stored.shape)}", f"the group of each of {inputs} inputs")
        if -1 in stored:
            return None
        low, high = int(stored.min()), int(stored.max())
        if low < 0 or high >= groups:
            refuse_misfit(key, f"groups from {low} to {high}", f"groups from 0 to {groups - 1}")
        neighbours = torch.arange(inputs) // max(1, len(stored) // groups)
        if inputs % groups == 0 and torch.equal(stored.long(), neighbours):
            return None
        return cls(stored.int())

    def on(self, device: torch.device) -> Tensor:
        """Return the groups on a device; they are copied there once."""
        if device not in self._on:
            self._on[device] = next(iter(self._on.values())).to(device)
        return self._on[device]

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(next(iter(self._on.values())).numpy().tobytes()).hexdigest()[:16]

    def __str__(self) -> str:
        return f"in the order {self._digest}"
