"""The operations as ``torch.library`` ops of the namespace ``fsdp_zpp``: Triton on CUDA, the reference on CPU.

``__init__.py`` documents them. Arguments are checked here rather than there, so that a direct call of
``torch.ops.fsdp_zpp`` is checked too, and while tracing.
"""

from types import ModuleType

import torch
from torch import Tensor

from .checks import check_device, check_grid, check_payload, check_values
from .dispatch import op
from .payload import PayloadLayout


def _backend(tensor: Tensor) -> ModuleType:
    # Imported on use: the package must not need Triton where no GPU does.
    if tensor.is_cuda:
        from . import blockwise as backend
    else:
        from . import reference as backend  # type: ignore[no-redef]
    return backend


@op("quantize")
def quantize(values: Tensor, rows: int, cols: int, bits: int, block: int) -> Tensor:
    check_values("values", values, rows, cols)
    return _backend(values).quantize(values, rows, cols, PayloadLayout(bits, block))


@quantize.register_fake
def _(values: Tensor, rows: int, cols: int, bits: int, block: int) -> Tensor:
    numel = check_values("values", values, rows, cols)
    return values.new_empty((rows * cols, PayloadLayout(bits, block).nbytes(numel)), dtype=torch.uint8)


def _check_sum(payload: Tensor, lead: str, out: Tensor, rows: int, cols: int, bits: int, block: int) -> PayloadLayout:
    layout = PayloadLayout(bits, block)
    numel = check_values("out", out, rows, cols)
    check_payload(payload, lead, rows * cols, numel, layout)
    check_device(payload=payload, out=out)
    return layout


@op("dequantize", ("out",))
def dequantize(payload: Tensor, out: Tensor, rows: int, cols: int, bits: int, block: int) -> None:
    layout = _check_sum(payload, "", out, rows, cols, bits, block)
    _backend(payload).dequantize_sum(payload.unsqueeze(0), out, rows, cols, layout, 1.0)


@dequantize.register_fake
def _(payload: Tensor, out: Tensor, rows: int, cols: int, bits: int, block: int) -> None:
    _check_sum(payload, "", out, rows, cols, bits, block)


@op("dequantize_sum", ("out",))
def dequantize_sum(payload: Tensor, out: Tensor, rows: int, cols: int, bits: int, block: int, scale: float) -> None:
    layout = _check_sum(payload, "peers", out, rows, cols, bits, block)
    _backend(payload).dequantize_sum(payload, out, rows, cols, layout, scale)


@dequantize_sum.register_fake
def _(payload: Tensor, out: Tensor, rows: int, cols: int, bits: int, block: int, scale: float) -> None:
    _check_sum(payload, "peers", out, rows, cols, bits, block)


def _check_requantize(
    payload: Tensor, numel: int, rows: int, cols: int, bits: int, block: int, out_bits: int, out_block: int
) -> tuple[PayloadLayout, PayloadLayout]:
    if numel < 0:
        raise ValueError(f"numel is {numel}, but a chunk cannot have less than 0 values")
    layout, out_layout = PayloadLayout(bits, block), PayloadLayout(out_bits, out_block)
    check_grid(rows, cols)
    check_payload(payload, "peers", rows * cols, numel, layout)
    return layout, out_layout


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
) -> Tensor:
    layouts = _check_requantize(payload, numel, rows, cols, bits, block, out_bits, out_block)
    return _backend(payload).dequantize_sum_quantize(payload, numel, rows, cols, *layouts, scale)


@dequantize_sum_quantize.register_fake
def _(
    payload: Tensor,
    numel: int,
    rows: int,
    cols: int,
    bits: int,
    block: int,
    out_bits: int,
    out_block: int,
    scale: float,
) -> Tensor:
    _, out_layout = _check_requantize(payload, numel, rows, cols, bits, block, out_bits, out_block)
    return payload.new_empty((rows * cols, out_layout.nbytes(numel)))


def _check_errors(errors: Tensor, chunks: int, numel: int, error_block: int) -> PayloadLayout | None:
    """Check the errors of ``chunks`` chunks; return their layout, None for fp32."""
    if error_block:
        layout = PayloadLayout(8, error_block)
        check_payload(errors, "", chunks, numel, layout)
        return layout
    if errors.dtype != torch.float32:
        raise TypeError(f"errors are {errors.dtype}, but must be torch.float32 with error_block 0")
    if errors.shape != (chunks * numel,) or not errors.is_contiguous():
        raise ValueError(
            f"errors have shape {tuple(errors.shape)} and strides {errors.stride()}, but {chunks} chunks of {numel} "
            f"values need ({chunks * numel},), contiguous"
        )
    return None


@op("quantize_corrected", ("errors",))
def quantize_corrected(
    values: Tensor, errors: Tensor, rows: int, cols: int, bits: int, block: int, error_block: int, beta: float
) -> Tensor:
    numel = check_values("values", values, rows, cols)
    error_layout = _check_errors(errors, rows * cols, numel, error_block)
    check_device(values=values, errors=errors)
    layout = PayloadLayout(bits, block)
    return _backend(values).quantize_corrected(values, errors, rows, cols, layout, error_layout, beta)


@quantize_corrected.register_fake
def _(
    values: Tensor, errors: Tensor, rows: int, cols: int, bits: int, block: int, error_block: int, beta: float
) -> Tensor:
    numel = check_values("values", values, rows, cols)
    _check_errors(errors, rows * cols, numel, error_block)
    return values.new_empty((rows * cols, PayloadLayout(bits, block).nbytes(numel)), dtype=torch.uint8)


@op("dequantize_sum_quantize_corrected", ("errors",))
def dequantize_sum_quantize_corrected(
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
) -> Tensor:
    rows = payload.shape[1] if payload.dim() == 3 else 1  # else the payload is refused below
    layout, out_layout = _check_requantize(payload, numel, 1, rows, bits, block, out_bits, out_block)
    error_layout = _check_errors(errors, rows, numel, error_block)
    check_device(payload=payload, errors=errors)
    return _backend(payload).dequantize_sum_quantize_corrected(
        payload, errors, numel, layout, out_layout, scale, error_layout, beta
    )


@dequantize_sum_quantize_corrected.register_fake
def _(
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
) -> Tensor:
    rows = payload.shape[1] if payload.dim() == 3 else 1
    _, out_layout = _check_requantize(payload, numel, 1, rows, bits, block, out_bits, out_block)
    _check_errors(errors, rows, numel, error_block)
    return payload.new_empty((rows, out_layout.nbytes(numel)))
