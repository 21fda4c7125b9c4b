"""Modules whose weight is frozen and quantized: their class is a subclass of the one they had."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .linear import frozen_linear
from .tensor import FrozenTensor, refuse_training, refuse_writing
from .weight import FrozenWeight

_ATTRIBUTE = "_fsdp_zpp_frozen"
_Self = TypeVar("_Self", bound=nn.Module)


class FrozenModule(nn.Module):
    """Mixed into the class of a module whose ``weight`` is a :class:`FrozenWeight`.

    The weight is no parameter and no buffer, so no FSDP gathers, casts or synchronizes it, and no state dict has it.
    """

    @property
    def weight(self) -> FrozenTensor:
        """Stands for the weight; dequantized when something computes with it."""
        return FrozenTensor(frozen_weight_of(self))

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "weight":
            super().__setattr__(name, value)
        elif isinstance(value, FrozenTensor):
            vars(self)[_ATTRIBUTE] = value.frozen  # tying it to another
        else:
            refuse_writing(frozen_weight_of(self))

    def requires_grad_(self: _Self, requires_grad: bool = True) -> _Self:
        """Refuses to make the weight trainable."""
        if requires_grad:
            refuse_training(frozen_weight_of(self))
        return super().requires_grad_(requires_grad)

    def _apply(self: _Self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> _Self:
        frozen = frozen_weight_of(self)
        moved = fn(torch.empty(0, dtype=frozen.dtype, device=frozen.device))
        frozen.dtype = moved.dtype
        if moved.device != frozen.device:
            frozen.held.move(moved.device)
        return super()._apply(fn, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy as it was before: with a plain weight, which may be trained. Collective."""
        plain: nn.Module = nn.Module.__new__(plain_class(self))
        vars(plain).update({name: value for name, value in vars(self).items() if name != _ATTRIBUTE})
        memo[id(self)] = plain
        for name, value in list(vars(plain).items()):
            vars(plain)[name] = copy.deepcopy(value, memo)
        plain.register_parameter("weight", nn.Parameter(frozen_weight_of(self).dequantize(), requires_grad=False))
        return plain


def freeze(module: nn.Module, weight: FrozenWeight) -> None:
    """Replace ``module``'s parameter ``weight`` by ``weight``."""
    del module._parameters["weight"]
    vars(module)[_ATTRIBUTE] = weight
    module.__class__ = _frozen_class(type(module))  # type: ignore[arg-type]  # classes are hashable


def unfreeze(module: nn.Module, parameter: nn.Parameter) -> None:
    """Give ``module`` its class and a plain parameter back."""
    module.__class__ = plain_class(module)
    del vars(module)[_ATTRIBUTE]
    module.register_parameter("weight", parameter)


def frozen_weight_of(module: nn.Module) -> FrozenWeight:
    """The frozen weight of a :class:`FrozenModule`."""
    return vars(module)[_ATTRIBUTE]


def frozen_modules(model: nn.Module) -> Iterator[tuple[str, FrozenModule, FrozenWeight]]:
    """Paths, modules and frozen weights below ``model``; a tied weight comes with each of its modules."""
    for path, module in model.named_modules():
        if isinstance(module, FrozenModule):
            yield path, module, frozen_weight_of(module)


def plain_class(module: nn.Module) -> type:
    """The class that a frozen module had, without what others have mixed in since."""
    frozen = next(cls for cls in type(module).__mro__ if cls.__bases__[:1] == (FrozenModule,))
    return frozen.__bases__[1]


@functools.cache
def _frozen_class(cls: type[nn.Module]) -> type[nn.Module]:
    members: dict[str, Any] = {"__module__": cls.__module__}
    if cls.forward is nn.Linear.forward:
        members["forward"] = _linear_forward
    return type(f"Frozen{cls.__name__}", (FrozenModule, cls), members)


def _linear_forward(self: nn.Linear, x: Tensor) -> Tensor:
    """What nn.Linear's comes to, without a tensor that stands for the weight."""
    return frozen_linear(x, frozen_weight_of(self), self.bias)
