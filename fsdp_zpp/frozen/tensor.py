"""What a quantized module shows as its ``weight``: a tensor that is dequantized when something computes with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from ..torch_internals import Needed, check_needed
from .linear import frozen_embedding, frozen_linear
from .weight import FrozenWeight

_NEEDED = (
    Needed("torch.Tensor", "_make_wrapper_subclass", "a tensor that stands for another"),
    Needed("torch._C", "DisableTorchFunctionSubclass", "what such a tensor has in common with others"),
    Needed("torch._ops.OpOverload", "_schema", "telling which operations write"),
    Needed("torch.utils._pytree", "tree_map_only", "arguments of operations"),
)
check_needed("frozen base", _NEEDED)

from torch.utils._pytree import tree_map_only


class FrozenTensor(Tensor):
    """A frozen weight's shape, dtype and device; every operation on it dequantizes it first, which is collective.

    ``F.linear`` and ``F.embedding`` save nothing of what they dequantize for the backward.
    """

    frozen: FrozenWeight

    @staticmethod
    def __new__(cls, frozen: FrozenWeight) -> FrozenTensor:
        """The tensor that stands for ``frozen``."""
        tensor = Tensor._make_wrapper_subclass(cls, frozen.shape, dtype=frozen.dtype, device=frozen.device)
        tensor.frozen = frozen
        return tensor

    def __init__(self, frozen: FrozenWeight) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FrozenTensor({self.frozen.name}, {tuple(self.shape)}, {self.dtype}, {self.frozen.codec})"

    def dequantize(self) -> Tensor:
        """The weight as a plain tensor. Collective."""
        return self.frozen.dequantize()

    def requires_grad_(self, requires_grad: bool = True) -> FrozenTensor:
        """Refuses to make it trainable."""
        if requires_grad:
            refuse_training(self.frozen)
        return self

    @property
    def requires_grad(self) -> bool:
        """False."""
        return False

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.requires_grad_(requires_grad)

    @property
    def data(self) -> FrozenTensor:
        """Itself, for it takes no part in autograd."""
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        refuse_writing(self.frozen)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and isinstance(weight := _argument(1, "weight", args, kwargs), FrozenTensor):
            bias = _argument(2, "bias", args, kwargs)
            return frozen_linear(_argument(0, "input", args, kwargs), weight.frozen, bias)
        if func is F.embedding and isinstance(weight := _argument(1, "weight", args, kwargs), FrozenTensor):
            return frozen_embedding(_argument(0, "input", args, kwargs), weight.frozen)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch annotates a builtin
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:
            return FrozenTensor(args[0].frozen)
        for value, argument in zip(args, func._schema.arguments, strict=False):
            if isinstance(value, FrozenTensor) and argument.alias_info is not None and argument.alias_info.is_write:
                refuse_writing(value.frozen)
        args, kwargs = tree_map_only(FrozenTensor, FrozenTensor.dequantize, (args, kwargs))
        return func(*args, **kwargs)


def _argument(position: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)


def refuse_writing(frozen: FrozenWeight) -> NoReturn:
    """Raise for a write to a frozen weight."""
    raise RuntimeError(
        f"{frozen.name} is frozen and quantized, so it can't be written to (merging an adapter into it would); call "
        "fsdp_zpp.dequantize_frozen_params(model) first, on every rank"
    )


def refuse_training(frozen: FrozenWeight) -> NoReturn:
    """Raise for a frozen weight that is to become trainable."""
    raise RuntimeError(
        f"{frozen.name} is quantized because it was frozen, so it can't be trained; before you unfreeze it, call "
        "fsdp_zpp.dequantize_frozen_params(module) on the module that holds it, on every rank and before sharding"
    )
