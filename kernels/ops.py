"""The operations as ``torch.library`` ops of the namespace ``fsdp_zpp``: Triton on CUDA, the reference on CPU.

``__init__.py`` documents them. Arguments are checked here rather than there, so that a direct call of
``torch.ops.fsdp_zpp`` is checked too, and while tracing.
"""

from types import ModuleType

import torch
from torch import Tensor

from .checks import check_device, check_grid, check_payload, check_values
from .payload import PayloadLayout

_DEVICES = ("cpu", "cuda")


def _backend(tensor: Tensor) -> ModuleType:
    # Imported on use: the package must not need Triton where no GPU does.
    if tensor.is_cuda:
        from . import blockwise as backend
    else:
        from . import reference as backend  # type: ignore[no-redef]
    return backend


@torch.library.custom_op("fsdp_zpp::quantize", mutates_args=(), device_types=_DEVICES)
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
    check_device(payload, out)
    return layout


@torch.library.custom_op("fsdp_zpp::dequantize", mutates_args=("out",), device_types=_DEVICES)
def dequantize(payload: Tensor, out: Tensor, rows: int, cols: int, bits: int, block: int) -> None:
    layout = _check_sum(payload, "", out, rows, cols, bits, block)
    _backend(payload).dequantize_sum(payload.unsqueeze(0), out, rows, cols, layout, 1.0)


@dequantize.register_fake
def _(payload: Tensor, out: Tensor, rows: int, cols: int, bits: int, block: int) -> None:
    _check_sum(payload, "", out, rows, cols, bits, block)


@torch.library.custom_op("fsdp_zpp::dequantize_sum", mutates_args=("out",), device_types=_DEVICES)
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


@torch.library.custom_op("fsdp_zpp::dequantize_sum_quantize", mutates_args=(), device_types=_DEVICES)
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
