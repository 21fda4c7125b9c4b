"""Dispatch of ops: which backend runs one, how its calls are prepared, and which go through torch's dispatcher.

Checking a call's arguments and working out its launch takes as long as several kernel launches, and so does dispatching
a Python op. A sharded model runs a handful of ops for each unit and step, on the same shapes in every step. So all work
that depends on the arguments but not on values is done once, and calls on plain tensors skip the dispatcher.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from operator import itemgetter
from typing import Any, Generic, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor

from .backend import Backend
from .payload import ALIGNMENT

P = ParamSpec("P")
R = TypeVar("R")

_OFF_ALIGNMENT = ALIGNMENT - 1  # the bits of an offset or an address in which it is not aligned
_MAX_PREPARED = 1024
"""Calls that an op keeps prepared. A model has tens; a program of ever new shapes must not fill the memory."""


def backend_for(tensor: Tensor) -> Backend:
    """Return the module that runs ops on ``tensor``: Triton on CUDA, the reference on CPU, fake while tracing."""
    # Backends are imported on use, so that machines without a GPU do not need Triton.
    # Fakes come first: a fake tensor reports the device that it stands for, so is_cuda may be true of it.
    if tensor.is_meta or (type(tensor) is not Tensor and hasattr(tensor, "fake_mode")):
        from .fake import FAKE

        return FAKE
    if tensor.is_cuda:
        from . import triton_backend

        return triton_backend
    from . import reference

    return reference


class Op(Generic[P, R]):
    """A ``torch.library`` op of the namespace ``fsdp_zpp``; see :func:`op`.

    A call's *signature* is its integers and what checks and kernels see of its tensors besides their values. Calls of
    the same signature share one prepared call. Floats are no part of it: they are factors, which a program may change
    in every step, and are passed to the prepared call with the tensors.
    """

    def __init__(self, prepare: Callable[P, Callable[..., R]], mutates_args: tuple[str, ...], name: str) -> None:
        functools.update_wrapper(self, prepare)
        self._prepare: Callable[..., Callable[..., R]] = prepare
        self._prepared: dict[tuple[object, ...], Callable[..., R]] = {}

        own = inspect.signature(prepare, eval_str=True)
        kinds = [parameter.annotation for parameter in own.parameters.values()]
        self._arguments, self._tensors = len(kinds), kinds.count(Tensor)
        assert kinds[: self._tensors] == [Tensor] * self._tensors, f"{name} must take its tensors first"
        defaults = (parameter.default for parameter in own.parameters.values())
        self._defaults = tuple(default for default in defaults if default is not inspect.Parameter.empty)
        self._required = self._arguments - len(self._defaults)
        self._integers = _select([place for place, kind in enumerate(kinds) if kind is int])
        self._inputs = _select([place for place, kind in enumerate(kinds) if kind is not int])

        # The op returns what the prepared call returns, and torch reads its schema off this.
        result = get_args(own.return_annotation)[-1]
        self.__signature__ = own.replace(return_annotation=None if result is type(None) else result)
        self._op = self._register(f"fsdp_zpp::{name}", mutates_args)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return self._op(*args, **kwargs)
        values: tuple[object, ...] = args
        given = len(args)
        if kwargs or given != self._arguments:
            if given == self._required and not kwargs:
                values += self._defaults
            else:
                values = self._complete(args, kwargs)
        signature = self._integers(values)
        for tensor in values[: self._tensors]:
            # Subclasses (fake tensors, DTensor) act in the dispatcher, and so does autograd: it raises in a backward.
            if type(tensor) is not Tensor or tensor.requires_grad:
                return self._op(*values)
            try:
                signature += _seen_of(tensor)
            except RuntimeError:  # it has no address
                self._prepare(*values)  # refuses a sparse tensor
                return self._op(*values)  # where functorch's tensors act
        prepared = self._prepared.get(signature) or self._prepare_for(signature, values)
        return prepared(*self._inputs(values))

    def _complete(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[object, ...]:
        """Return all arguments by position, defaults included."""
        bound = self.__signature__.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.args

    def _prepare_for(self, signature: tuple[object, ...], args: tuple[object, ...]) -> Callable[..., R]:
        prepared = self._prepare(*args)
        if len(self._prepared) >= _MAX_PREPARED:
            self._prepared.clear()  # to note which were used last would cost each call more than this ever will
        self._prepared[signature] = prepared
        return prepared

    def _register(self, name: str, mutates_args: tuple[str, ...]) -> Callable[..., R]:
        """Register the op with torch. It checks its arguments there, too, also while tracing."""

        def run(*args: Any) -> R:
            args += self._defaults[len(args) - self._required :]  # torch leaves out what equals its default
            signature = self._integers(args)
            for tensor in args[: self._tensors]:
                signature += _seen_of(tensor)
            prepared = self._prepared.get(signature) or self._prepare_for(signature, args)
            return prepared(*self._inputs(args))

        def trace(*args: object) -> R:
            args += self._defaults[len(args) - self._required :]
            # Not kept: sizes may be symbolic here.
            return self._prepare(*args)(*self._inputs(args))

        for function in (run, trace):
            function.__signature__ = self.__signature__  # type: ignore[union-attr]
        registered = torch.library.custom_op(name, run, mutates_args=mutates_args, device_types=("cpu", "cuda"))
        registered.register_fake(trace)
        return registered


def op(name: str, mutates_args: tuple[str, ...] = ()) -> Callable[[Callable[P, Callable[..., R]]], Op[P, R]]:
    """Make the op ``fsdp_zpp::<name>`` of a function that checks a call's arguments and prepares the call.

    The function takes the op's arguments, tensors first, and returns a function of the tensors and floats among them.
    Its annotations are the op's schema. Whatever it reads of a tensor must be in :func:`_seen_of`.

    Args:
        name: The op's name.
        mutates_args: The arguments that the op writes to.
    """
    return lambda prepare: Op(prepare, mutates_args, name)


def _seen_of(tensor: Tensor) -> tuple[object, ...]:
    """Return what checks and kernels see of a tensor besides its values.

    Triton compiles for the alignment of addresses. Checks use the alignment of offsets, which a tensor has even while
    it is traced.
    """
    return (
        tensor.dtype,
        tensor.shape,
        tensor.is_contiguous() or tensor.stride(),
        tensor.device,
        tensor.storage_offset() & _OFF_ALIGNMENT,
        tensor.data_ptr() & _OFF_ALIGNMENT,
    )


def _select(places: list[int]) -> Callable[[tuple[object, ...]], tuple[object, ...]]:
    """Return a function that returns the items at these places as a tuple."""
    # Of one place, itemgetter would return the item itself.
    return itemgetter(*places) if len(places) > 1 else itemgetter(slice(places[0], places[0] + 1))
