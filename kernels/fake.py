"""The operations for tracing: the shape and dtype of each result, without values."""

import torch
from torch import Tensor

from .payload import PayloadLayout


def quantize(values: Tensor, rows: int, cols: int, layout: PayloadLayout) -> Tensor:
    """See ``kernels.quantize``."""
    return values.new_empty((rows * cols, layout.nbytes(values.numel() // (rows * cols))), dtype=torch.uint8)


def dequantize_sum(payload: Tensor, out: Tensor, rows: int, cols: int, layout: PayloadLayout, scale: float) -> None:
    """See ``kernels.dequantize_sum``."""


def dequantize_sum_quantize(
    payload: Tensor,
    numel: int,
    rows: int,
    cols: int,
    layout: PayloadLayout,
    out_layout: PayloadLayout,
    scale: float,
) -> Tensor:
    """See ``kernels.dequantize_sum_quantize``."""
    return payload.new_empty((rows * cols, out_layout.nbytes(numel)))


def quantize_with_feedback(
    values: Tensor,
    errors: Tensor,
    rows: int,
    cols: int,
    layout: PayloadLayout,
    error_layout: PayloadLayout | None,
    beta: float,
) -> Tensor:
    """See ``kernels.quantize_with_feedback``."""
    return quantize(values, rows, cols, layout)


def dequantize_sum_quantize_with_feedback(
    payload: Tensor,
    errors: Tensor,
    numel: int,
    layout: PayloadLayout,
    out_layout: PayloadLayout,
    scale: float,
    error_layout: PayloadLayout | None,
    beta: float,
) -> Tensor:
    """See ``kernels.dequantize_sum_quantize_with_feedback``."""
    return payload.new_empty((payload.shape[1], out_layout.nbytes(numel)))


def quantize_delta(values: Tensor, base: Tensor, base_layout: PayloadLayout, layout: PayloadLayout) -> Tensor:
    """See ``kernels.quantize_delta``."""
    return base.new_empty((base.shape[0], layout.nbytes(values.numel() // base.shape[0])))


def add_delta(base: Tensor, delta: Tensor, numel: int, base_layout: PayloadLayout, layout: PayloadLayout) -> Tensor:
    """See ``kernels.add_delta``."""
    return torch.empty_like(base)


def dequantize_rows(payload: Tensor, out: Tensor, layout: PayloadLayout) -> None:
    """See ``kernels.dequantize_rows``."""
