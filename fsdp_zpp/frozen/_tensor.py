"""A tensor that a quantized module shows as its ``weight``: it is dequantized when something computes with it.

Autograd saves the inputs of an operation for the backward. For a frozen weight it saves this tensor, not the
dequantized values, and the backward dequantizes again. So that this also holds for one expert of a stack
(``weight[3]``) and for ``weight.transpose(1, 2)``, views are recorded and applied later, to the dequantized values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only

from .functional import frozen_embedding, frozen_linear
from .weight import FrozenWeight, out_of_inference_mode


class FrozenTensor(Tensor):
    """Has a frozen weight's shape, dtype and device, but no values: operations dequantize it first. Collective.

    Autograd saves no dequantized values for the backward. See the top of this file.

    Args:
        frozen: The weight.
        views: The views to apply to its dequantized values, in order.
        like: A tensor with the shape and strides that the views result in. Default: those of the weight.

    Attributes:
        frozen: The weight.
        views: The views.
    """

    frozen: FrozenWeight
    views: tuple[View, ...]
    _is_param = True
    """Makes ``isinstance(tensor, nn.Parameter)`` true: code that ties weights accepts only parameters."""

    @staticmethod
    def __new__(cls, frozen: FrozenWeight, views: tuple[View, ...] = (), like: Tensor | None = None) -> FrozenTensor:
        """Return a tensor that stands for ``frozen``, or a view of one."""
        size, strides = (frozen.shape, None) if like is None else (like.shape, like.stride())
        tensor = Tensor._make_wrapper_subclass(cls, size, strides, dtype=frozen.dtype, device=frozen.device)
        tensor.frozen, tensor.views = frozen, views
        return tensor

    def __init__(self, frozen: FrozenWeight, views: tuple[View, ...] = (), like: Tensor | None = None) -> None:
        pass

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"FrozenTensor({self.frozen.name}, {tuple(self.shape)}, {self.dtype}, {self.frozen.codec})"

    @torch.compiler.disable
    @torch.no_grad()
    def dequantize(self) -> Tensor:
        """Return the weight as a plain tensor. Collective."""
        return self.dense(self.dtype, self.device)

    def dense(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the weight as a plain tensor, for callers that autograd does not look into. Collective."""
        first, *others = self.views or (None,)
        if isinstance(first, _Row):
            dense = self.frozen.dense_row(first.index, dtype, device)
        else:
            dense = self.frozen.dense(dtype, device)
            others = list(self.views)
        for view in others:
            assert view is not None
            dense = view(dense)
        return dense

    def requires_grad_(self, requires_grad: bool = True) -> FrozenTensor:
        """Raise if the tensor would become trainable."""
        if requires_grad:
            refuse_training(self.frozen)
        return self

    @property
    def requires_grad(self) -> bool:
        """Return False."""
        return False

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.requires_grad_(requires_grad)

    @property
    def data(self) -> FrozenTensor:
        """Return the tensor itself, since it takes no part in autograd."""
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        refuse_writing(self.frozen)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        # Caught here, where a layer is still one call: below, it is a transpose and a matmul, for which the weight
        # would be dequantized in its own dtype rather than the input's.
        if func is F.linear and isinstance(weight := _argument(1, "weight", args, kwargs), FrozenTensor):
            bias = _argument(2, "bias", args, kwargs)
            return frozen_linear(_argument(0, "input", args, kwargs), weight if weight.views else weight.frozen, bias)
        if func is F.embedding and isinstance(weight := _argument(1, "weight", args, kwargs), FrozenTensor):
            return frozen_embedding(_argument(0, "input", args, kwargs), weight)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch annotates a builtin
        cls,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if isinstance(args[0], FrozenTensor) and (view := _view(func, args[0], args[1:], kwargs)) is not None:
            return view
        if func is torch.ops.aten.set_.source_Tensor and args[0] is args[1]:
            return args[0]  # torch.nn.utils.parametrize sets a parameter to itself, which writes nothing
        # The schema tells which arguments an operation writes to, so that no list of them goes out of date.
        for value, argument in zip(args, func._schema.arguments, strict=False):
            if isinstance(value, FrozenTensor) and argument.alias_info is not None and argument.alias_info.is_write:
                refuse_writing(value.frozen)
        args, kwargs = tree_map_only(FrozenTensor, FrozenTensor.dequantize, (args, kwargs))
        return func(*args, **kwargs)


@dataclass(frozen=True)
class View:
    """A recorded operation that makes a view of its argument."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, object]

    def __call__(self, tensor: Tensor) -> Tensor:
        return self.func(tensor, *self.args, **self.kwargs)


class _Row(View):
    """Selects one matrix of a stack, which can be dequantized alone."""

    @property
    def index(self) -> int:
        return self.args[1]


_VIEWS = (
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.select.int,
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.permute.default,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.expand.default,
    torch.ops.aten.slice.Tensor,
)
"""The views that modules of experts make. Any other view dequantizes first."""


def _view(
    func: OpOverload, tensor: FrozenTensor, args: tuple[object, ...], kwargs: dict[str, object]
) -> FrozenTensor | None:
    """Return the view that ``func`` makes of ``tensor``; None if it is not among :data:`_VIEWS`."""
    if func not in _VIEWS:
        return None
    # On the meta device torch itself works out the shape and strides of the view.
    like = func(torch.empty_strided(tensor.shape, tensor.stride(), device="meta"), *args, **kwargs)
    if func in _VIEWS[:2]:  # detach and alias change nothing that must be applied later
        return FrozenTensor(tensor.frozen, tensor.views, like)
    whole_row = not tensor.views and tensor.dim() == 3 and func is torch.ops.aten.select.int and args[0] == 0
    view = (_Row if whole_row else View)(func, args, kwargs)
    return FrozenTensor(tensor.frozen, (*tensor.views, view), like)


def frozen_tensor(frozen: FrozenWeight) -> FrozenTensor:
    """Return the one tensor that stands for ``frozen``; another one once the weight has another dtype or device."""
    tensor = frozen.shown() if frozen.shown is not None else None
    if isinstance(tensor, FrozenTensor) and (tensor.dtype, tensor.device) == (frozen.dtype, frozen.device):
        return tensor
    with out_of_inference_mode():  # a later backward may save it
        tensor = FrozenTensor(frozen)
    frozen.shown = weakref.ref(tensor)  # weak: it lives as long as a module shows it
    return tensor


def _argument(position: int, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)


def refuse_writing(frozen: FrozenWeight) -> NoReturn:
    """Raise an error about a write to a frozen weight."""
    raise RuntimeError(
        f"{frozen.name} is frozen and quantized, so it can't be written to (merging an adapter into it would); call "
        "fsdp_zpp.dequantize_frozen_params(model) first, on every rank"
    )


def refuse_training(frozen: FrozenWeight) -> NoReturn:
    """Raise an error about a frozen weight that would become trainable."""
    raise RuntimeError(
        f"{frozen.name} is frozen and quantized, so it can't be trained; before you unfreeze it, call "
        "fsdp_zpp.dequantize_frozen_params(module) on the module that has it, on every rank and before sharding"
    )
