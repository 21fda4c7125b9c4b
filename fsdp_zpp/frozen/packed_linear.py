"""Linear layers that another library has packed, in memory: how a base takes over their weights.

They are bitsandbytes' ``Linear4bit`` and ``Linear8bitLt``, and transformers' ``FP8Linear``. Their weights are decoded
to fp32 and quantized anew, or kept as they are stored. With ``NF4``, codes and scales stay what they were if
bitsandbytes used nf4 with blocks of the same size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .stored.bitsandbytes import TABLES, FourBit, Int8Rows
from .stored.format import StoredFormat, StoredWeight, stored_in
from .stored.fp8 import CODES, Block, Fp8, block_of


@dataclass(frozen=True)
class PackedLinear:
    """A packed weight of one or more linear layers.

    Args:
        packed: The parameter.
        stored: What it holds.
        modules: The layers.
        beside: Names of the layers' attributes that describe the weight.
    """

    packed: nn.Parameter
    stored: StoredWeight
    modules: tuple[nn.Module, ...]
    beside: tuple[str, ...]

    @property
    def shape(self) -> torch.Size:
        """Return the weight's shape."""
        return self.stored.shape

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype that the weight had before, and dequantizes to."""
        return self.stored.format.dtype

    def release(self) -> None:
        """Make the layers torch's own linear layers, which compute in the dtype of their input."""
        for module in self.modules:
            module.__class__ = nn.Linear
            for name in self.beside:
                vars(module).pop(name, None)
                module._parameters.pop(name, None)


def packed_linear(parameter: nn.Parameter, modules: Sequence[nn.Module]) -> PackedLinear | None:
    """Return the packed weight that ``modules`` share; None if it is packed otherwise, or not at all."""
    first = modules[0]
    kind = type(first)
    # Exactly these classes: a subclass may compute something else.
    if any(type(module) is not kind for module in modules):
        return None
    make = _MAKERS.get((kind.__module__.partition(".")[0], kind.__name__))
    return make(parameter, tuple(modules)) if make is not None else None


def _linear_4bit(parameter: nn.Parameter, modules: tuple[nn.Module, ...]) -> PackedLinear | None:
    states = (getattr(parameter, "quant_state", None), getattr(modules[0], "quant_state", None))
    state: Any = next((each for each in states if each is not None), None)
    if state is None or state.quant_type not in TABLES:
        return None
    codes = parameter.detach()
    if getattr(state, "packing_format_for_cpu", False):  # a forward in evaluation packs them differently
        from bitsandbytes import functional  # on use, since that takes seconds

        codes, state = functional._convert_weight_packed_for_cpu_inverse(codes, state)
    parts = {"codes": codes.as_subclass(Tensor).reshape(-1), "absmax": state.absmax}
    nested, offset = 0, 0.0
    if state.nested:
        nested, offset = state.state2.blocksize, float(state.offset)
        parts |= {"nested_absmax": state.state2.absmax, "nested_table": state.state2.code}
    stored = FourBit(torch.Size(state.shape), state.dtype, {}, state.quant_type, state.blocksize, nested, offset)
    return PackedLinear(parameter, stored_in(stored, parts), modules, ("quant_state",))


def _linear_8bit(parameter: nn.Parameter, modules: tuple[nn.Module, ...]) -> PackedLinear | None:
    state: Any = getattr(modules[0], "state", None)
    scales = next((s for s in (getattr(parameter, "SCB", None), getattr(state, "SCB", None)) if s is not None), None)
    if parameter.dtype != torch.int8 or scales is None:  # not quantized yet, which it is on its way to a device
        return None
    parts = {"codes": parameter.detach().as_subclass(Tensor), "scales": scales}
    stored = Int8Rows(parameter.shape, torch.bfloat16, {})
    return PackedLinear(parameter, stored_in(stored, parts), modules, ("state", "index"))


def _fp8_linear(parameter: nn.Parameter, modules: tuple[nn.Module, ...]) -> PackedLinear | None:
    scales = getattr(modules[0], "weight_scale_inv", None)
    if parameter.dtype not in CODES or scales is None:
        return None
    size = getattr(modules[0], "block_size", None)
    stated: Block = (None, None) if size is None else (size[0], size[1])
    block = block_of(parameter.shape, tuple(scales.shape), stated, "weight_scale_inv")
    stored: StoredFormat = Fp8(parameter.shape, torch.bfloat16, {}, parameter.dtype, block)
    parts = {"codes": parameter.detach(), "scales": scales.detach()}
    beside = ("weight_scale_inv", "activation_scale", "block_size", "activation_scheme")
    return PackedLinear(parameter, stored_in(stored, parts), modules, beside)


_MAKERS = {
    ("bitsandbytes", "Linear4bit"): _linear_4bit,
    ("bitsandbytes", "Linear8bitLt"): _linear_8bit,
    ("transformers", "FP8Linear"): _fp8_linear,
}
"""For the layers of each library, by module and class, what reads them."""
