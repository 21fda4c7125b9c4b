"""Blockwise quantization as ``torch.library`` ops: arguments, checks, prepared calls, and the choice of a backend."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from operator import itemgetter
from typing import Any, Generic, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor

from .reference import ALIGNMENT, PayloadLayout

# ---- checks
#
# Checks of the ops' arguments, so that a wrong one raises here and does not reach a kernel.

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Rows and columns are the second and third axis of a kernel's grid. CUDA limits each to this many programs.
_MAX_GRID = 65535


def check_values(name: str, values: Tensor, rows: int, cols: int, flat: bool = True) -> int:
    """Check a tensor of ``rows * cols`` chunks, flat or, without ``flat``, of any shape; return a chunk's size."""
    check_grid(rows, cols)
    if values.dtype not in _DTYPES:
        raise TypeError(f"{name} is {values.dtype}, but can be {', '.join(map(str, _DTYPES))}")
    if (flat and values.dim() != 1) or not values.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(values.shape)} and strides {values.stride()}, "
            f"but must be {'flat and ' if flat else ''}contiguous"
        )
    if values.numel() % (rows * cols):
        raise ValueError(
            f"{name} has {values.numel()} values, which do not divide into {rows} x {cols} chunks of equal size"
        )
    return values.numel() // (rows * cols)


def check_payload(payload: Tensor, lead: str, chunks: int, numel: int, layout: PayloadLayout) -> None:
    """Check a payload of ``chunks`` rows for chunks of ``numel`` values, with a leading axis if ``lead`` names one."""
    if payload.dtype != torch.uint8:
        raise TypeError(f"payload is {payload.dtype}, but must be torch.uint8")
    if numel < 0:
        raise ValueError(f"numel is {numel}, but a chunk must have at least 0 values")
    row = (chunks, layout.nbytes(numel))
    # An empty leading axis is refused because kernels decode the first peer before they loop over the others.
    if payload.dim() != len(row) + bool(lead) or payload.shape[-2:] != row or payload.shape[0] == 0:
        wanted = ", ".join([lead, *map(str, row)] if lead else map(str, row))
        raise ValueError(
            f"payload has shape {tuple(payload.shape)}, but {chunks} chunks of {numel} values with bits "
            f"{layout.bits}, block {layout.block} and tail {layout.tail} make ({wanted})"
        )
    # While tracing, a tensor has no address, so check its offset: allocators align storages to more than ALIGNMENT.
    if not payload.is_contiguous() or payload.storage_offset() % ALIGNMENT:
        raise ValueError(
            f"payload has strides {payload.stride()} and starts at byte {payload.storage_offset()} of its storage, "
            f"but must be contiguous and start at a multiple of {ALIGNMENT}"
        )


def check_grid(rows: int, cols: int) -> None:
    for name, size in (("rows", rows), ("cols", cols)):
        if not 1 <= size <= _MAX_GRID:
            raise ValueError(f"{name} is {size}, but must be from 1 to {_MAX_GRID}")


def check_device(**tensors: Tensor) -> None:
    if len({tensor.device for tensor in tensors.values()}) > 1:
        places = " and ".join(f"{name} is on {tensor.device}" for name, tensor in tensors.items())
        raise ValueError(f"{places}, but both must be on the same device")


def check_sum(
    payload: Tensor, lead: str, out: Tensor, rows: int, cols: int, bits: int, block: int, tail: int
) -> tuple[PayloadLayout, int]:
    """Check a payload and the output of its sum; return the payload's layout and the size of a chunk."""
    layout = PayloadLayout(bits, block, tail)
    numel = check_values("out", out, rows, cols)
    check_payload(payload, lead, rows * cols, numel, layout)
    check_device(payload=payload, out=out)
    return layout, numel


def check_requantize(
    payload: Tensor, numel: int, rows: int, cols: int, bits: int, block: int, out_bits: int, out_block: int, tail: int
) -> tuple[PayloadLayout, PayloadLayout]:
    """Check payloads of several peers that are summed and quantized; return their layout and the result's."""
    layout, out_layout = PayloadLayout(bits, block, tail), PayloadLayout(out_bits, out_block, tail)
    check_grid(rows, cols)
    check_payload(payload, "peers", rows * cols, numel, layout)
    return layout, out_layout


def check_errors(errors: Tensor, chunks: int, numel: int, error_block: int) -> PayloadLayout | None:
    """Check the errors of ``chunks`` chunks; return their layout, or None if they are fp32."""
    if error_block:
        layout = PayloadLayout(8, error_block)
        check_payload(errors, "", chunks, numel, layout)
        return layout
    if errors.dtype != torch.float32:
        raise TypeError(f"errors are {errors.dtype}, but must be torch.float32 if error_block is 0")
    if errors.shape != (chunks * numel,) or not errors.is_contiguous():
        raise ValueError(
            f"errors have shape {tuple(errors.shape)} and strides {errors.stride()}, but {chunks} chunks of {numel} "
            f"values need a contiguous ({chunks * numel},)"
        )
    return None


def check_rows(payload: Tensor, out: Tensor, bits: int, block: int) -> tuple[PayloadLayout, int]:
    """Check a payload whose rows need not be adjacent, and ``out``; return the payload's layout and a chunk's size."""
    layout = PayloadLayout(bits, block)
    if payload.dtype != torch.uint8:
        raise TypeError(f"payload is {payload.dtype}, but must be torch.uint8")
    if payload.dim() != 2:
        raise ValueError(f"payload has shape {tuple(payload.shape)}, but must have two axes")
    numel = check_values("out", out, payload.shape[0], 1, flat=False)
    check_device(payload=payload, out=out)
    if payload.shape[1] != layout.nbytes(numel):
        raise ValueError(
            f"payload has rows of {payload.shape[1]} bytes, but chunks of {numel} values with bits {bits} and block "
            f"{block} take {layout.nbytes(numel)}"
        )
    # If there is only one row, torch may give its axis any stride. Rows without bytes need no alignment.
    starts = (payload.storage_offset(), payload.stride(0) if payload.shape[0] > 1 else 0)
    if payload.shape[1] and (payload.stride(1) != 1 or any(start % ALIGNMENT for start in starts)):
        raise ValueError(
            f"payload has strides {payload.stride()} and starts at byte {payload.storage_offset()} of its storage, but "
            f"its rows must be contiguous and start at multiples of {ALIGNMENT}"
        )
    return layout, numel


# ---- fake
#
# Operations for tracing, which return tensors of the right shape and dtype without values.


class Fake:
    """A backend with the functions and arguments of ``reference.py``."""

    @staticmethod
    def quantize(numel: int, rows: int, cols: int, layout: PayloadLayout, *_: object) -> Callable[..., Tensor]:
        return _payload(rows * cols, numel, layout)

    @staticmethod
    def dequantize_sum_quantize(
        peers: int, numel: int, rows: int, cols: int, layout: PayloadLayout, out_layout: PayloadLayout
    ) -> Callable[..., Tensor]:
        return _payload(rows * cols, numel, out_layout)

    @staticmethod
    def dequantize_sum_quantize_with_feedback(
        peers: int, numel: int, chunks: int, layout: PayloadLayout, out_layout: PayloadLayout, *_: object
    ) -> Callable[..., Tensor]:
        return _payload(chunks, numel, out_layout)

    @staticmethod
    def quantize_delta(
        chunks: int, numel: int, base_layout: PayloadLayout, layout: PayloadLayout, *_: object
    ) -> Callable[..., Tensor]:
        return _payload(chunks, numel, layout)

    @staticmethod
    def add_delta(chunks: int, numel: int, base_layout: PayloadLayout, layout: PayloadLayout) -> Callable[..., Tensor]:
        return _payload(chunks, numel, base_layout)

    @staticmethod
    def dequantize_sum(*_: object) -> Callable[..., None]:
        return _nothing

    quantize_with_feedback = quantize
    dequantize_rows = dequantize_nf4_rows = dequantize_sum


def _payload(chunks: int, numel: int, layout: PayloadLayout) -> Callable[..., Tensor]:
    shape = (chunks, layout.nbytes(numel))  # on the device of the call's first tensor
    return lambda tensor, *_: tensor.new_empty(shape, dtype=torch.uint8)


def _nothing(*_: Tensor | float) -> None: ...


# ---- dispatch
#
# Dispatch of ops: which backend runs an op, how calls are prepared, and which calls go through torch's dispatcher.
#
# Checking a call's arguments and preparing its launch takes as long as several kernel launches, and so does dispatching
# a Python op. A sharded model runs a handful of ops for each unit and step, on the same shapes in every step. So an op
# does once what does not depend on values, and calls on plain tensors skip the dispatcher.

P = ParamSpec("P")
R = TypeVar("R")

_OFF_ALIGNMENT = ALIGNMENT - 1  # the low bits, which are 0 in an aligned offset or address
# The most prepared calls that an op keeps. A model needs tens; without a limit, ever new shapes would fill the memory.
_MAX_PREPARED = 1024


def backend_for(tensor: Tensor) -> type[Fake]:
    """Return the backend that prepares ops on ``tensor``: Triton on CUDA, the reference on CPU, fakes while tracing.

    Each backend has a function for each op, of the same name and the same signature as in ``reference.py``.
    """
    # Backends are imported on use, so that machines without a GPU do not need Triton.
    # Fakes come first: a fake tensor reports the device that it stands for, so is_cuda may be true of it.
    if tensor.is_meta or (type(tensor) is not Tensor and hasattr(tensor, "fake_mode")):
        return Fake
    if tensor.is_cuda:
        from . import triton

        return triton  # type: ignore[return-value]  # a module with the same functions
    from . import reference

    return reference  # type: ignore[return-value]


class Op(Generic[P, R]):
    """A ``torch.library`` op of the namespace ``fsdp_zpp``; see :func:`op`.

    A call's *signature* consists of its integers and of all that checks and kernels see of its tensors besides values.
    Calls with the same signature share one prepared call. Floats are factors that may change in every step, so they are
    no part of the signature: they go to the prepared call with the tensors.
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

        # torch reads the op's schema from ``__signature__``. The op returns the result of the prepared call.
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
                bound = self.__signature__.bind(*args, **kwargs)
                bound.apply_defaults()
                values = bound.args
        signature = self._integers(values)
        for tensor in values[: self._tensors]:
            # Subclasses (fake tensors, DTensor) need the dispatcher; so does autograd, to raise in a backward.
            if type(tensor) is not Tensor or tensor.requires_grad:
                return self._op(*values)
            try:
                signature += _seen_of(tensor)
            except RuntimeError:  # the tensor has no address
                self._prepare(*values)  # raises for a sparse tensor
                return self._op(*values)  # functorch's tensors need the dispatcher
        prepared = self._prepared.get(signature) or self._prepare_for(signature, values)
        return prepared(*self._inputs(values))

    def _prepare_for(self, signature: tuple[object, ...], args: tuple[object, ...]) -> Callable[..., R]:
        prepared = self._prepare(*args)
        if len(self._prepared) >= _MAX_PREPARED:
            self._prepared.clear()  # to keep an order of last use would cost each call more
        self._prepared[signature] = prepared
        return prepared

    def _register(self, name: str, mutates_args: tuple[str, ...]) -> Callable[..., R]:
        """Register the op with torch. Calls through the dispatcher check their arguments, too, even while tracing."""

        def run(*args: Any) -> R:
            args += self._defaults[len(args) - self._required :]  # torch leaves out arguments that equal their defaults
            signature = self._integers(args)
            for tensor in args[: self._tensors]:
                signature += _seen_of(tensor)
            prepared = self._prepared.get(signature) or self._prepare_for(signature, args)
            return prepared(*self._inputs(args))

        def trace(*args: object) -> R:
            args += self._defaults[len(args) - self._required :]
            return self._prepare(*args)(*self._inputs(args))  # not cached, since sizes may be symbolic here

        for function in (run, trace):
            function.__signature__ = self.__signature__  # type: ignore[union-attr]
        registered = torch.library.custom_op(name, run, mutates_args=mutates_args, device_types=("cpu", "cuda"))
        registered.register_fake(trace)
        return registered


def op(name: str, mutates_args: tuple[str, ...] = ()) -> Callable[[Callable[P, Callable[..., R]]], Op[P, R]]:
    """Return a decorator that turns a function into the op ``fsdp_zpp::<name>``.

    The function takes the op's arguments, tensors first, checks them, and returns a prepared call of the tensors and
    floats. The function's annotations are the op's schema. It may read of tensors only what :func:`_seen_of` returns.
    """
    return lambda prepare: Op(prepare, mutates_args, name)


def _seen_of(tensor: Tensor) -> tuple[object, ...]:
    """Return all that checks and kernels see of a tensor besides its values."""
    # Triton compiles for the alignment of addresses. Checks use the alignment of offsets, known even while tracing.
    return (
        tensor.dtype,
        tensor.shape,
        tensor.is_contiguous() or tensor.stride(),
        tensor.device,
        tensor.storage_offset() & _OFF_ALIGNMENT,
        tensor.data_ptr() & _OFF_ALIGNMENT,
    )


def _select(places: list[int]) -> Callable[[tuple[object, ...]], tuple[object, ...]]:
    # With one place, itemgetter would return the item itself.
    return itemgetter(*places) if len(places) > 1 else itemgetter(slice(places[0], places[0] + 1))


# ---- ops
#
# Operations as ``torch.library`` ops of the namespace ``fsdp_zpp``: their arguments, checks and results.
#
# Each function checks the arguments of a call and returns a call that a backend has prepared. ``op`` turns it into the
# op that its docstring describes. An op prepares once for all calls that differ only in values and factors.


@op("quantize")
def quantize(values: Tensor, rows: int, cols: int, bits: int, block: int, tail: int = 0) -> Callable[[Tensor], Tensor]:
    """Quantize a ``rows x cols`` grid of chunks into the rows of a payload, in transposed order.

    Args:
        values: Flat, contiguous ``[rows * cols * numel]`` in bf16, fp16 or fp32; chunk (r, c) starts at
            ``(r * cols + c) * numel``.
        rows: Rows of the grid of chunks, from 1 to 65535.
        cols: Columns of the grid, from 1 to 65535.
        bits: Width of a code, 2, 3, 4 or 8.
        block: Number of values that share a scale, a power of two from 32 to 4096.
        tail: Number of fp32 values at the end of each row, a multiple of 4, that the caller fills in.

    Returns:
        The payload, uint8 ``[rows * cols, PayloadLayout(bits, block, tail).nbytes(numel)]``, with chunk (r, c) in row
        ``c * rows + r``. ``values`` determines every byte, padding included, except the uninitialized tail.

    Raises:
        TypeError: If ``values`` has another dtype.
        ValueError: If ``values`` is not flat and contiguous or does not divide into the grid, or another argument is
            out of range.
    """
    numel = check_values("values", values, rows, cols)
    return backend_for(values).quantize(numel, rows, cols, PayloadLayout(bits, block, tail), values.dtype)


@op("dequantize", ("out",))
def dequantize(
    payload: Tensor, out: Tensor, rows: int, cols: int, bits: int, block: int, tail: int = 0
) -> Callable[[Tensor, Tensor], None]:
    """Dequantize the ``rows x cols`` grid of a payload's rows into chunks in transposed order.

    ``quantize`` over an ``a x b`` grid followed by ``dequantize`` over the ``b x a`` grid restores the order.
    ``rows``, ``cols``, ``bits`` and ``block`` are as for ``quantize``.

    Args:
        payload: uint8 ``[rows * cols, PayloadLayout(bits, block, tail).nbytes(numel)]``, contiguous, starting at a
            multiple of 16 bytes of its storage.
        out: Flat, contiguous ``[rows * cols * numel]`` in bf16, fp16 or fp32. Row ``r * cols + c`` of the payload is
            written to chunk ``c * rows + r``.
        tail: Number of fp32 values at the end of each row, a multiple of 4, which are not read.

    Raises:
        TypeError: If ``payload`` or ``out`` has another dtype.
        ValueError: If a shape or a stride is not as above, ``payload`` and ``out`` are on different devices, or another
            argument is out of range.
    """
    layout, numel = check_sum(payload, "", out, rows, cols, bits, block, tail)
    # The sum over one peer, times 1, is exact, so one kernel serves both ops.
    one_peer = backend_for(payload).dequantize_sum(1, numel, rows, cols, layout, out.dtype)
    return lambda payload, out: one_peer(payload, out, 1.0)


@op("dequantize_sum", ("out",))
def dequantize_sum(
    payload: Tensor, out: Tensor, rows: int, cols: int, bits: int, block: int, scale: float, tail: int = 0
) -> Callable[[Tensor, Tensor, float], None]:
    """Dequantize the payloads of several peers, sum them and scale the sum: the last step of a reduction.

    Arguments that are not listed describe each peer's payload as for ``dequantize``.

    Args:
        payload: uint8 ``[peers, rows * cols, nbytes]``, otherwise as for ``dequantize``.
        out: As for ``dequantize``. The sum is taken in fp32 in the order of the peers, multiplied by ``scale``, and
            cast once.
        scale: Factor on the sum; 1 / world makes it a mean.

    Raises:
        TypeError: If ``payload`` or ``out`` has another dtype.
        ValueError: As for ``dequantize``, or if there is no peer.
    """
    layout, numel = check_sum(payload, "peers", out, rows, cols, bits, block, tail)
    return backend_for(payload).dequantize_sum(payload.shape[0], numel, rows, cols, layout, out.dtype)


@op("dequantize_sum_quantize")
def dequantize_sum_quantize(
    payload: Tensor,
    numel: int,
    rows: int,
    cols: int,
    bits: int,
    block: int,
    out_bits: int,
    out_block: int,
    scale: float,
    tail: int = 0,
) -> Callable[[Tensor, float], Tensor]:
    """Do ``dequantize_sum`` into fp32, then ``quantize``, fused so that the sums never go through memory.

    ``rows``, ``cols`` and ``scale`` are as for ``dequantize_sum``; ``bits`` and ``block`` are those of ``payload``,
    ``out_bits`` and ``out_block`` those of the result.

    Args:
        payload: uint8 ``[peers, rows * cols, nbytes]``, as for ``dequantize_sum``.
        numel: Number of values in a chunk, which the padded size of the payload does not determine.
        tail: Number of fp32 values at the end of each row of ``payload`` and of the result, a multiple of 4. The op
            does not read those of ``payload``, and the caller fills in those of the result.

    Returns:
        The payload of the scaled sum, uint8 ``[rows * cols, PayloadLayout(out_bits, out_block, tail).nbytes(numel)]``,
        with the sum of the peers' rows ``r * cols + c`` in row ``c * rows + r``.

    Raises:
        TypeError: If ``payload`` is not uint8.
        ValueError: As for ``dequantize_sum``, or if ``numel`` is negative.
    """
    layouts = check_requantize(payload, numel, rows, cols, bits, block, out_bits, out_block, tail)
    return backend_for(payload).dequantize_sum_quantize(payload.shape[0], numel, rows, cols, *layouts)


@op("quantize_with_feedback", ("errors",))
def quantize_with_feedback(
    values: Tensor,
    errors: Tensor,
    rows: int,
    cols: int,
    bits: int,
    block: int,
    error_block: int,
    beta: float,
    tail: int = 0,
) -> Callable[[Tensor, Tensor, float], Tensor]:
    """Quantize with error feedback, in one pass: add the errors of earlier calls, and update them by this call's.

    Quantizes ``h = values + errors`` and sets ``errors = beta * errors + (1 - beta) * (h - dequantized)`` (LoCo, arXiv
    2407.04480). A block in which ``h`` is not finite decodes to NaN and keeps its old errors. Other arguments and the
    result are as for ``quantize``.

    Args:
        errors: Updated in place, in the order of the payload's rows: fp32 ``[rows * cols * numel]``, or quantized,
            uint8 ``[rows * cols, PayloadLayout(8, error_block).nbytes(numel)]``, without tails.
        error_block: Number of values of the errors that share a scale; 0 if the errors are fp32.
        beta: Weight of the old errors, at least 0 and less than 1.

    Raises:
        TypeError: If ``values`` or ``errors`` has another dtype.
        ValueError: If a shape or a stride is not as above, or the tensors are on different devices.
    """
    numel = check_values("values", values, rows, cols)
    error_layout = check_errors(errors, rows * cols, numel, error_block)
    check_device(values=values, errors=errors)
    layout = PayloadLayout(bits, block, tail)
    return backend_for(values).quantize_with_feedback(numel, rows, cols, layout, error_layout, values.dtype)


@op("dequantize_sum_quantize_with_feedback", ("errors",))
def dequantize_sum_quantize_with_feedback(
    payload: Tensor,
    errors: Tensor,
    numel: int,
    bits: int,
    block: int,
    out_bits: int,
    out_block: int,
    scale: float,
    error_block: int,
    beta: float,
    tail: int = 0,
) -> Callable[[Tensor, Tensor, float, float], Tensor]:
    """Do ``dequantize_sum_quantize`` without transposition, with error feedback as in ``quantize_with_feedback``.

    The errors are added to the scaled sum. Other arguments are as for these two ops.

    Args:
        payload: uint8 ``[peers, chunks, nbytes]``, as for ``dequantize_sum``.
        errors: As for ``quantize_with_feedback``, of ``chunks`` chunks.

    Returns:
        The payload of these sums, uint8 ``[chunks, PayloadLayout(out_bits, out_block, tail).nbytes(numel)]``.

    Raises:
        TypeError: If ``payload`` or ``errors`` has another dtype.
        ValueError: As for ``dequantize_sum_quantize`` and ``quantize_with_feedback``.
    """
    chunks = payload.shape[1] if payload.dim() == 3 else 1  # check_requantize refuses any other payload
    layouts = check_requantize(payload, numel, 1, chunks, bits, block, out_bits, out_block, tail)
    error_layout = check_errors(errors, chunks, numel, error_block)
    check_device(payload=payload, errors=errors)
    backend = backend_for(payload)
    return backend.dequantize_sum_quantize_with_feedback(payload.shape[0], numel, chunks, *layouts, error_layout)


@op("quantize_delta")
def quantize_delta(
    values: Tensor, base: Tensor, base_bits: int, base_block: int, bits: int, block: int, tail: int = 0
) -> Callable[[Tensor, Tensor], Tensor]:
    """Quantize ``values`` minus the values that the payload ``base`` encodes.

    ``base_bits`` and ``base_block`` are those of ``base``, ``bits`` and ``block`` those of the result.

    Args:
        values: Flat, contiguous ``[chunks * numel]`` in bf16, fp16 or fp32.
        base: uint8 ``[chunks, PayloadLayout(base_bits, base_block, tail).nbytes(numel)]``, contiguous, starting at a
            multiple of 16 bytes of its storage.
        tail: As for ``dequantize_sum_quantize``, of ``base`` and of the result.

    Returns:
        The payload of the difference, uint8 ``[chunks, PayloadLayout(bits, block, tail).nbytes(numel)]``, in order.

    Raises:
        TypeError: If ``values`` or ``base`` has another dtype.
        ValueError: If a shape or a stride is not as above, the two are on different devices, or another argument is out
            of range.
    """
    base_layout, layout = PayloadLayout(base_bits, base_block, tail), PayloadLayout(bits, block, tail)
    # check_payload refuses a base without two axes; until then any count will do.
    chunks = base.shape[0] if base.dim() == 2 else 1
    numel = check_values("values", values, 1, chunks)
    check_payload(base, "", chunks, numel, base_layout)
    check_device(values=values, base=base)
    return backend_for(values).quantize_delta(chunks, numel, base_layout, layout, values.dtype)


@op("add_delta")
def add_delta(
    base: Tensor, delta: Tensor, numel: int, base_bits: int, base_block: int, bits: int, block: int, tail: int = 0
) -> Callable[[Tensor, Tensor], Tensor]:
    """Add the payload ``delta``, in ``bits`` and ``block``, to ``base``; return a payload in the layout of ``base``.

    Args:
        base: As for ``quantize_delta``.
        delta: uint8 ``[chunks, PayloadLayout(bits, block, tail).nbytes(numel)]``, with the alignment of ``base``.
        numel: Number of values in a chunk, which the padded size of a payload does not determine.
        tail: As for ``dequantize_sum_quantize``, of ``base``, ``delta`` and the result.

    Raises:
        TypeError: If ``base`` or ``delta`` is not uint8.
        ValueError: As for ``quantize_delta``, or if ``numel`` is negative.
    """
    base_layout, layout = PayloadLayout(base_bits, base_block, tail), PayloadLayout(bits, block, tail)
    chunks = base.shape[0] if base.dim() == 2 else 1  # as in quantize_delta
    check_payload(base, "", chunks, numel, base_layout)
    check_payload(delta, "", chunks, numel, layout)
    check_device(base=base, delta=delta)
    return backend_for(base).add_delta(chunks, numel, base_layout, layout)


@op("dequantize_rows", ("out",))
def dequantize_rows(payload: Tensor, out: Tensor, bits: int, block: int) -> Callable[[Tensor, Tensor], None]:
    """Dequantize the rows of a payload, which need not be adjacent, into adjacent chunks in the same order.

    Args:
        payload: uint8 ``[chunks, PayloadLayout(bits, block).nbytes(numel)]``. Each row is contiguous and starts at a
            multiple of 16 bytes of the storage. If rows have tails, pass a view without them.
        out: Contiguous, ``chunks * numel`` values of any shape in bf16, fp16 or fp32.
        bits: As for ``quantize``.
        block: As for ``quantize``.

    Raises:
        TypeError: If ``payload`` or ``out`` has another dtype.
        ValueError: If a shape or a stride is not as above, the two are on different devices, or another argument is
            out of range.
    """
    layout, numel = check_rows(payload, out, bits, block)
    return backend_for(payload).dequantize_rows(payload.shape[0], numel, payload.stride(0), layout, out.dtype)


@op("dequantize_nf4_rows", ("out",))
def dequantize_nf4_rows(payload: Tensor, out: Tensor, block: int) -> Callable[[Tensor, Tensor], None]:
    """Dequantize the rows of a payload of NF4 codes, as ``dequantize_rows`` does. ``reference.py`` defines the codes.

    Args:
        payload: uint8 ``[chunks, PayloadLayout(4, block).nbytes(numel)]``, otherwise as for ``dequantize_rows``.
        out: As for ``dequantize_rows``, but ``numel`` must be a multiple of ``block``.
        block: As for ``quantize``.

    Raises:
        TypeError: If ``payload`` or ``out`` has another dtype.
        ValueError: As for ``dequantize_rows``, or if chunks are not whole blocks.
    """
    layout, numel = check_rows(payload, out, 4, block)
    if numel % block:
        raise ValueError(f"chunks have {numel} values, but must consist of whole blocks of {block}")
    return backend_for(payload).dequantize_nf4_rows(payload.shape[0], numel, payload.stride(0), layout, out.dtype)
