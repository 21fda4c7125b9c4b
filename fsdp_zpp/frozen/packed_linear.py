"""Linear layers that bitsandbytes has packed in 4 bits already: how :class:`NF4` takes over their weights.

The weights are dequantized to fp32 and quantized again. If bitsandbytes used nf4 with blocks of the same size, codes
and scales stay what they were.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class PackedLinear:
    """A packed weight of one or more of bitsandbytes' ``Linear4bit``.

    Args:
        packed: The parameter.
        state: bitsandbytes' description of it, which has the scales.
        modules: The layers.
    """

    packed: nn.Parameter
    state: Any
    modules: tuple[nn.Module, ...]

    @property
    def shape(self) -> torch.Size:
        """Return the weight's shape."""
        return torch.Size(self.state.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype that the weight had before, and dequantizes to."""
        return self.state.dtype

    @torch.no_grad()
    def whole(self) -> Tensor:
        """Dequantize all values, in fp32, so that they are rounded once."""
        from bitsandbytes import functional  # on use, since that takes seconds

        data, state = self.packed.detach(), self.state
        if getattr(state, "packing_format_for_cpu", False):  # a forward in evaluation packs them differently
            data, state = functional._convert_weight_packed_for_cpu_inverse(data, state)
        state = copy.copy(state)
        state.dtype = torch.float32
        return functional.dequantize_4bit(data.as_subclass(Tensor), state)

    def release(self) -> None:
        """Make the layers torch's own linear layers, which compute in the dtype of their input."""
        for module in self.modules:
            module.__class__ = nn.Linear
            vars(module).pop("quant_state", None)


def packed_linear(parameter: nn.Parameter, modules: Sequence[nn.Module]) -> PackedLinear | None:
    """Return the packed weight that ``modules`` share; None if bitsandbytes has not packed it."""
    first = modules[0]
    states = (getattr(parameter, "quant_state", None), getattr(first, "quant_state", None))
    state = next((each for each in states if each is not None), None)
    # Exactly this class: a subclass may compute something else.
    if state is None or any(type(module).__name__ != "Linear4bit" for module in modules):
        return None
    if type(first).__module__.partition(".")[0] != "bitsandbytes" or getattr(state, "quant_type", "") not in _TYPES:
        return None
    return PackedLinear(parameter, state, tuple(modules))


_TYPES = ("nf4", "fp4")
