"""Modules that compute with quantized weights in place of parameters."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, TypeVar
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from fsdp_zpp.frozen.stored.floats import TABLES, FourBit
from fsdp_zpp.frozen.stored.format import StoredWeight, stored_in
from fsdp_zpp.runtime._torch_flat_parts import is_flattened

from .weight import Base, FrozenWeight, out_of_inference_mode

# ---- sharded
#
# Finds the parameters that FSDP has sharded, which can't be quantized any more.
#
# ``fully_shard`` makes a parameter a ``DTensor``. ``FullyShardedDataParallel`` flattens parameters: modules keep them
# in another shape with ``use_orig_params=True``; otherwise one flat parameter replaces them.

# The parameters of a module by name, with their shapes before sharding.
Shown = dict[str, tuple[nn.Parameter, torch.Size]]


def sharded_parameters(model: nn.Module) -> dict[nn.Module, Shown]:
    """Return the sharded parameters of each module below ``model``, tied ones under each name."""
    flattened = _flattened_parameters(model)
    return {
        module: {
            name: (parameter, parameter.shape)
            for name, parameter in module._parameters.items()
            if isinstance(parameter, DTensor) or (parameter is not None and is_flattened(parameter))
        }
        | flattened.get(module, {})
        for module in model.modules()
    }


def _flattened_parameters(model: nn.Module) -> dict[nn.Module, Shown]:
    """Return each module's parameters that FSDP1 has flattened, even if they are no longer attributes of the module."""
    parameters: dict[nn.Module, Shown] = {}
    instances: list[Any] = FullyShardedDataParallel.fsdp_modules(model)
    for instance in instances:
        if (flat := instance._flat_param) is None:
            continue
        shown = flat._params or [flat] * len(flat._param_infos)
        for info, shape, parameter in zip(flat._param_infos, flat._shapes, shown, strict=True):
            parameters.setdefault(info.module, {})[info.param_name] = parameter, shape
        for info in flat._shared_param_infos:
            first = parameters[info.prim_module][info.prim_param_name]
            parameters.setdefault(info.module, {})[info.param_name] = first
    return parameters


# ---- functional
#
# Linear layers and embeddings with a frozen weight. A linear layer dequantizes the weight in the forward and again in
# the backward, so autograd saves none of its values.

Frozen: TypeAlias = "FrozenWeight | FrozenTensor"


# Dynamo would trace into the gather, and treat its buffers and the unit in them as constants of the graph.
@torch.compiler.disable
def frozen_linear(x: Tensor, weight: Frozen, bias: Tensor | None) -> Tensor:
    """Apply ``F.linear`` to ``x`` [..., in] with a frozen weight [out, in], in autocast's dtype or that of ``x``."""
    dtype = compute_dtype(x)
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return _FrozenLinear.apply(x, bias, weight, dtype)
    return _linear(x, bias, weight, dtype)


def compute_dtype(x: Tensor) -> torch.dtype:
    # Autocast would choose the dtype inside F.linear, but the weight is dequantized, to the same dtype, before that.
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype


@torch.compiler.disable
@torch.no_grad()
def frozen_embedding(tokens: Tensor, weight: Frozen) -> Tensor:
    # Use the weight's own dtype: tokens are integers, so the input determines none.
    return F.embedding(tokens, weight.dense(weight.dtype, tokens.device))


def _linear(x: Tensor, bias: Tensor | None, weight: Frozen, dtype: torch.dtype) -> Tensor:
    return F.linear(x.to(dtype), weight.dense(dtype, x.device), None if bias is None else bias.to(dtype))


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, weight: Frozen, dtype: torch.dtype) -> Tensor:
        # Save the frozen weight itself: its dequantized values would stay in memory until the backward.
        ctx.weight, ctx.dtype, ctx.input_dtype = weight, dtype, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _linear(x, bias, weight, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (gradient,) = gradients
        for_x = for_bias = None
        if ctx.needs_input_grad[0]:
            # Collective, as in the forward: ranks must run the backward of the same layers.
            dense = ctx.weight.dense(ctx.dtype, gradient.device)
            for_x = torch.matmul(gradient.to(ctx.dtype), dense).to(ctx.input_dtype)
        if ctx.needs_input_grad[1]:
            # The input may have any number of leading dimensions; a single vector has none.
            for_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0).to(ctx.bias_dtype)
        return for_x, for_bias, None, None


# ---- tensor
#
# A tensor that a quantized module shows as its ``weight``: it is dequantized when something computes with it.
#
# Autograd saves the inputs of an operation for the backward. For a frozen weight it saves this tensor, not the
# dequantized values, and the backward dequantizes again. A view, such as one expert's ``weight[3]``, is a tensor
# without values, too: it records the operation, and applies it to the dequantized values.


class FrozenTensor(Tensor):
    """A tensor without values, with a frozen weight's shape, dtype and device; operations dequantize it. Collective.

    ``views`` are applied in order to the dequantized values; ``like`` has the shape and strides of the result.
    """

    frozen: FrozenWeight
    views: tuple[View, ...]
    # Makes isinstance(tensor, nn.Parameter) true, since code that ties weights accepts only parameters.
    _is_param = True

    @staticmethod
    def __new__(cls, frozen: FrozenWeight, views: tuple[View, ...] = (), like: Tensor | None = None) -> FrozenTensor:
        size, strides = (frozen.shape, None) if like is None else (like.shape, like.stride())
        tensor = Tensor._make_wrapper_subclass(cls, size, strides, dtype=frozen.dtype, device=frozen.device)
        tensor.frozen, tensor.views = frozen, views
        return tensor

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"FrozenTensor({self.frozen.name}, {tuple(self.shape)}, {self.dtype}, {self.frozen.codec})"

    @torch.compiler.disable
    @torch.no_grad()
    def dequantize(self) -> Tensor:
        return self.dense(self.dtype, self.device)

    def dense(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the weight as a plain tensor; call this only where autograd records nothing. Collective."""
        views = self.views
        if views and len(self.frozen.shape) == 3 and views[0].func is _SELECT and views[0].args[0] == 0:
            dense, views = self.frozen.dense_row(views[0].args[1], dtype, device), views[1:]
        else:
            dense = self.frozen.dense(dtype, device)
        for view in views:
            dense = view(dense)
        return dense

    def requires_grad_(self, requires_grad: bool = True) -> FrozenTensor:
        if requires_grad:
            refuse_training(self.frozen)
        return self

    @property
    def requires_grad(self) -> bool:
        return False

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.requires_grad_(requires_grad)

    @property
    def data(self) -> FrozenTensor:
        return self  # the tensor takes no part in autograd

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
        # Handle layers here, where F.linear is still one call. In __torch_dispatch__ it is a transpose and a matmul:
        # the matmul would dequantize the weight in its own dtype rather than in the input's.
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
        # The schema tells which arguments the operation writes to.
        for value, argument in zip(args, func._schema.arguments, strict=False):
            if isinstance(value, FrozenTensor) and argument.alias_info is not None and argument.alias_info.is_write:
                refuse_writing(value.frozen)
        args, kwargs = tree_map_only(FrozenTensor, FrozenTensor.dequantize, (args, kwargs))
        return func(*args, **kwargs)


@dataclass(frozen=True)
class View:
    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, object]

    def __call__(self, tensor: Tensor) -> Tensor:
        return self.func(tensor, *self.args, **self.kwargs)


_SELECT = torch.ops.aten.select.int
# The views that experts take of their weights. Any other view dequantizes the weight.
_VIEWS = (
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    _SELECT,
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.permute.default,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.expand.default,
    torch.ops.aten.slice.Tensor,
)


def _view(
    func: OpOverload, tensor: FrozenTensor, args: tuple[object, ...], kwargs: dict[str, object]
) -> FrozenTensor | None:
    """Return the view that ``func`` makes of ``tensor``; None if ``func`` is not among ``_VIEWS``."""
    if func not in _VIEWS:
        return None
    # On the meta device torch itself works out the shape and strides of the view.
    like = func(torch.empty_strided(tensor.shape, tensor.stride(), device="meta"), *args, **kwargs)
    if func in _VIEWS[:2]:  # detach and alias change nothing, so they are not recorded
        return FrozenTensor(tensor.frozen, tensor.views, like)
    return FrozenTensor(tensor.frozen, (*tensor.views, View(func, args, kwargs)), like)


def frozen_tensor(frozen: FrozenWeight) -> FrozenTensor:
    """Return the tensor that stands for ``frozen``: always the same one, until the weight's dtype or device changes."""
    tensor = frozen.shown() if frozen.shown is not None else None
    if isinstance(tensor, FrozenTensor) and (tensor.dtype, tensor.device) == (frozen.dtype, frozen.device):
        return tensor
    with out_of_inference_mode():  # autograd could not save an inference tensor for a later backward
        tensor = FrozenTensor(frozen)
    frozen.shown = weakref.ref(tensor)  # weak: the tensor lives as long as a module shows it
    return tensor


def _argument(position: int, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)


def refuse_writing(frozen: FrozenWeight) -> NoReturn:
    raise RuntimeError(
        f"{frozen.name} is frozen and quantized, so it can't be written to (merging an adapter into it would); call "
        "fsdp_zpp.dequantize_frozen_params(model) first, on every rank"
    )


def refuse_training(frozen: FrozenWeight) -> NoReturn:
    raise RuntimeError(
        f"{frozen.name} is frozen and quantized, so it can't be trained; before you unfreeze it, call "
        "fsdp_zpp.dequantize_frozen_params(module) on the module that has it, on every rank and before sharding"
    )


# ---- modules
#
# Modules with frozen weights. A subclass that mixes in ``FrozenModule`` replaces the class of such a module.

_WEIGHTS = "_fsdp_zpp_frozen"
_SHOWN = "_fsdp_zpp_shown"
_REPLACED = "_fsdp_zpp_replaced"
_ATTRIBUTES = (_WEIGHTS, _SHOWN, _REPLACED)
_Self = TypeVar("_Self", bound=nn.Module)


class FrozenModule(nn.Module):
    """A mixin for modules that have frozen weights (:class:`FrozenWeight`) in place of some parameters.

    A frozen weight is neither a parameter nor a buffer, so FSDP does not gather, cast or synchronize it, and it is in
    no state dict.
    """

    @property
    def _fsdp_zpp_parts(self) -> list[Base]:
        """Return the bases of the weights, for ``traffic(model)``; see ``COMMUNICATORS`` in runtime/unit.py."""
        return [weight.base for weight in frozen_weights_of(self).values()]

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        # Python calls this only for names that __dict__ lacks; it lacks those of frozen weights.
        frozen = frozen_weights_of(self).get(name)
        if frozen is None or self._parameters.get(name) is not None:
            return super().__getattr__(name)
        if name in vars(self)[_REPLACED]:
            return vars(self)[_REPLACED][name]()
        # Tied modules show one tensor, as they had one parameter. It lives as long as any of these modules: each refers
        # to it here, and the weight has only a weak reference.
        tensor = vars(self)[_SHOWN][name] = frozen_tensor(frozen)
        return tensor

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        frozen = frozen_weights_of(self)
        if name not in frozen:
            super().__setattr__(name, value)
        elif isinstance(value, FrozenTensor) and not value.views:
            frozen[name] = value.frozen  # ties the module to another weight, as transformers' tie_weights does
        else:
            refuse_writing(frozen[name])

    def __delattr__(self, name: str) -> None:
        if name in frozen_weights_of(self):
            refuse_writing(frozen_weights_of(self)[name])
        super().__delattr__(name)

    def requires_grad_(self: _Self, requires_grad: bool = True) -> _Self:
        if requires_grad:
            refuse_training(next(iter(frozen_weights_of(self).values())))
        return super().requires_grad_(requires_grad)

    def _apply(self: _Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Self:
        for frozen in frozen_weights_of(self).values():
            # An empty tensor shows the dtype and device that fn sets. A cast changes the decoded dtype, not the codes.
            sample = fn(torch.empty(0, dtype=frozen.dtype, device=frozen.device))
            frozen.dtype = sample.dtype
            if sample.device != frozen.device:
                frozen.holder.move(sample.device)
        # While frozen weights are shown to PEFT as parameters (hugging_face.py), torch's _apply would dequantize them.
        shown = {name: self._parameters.pop(name) for name in frozen_weights_of(self) if name in self._parameters}
        try:
            return super()._apply(fn, recurse)
        finally:
            self._parameters.update(shown)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Copy the module, with its weights dequantized to plain parameters, which may be unfrozen. Collective."""
        plain: nn.Module = nn.Module.__new__(plain_class(self))
        memo[id(self)] = plain  # before attributes are copied: they may refer to the module
        frozen_weights = frozen_weights_of(self)
        parameters = {name: value for name, value in self._parameters.items() if name not in frozen_weights}
        for name, value in {**vars(self), "_parameters": parameters}.items():
            if name not in _ATTRIBUTES:
                vars(plain)[name] = copy.deepcopy(value, memo)
        for name, frozen in frozen_weights.items():
            if id(frozen) not in memo:  # tied weights stay tied
                memo[id(frozen)] = nn.Parameter(frozen.dequantize(), requires_grad=False)
            plain.register_parameter(name, memo[id(frozen)])
        return plain


def freeze(module: nn.Module, name: str, weight: FrozenWeight) -> None:
    """Replace the parameter ``name`` of ``module`` by ``weight``."""
    del module._parameters[name]
    if not isinstance(module, FrozenModule):
        vars(module).update({attribute: {} for attribute in _ATTRIBUTES})
        # The module stays the same object: parents, hooks and adapters refer to it. Its new class is a subclass, since
        # PEFT and wrapping policies find layers by isinstance(module, nn.Linear).
        module.__class__ = _frozen_class(type(module))  # type: ignore[arg-type]  # classes are hashable
    frozen_weights_of(module)[name] = weight


def unfreeze(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Replace a frozen weight by a plain parameter; if no other is left, restore the module's class."""
    frozen = frozen_weights_of(module)
    del frozen[name]
    vars(module)[_SHOWN].pop(name, None)
    if not frozen:
        module.__class__ = plain_class(module)
        for attribute in _ATTRIBUTES:
            del vars(module)[attribute]
    module.register_parameter(name, parameter)


def replaced(module: FrozenModule, name: str, make: Callable[[], Tensor]) -> AbstractContextManager[object]:
    """Let ``module`` compute with the result of ``make`` in place of its weight ``name``, in this context."""
    return patch.dict(vars(module)[_REPLACED], {name: make})


def frozen_weights_of(module: nn.Module) -> dict[str, FrozenWeight]:
    """Return the frozen weights of ``module`` itself, by their names in it."""
    return vars(module).get(_WEIGHTS, {})


def frozen_sites(model: nn.Module) -> Iterator[tuple[str, FrozenModule, str, FrozenWeight]]:
    """Yield (path, module, name, weight) of each frozen weight below ``model``; tied weights once per module."""
    for path, module in model.named_modules():
        if isinstance(module, FrozenModule):
            for name, weight in frozen_weights_of(module).items():
                yield path, module, name, weight


def plain_class(module: nn.Module) -> type:
    """Return a frozen module's class without ``FrozenModule`` and without later mixins such as ``FSDPModule``."""
    if parametrized := list(getattr(module, "parametrizations", ())):  # recorded in a class that would be lost
        raise RuntimeError(
            f"{', '.join(parametrized)} of a {type(module).__name__} with quantized weights is parametrized; call "
            "torch.nn.utils.parametrize.remove_parametrizations on it before you dequantize or copy the module"
        )
    frozen = next(cls for cls in type(module).__mro__ if cls.__bases__[:1] == (FrozenModule,))
    return frozen.__bases__[1]


@functools.cache  # so that modules of one class get one frozen class; the cache stays small
def _frozen_class(cls: type[nn.Module]) -> type[nn.Module]:
    members: dict[str, object] = {"__module__": cls.__module__}
    if cls.forward is nn.Linear.forward:  # other forwards compute with a FrozenTensor
        members["forward"] = _linear_forward
    elif not issubclass(cls, (nn.Linear, nn.Embedding)):
        # Experts call torch's own functions on FrozenTensors, and Dynamo must not trace these calls. So Dynamo skips
        # their whole forward, as it skips frozen_linear.
        members["forward"] = functools.wraps(cls.forward)(torch.compiler.disable(cls.forward))
    return type(f"Frozen{cls.__name__}", (FrozenModule, cls), members)


def _linear_forward(self: nn.Linear, x: Tensor) -> Tensor:
    # Bypass FrozenTensor: going through __getattr__ and __torch_function__ takes CPU time in every call.
    own = vars(self)
    if own[_REPLACED] or "weight" in own or "weight" in own["_parameters"]:
        return _replaced_linear(x, self.weight, self.bias)
    return frozen_linear(x, own[_WEIGHTS]["weight"], self.bias)


@torch.compiler.disable
def _replaced_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply ``F.linear`` with a replacement of a frozen weight, in the dtype that :func:`frozen_linear` uses."""
    if not isinstance(weight, FrozenTensor):
        # The replacement is made from the dequantized weight, so its dtype may differ from the input's.
        dtype = compute_dtype(x)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return F.linear(x, weight, bias)


# ---- packed linear
#
# Takes over weights that bitsandbytes' ``Linear4bit`` has packed in memory.
#
# They are decoded to fp32 and quantized again, or kept as stored. Quantizing again as ``NF4`` gives the same codes and
# scales if bitsandbytes used nf4 in blocks of the same size.


def packed_linear(parameter: nn.Parameter, modules: Sequence[nn.Module]) -> StoredWeight | None:
    """Return the packed weight that ``modules`` share; None if it is plain, or packed in an unknown way."""
    # Compare the exact class, since a subclass may compute something else.
    if any((type(m).__module__.partition(".")[0], type(m).__name__) != ("bitsandbytes", "Linear4bit") for m in modules):
        return None
    states = (getattr(parameter, "quant_state", None), getattr(modules[0], "quant_state", None))
    state: Any = next((each for each in states if each is not None), None)
    if state is None or state.quant_type not in TABLES:
        return None
    codes = parameter.detach()
    if getattr(state, "packing_format_for_cpu", False):  # a forward in evaluation mode repacks the codes
        from bitsandbytes import functional  # on use, since the import takes seconds

        codes, state = functional._convert_weight_packed_for_cpu_inverse(codes, state)
    parts = {"codes": codes.as_subclass(Tensor).reshape(-1), "absmax": state.absmax}
    nested, offset = 0, 0.0
    if state.nested:
        nested, offset = state.state2.blocksize, float(state.offset)
        parts |= {"nested_absmax": state.state2.absmax, "nested_table": state.state2.code}
    stored = FourBit(torch.Size(state.shape), state.dtype, {}, state.quant_type, state.blocksize, nested, offset)
    return stored_in(stored, parts)
