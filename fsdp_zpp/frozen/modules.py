"""Modules with frozen, quantized weights: their class is a subclass of the one they had."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._tensor import FrozenTensor, frozen_tensor, refuse_training, refuse_writing
from .functional import compute_dtype, frozen_linear
from .weight import Base, FrozenWeight

_WEIGHTS = "_fsdp_zpp_frozen"
_SHOWN = "_fsdp_zpp_shown"
_REPLACED = "_fsdp_zpp_replaced"
_ATTRIBUTES = (_WEIGHTS, _SHOWN, _REPLACED)
_Self = TypeVar("_Self", bound=nn.Module)


class FrozenModule(nn.Module):
    """A module that has a :class:`FrozenWeight` in place of some of its parameters; mixed into the class it had.

    A frozen weight is neither a parameter nor a buffer, so FSDP does not gather, cast or synchronize it, and it is in
    no state dict.
    """

    @property
    def _fsdp_zpp_parts(self) -> list[Base]:
        """Return the bases of its weights, for ``traffic(model)``; see ``COMMUNICATORS`` in runtime/unit.py."""
        return [weight.base for weight in frozen_weights_of(self).values()]

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        """Return the tensor that stands for a frozen weight; it is dequantized when something computes with it."""
        # Python calls this for names that are not in the instance's __dict__, where a frozen weight never is.
        frozen = frozen_weights_of(self).get(name)
        if frozen is None or self._parameters.get(name) is not None:
            return super().__getattr__(name)
        if name in vars(self)[_REPLACED]:
            return vars(self)[_REPLACED][name]()
        # Modules that are tied show one tensor, as they did before. It lives as long as one of them, since each keeps
        # it here and the weight itself refers to it weakly.
        tensor = vars(self)[_SHOWN][name] = frozen_tensor(frozen)
        return tensor

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        frozen = frozen_weights_of(self)
        if name not in frozen:
            super().__setattr__(name, value)
        elif isinstance(value, FrozenTensor) and not value.views:
            frozen[name] = value.frozen  # ties this weight to another, as tie_weights does
        else:
            refuse_writing(frozen[name])

    def __delattr__(self, name: str) -> None:
        if name in frozen_weights_of(self):
            refuse_writing(frozen_weights_of(self)[name])
        super().__delattr__(name)

    def requires_grad_(self: _Self, requires_grad: bool = True) -> _Self:
        """Make the module's parameters trainable or not; raise for a frozen weight that would become trainable."""
        if requires_grad:
            refuse_training(next(iter(frozen_weights_of(self).values())))
        return super().requires_grad_(requires_grad)

    def _apply(self: _Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Self:
        for frozen in frozen_weights_of(self).values():
            # An empty tensor tells what fn changes. The codes must not be cast; a cast changes what they decode to.
            sample = fn(torch.empty(0, dtype=frozen.dtype, device=frozen.device))
            frozen.dtype = sample.dtype
            if sample.device != frozen.device:
                frozen.holder.move(sample.device)
        # While PEFT sees frozen weights as parameters (hugging_face/patches.py), torch's _apply would dequantize them.
        shown = {name: self._parameters.pop(name) for name in frozen_weights_of(self) if name in self._parameters}
        try:
            return super()._apply(fn, recurse)
        finally:
            self._parameters.update(shown)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Copy the module, with plain, dequantized weights, which may be trained. Collective."""
        plain: nn.Module = nn.Module.__new__(plain_class(self))
        memo[id(self)] = plain  # before its attributes are copied, which may refer back to it
        frozen_weights = frozen_weights_of(self)
        parameters = {name: value for name, value in self._parameters.items() if name not in frozen_weights}
        for name, value in {**vars(self), "_parameters": parameters}.items():
            if name not in _ATTRIBUTES:
                vars(plain)[name] = copy.deepcopy(value, memo)
        for name, frozen in frozen_weights.items():
            if id(frozen) not in memo:  # weights that are tied stay tied
                memo[id(frozen)] = nn.Parameter(frozen.dequantize(), requires_grad=False)
            plain.register_parameter(name, memo[id(frozen)])
        return plain


def freeze(module: nn.Module, name: str, weight: FrozenWeight) -> None:
    """Replace ``module``'s parameter ``name`` by ``weight``."""
    del module._parameters[name]
    if not isinstance(module, FrozenModule):
        vars(module).update({attribute: {} for attribute in _ATTRIBUTES})
        # The same object, so that parents, hooks and adapters keep their references; a subclass, so that
        # isinstance(module, nn.Linear) holds, by which PEFT and wrapping policies find it.
        module.__class__ = _frozen_class(type(module))  # type: ignore[arg-type]  # classes are hashable
    frozen_weights_of(module)[name] = weight


def unfreeze(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Give ``module`` a plain parameter back in place of a frozen weight, and with the last one its class."""
    frozen = frozen_weights_of(module)
    del frozen[name]
    vars(module)[_SHOWN].pop(name, None)
    if not frozen:
        module.__class__ = plain_class(module)
        for attribute in _ATTRIBUTES:
            del vars(module)[attribute]
    module.register_parameter(name, parameter)


@contextmanager
def replaced(module: FrozenModule, name: str, make: Callable[[], Tensor]) -> Iterator[None]:
    """Let ``module`` compute with what ``make`` returns instead of its weight ``name``, in this context."""
    vars(module)[_REPLACED][name] = make
    try:
        yield
    finally:
        del vars(module)[_REPLACED][name]


def frozen_weights_of(module: nn.Module) -> dict[str, FrozenWeight]:
    """Return the frozen weights of a :class:`FrozenModule` itself, by their names in it."""
    return vars(module).get(_WEIGHTS, {})


def frozen_sites(model: nn.Module) -> Iterator[tuple[str, FrozenModule, str, FrozenWeight]]:
    """Yield for each frozen weight below ``model``: its module's path, the module, its name there, and the weight.

    A tied weight appears once for each of its modules.
    """
    for path, module in model.named_modules():
        if isinstance(module, FrozenModule):
            for name, weight in frozen_weights_of(module).items():
                yield path, module, name, weight


def frozen_modules(model: nn.Module) -> Iterator[tuple[str, FrozenModule, FrozenWeight]]:
    """Yield what :func:`frozen_sites` yields, without names."""
    for path, module, _, weight in frozen_sites(model):
        yield path, module, weight


def plain_class(module: nn.Module) -> type:
    """Return the class that a frozen module had before; without FSDPModule, say, if fully_shard has mixed it in since.

    Raises:
        RuntimeError: If another of its parameters was parametrized since, which its class has to know.
    """
    if parametrized := list(getattr(module, "parametrizations", ())):
        raise RuntimeError(
            f"{', '.join(parametrized)} of a {type(module).__name__} with quantized weights is parametrized; call "
            "torch.nn.utils.parametrize.remove_parametrizations on it before you dequantize or copy the module"
        )
    frozen = next(cls for cls in type(module).__mro__ if cls.__bases__[:1] == (FrozenModule,))
    return frozen.__bases__[1]


@functools.cache  # modules that had one class must still have one; there are as many as classes of layers
def _frozen_class(cls: type[nn.Module]) -> type[nn.Module]:
    members: dict[str, object] = {"__module__": cls.__module__}
    if cls.forward is nn.Linear.forward:  # a subclass with a forward of its own computes with the stand-in tensor
        members["forward"] = _linear_forward
    elif not issubclass(cls, (nn.Linear, nn.Embedding)):
        # Experts compute with torch's own functions on the tensors that stand for their weights, so the boundary for
        # compilers that frozen_linear has must be drawn around the whole forward.
        members["forward"] = functools.wraps(cls.forward)(torch.compiler.disable(cls.forward))
    return type(f"Frozen{cls.__name__}", (FrozenModule, cls), members)


def _linear_forward(self: nn.Linear, x: Tensor) -> Tensor:
    """Apply the layer without a tensor that stands for its weight: making one takes CPU time in every call."""
    own = vars(self)
    if own[_REPLACED] or "weight" in own or "weight" in own["_parameters"]:
        return _replaced_linear(x, self.weight, self.bias)
    return frozen_linear(x, own[_WEIGHTS]["weight"], self.bias)


@torch.compiler.disable
def _replaced_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply ``F.linear`` with what is in place of a frozen weight, in the dtype of :func:`frozen_linear`."""
    if not isinstance(weight, FrozenTensor):
        # Made of the dequantized weight, whose dtype need not be that of the input.
        dtype = compute_dtype(x)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return F.linear(x, weight, bias)
