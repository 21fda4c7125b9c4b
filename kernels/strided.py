"""Decoding of rows that lie apart: one chunk after another out of payloads that hold more than these chunks.

What a rank gathers of several weights together has a row for each rank with all weights' chunks side by side, so one
weight's chunks lie a row apart. To decode them where they are saves a copy. Triton on CUDA, the reference on CPU, as a
``torch.library`` op like those of ``ops.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference
from .checks import check_device, check_values
from .dispatch import op
from .payload import ALIGNMENT, PayloadLayout


def dequantize_rows(payload: Tensor, out: Tensor, bits: int, block: int) -> None:
    """Dequantize the rows of a payload one after another.

    Args:
        payload: uint8 ``[chunks, PayloadLayout(bits, block).nbytes(numel)]``. Rows may lie apart, but each is
            contiguous and starts at a multiple of 16 bytes of the storage.
        out: flat, contiguous ``[chunks * numel]`` in bf16, fp16 or fp32.
        bits: width of a code, 4 or 8.
        block: values that share a scale, a power of two from 32 to 4096.

    Raises:
        TypeError: ``payload`` or ``out`` has another dtype.
        ValueError: a shape or a stride is not as above, the two are on different devices, or another argument is out
            of its range.
    """
    _dequantize_rows(payload, out, bits, block)


@op("dequantize_rows", ("out",))
def _dequantize_rows(payload: Tensor, out: Tensor, bits: int, block: int) -> None:
    decode_checked_rows(payload, out, _check(payload, out, bits, block))


def decode_checked_rows(payload: Tensor, out: Tensor, layout: PayloadLayout) -> None:
    """:func:`dequantize_rows` for who knows its arguments to be right: to check them takes as long as the launch.

    Args:
        payload: As there.
        out: As there, or contiguous in any other shape.
        layout: Of its rows.
    """
    if payload.is_cuda:
        from .strided_blockwise import decode_rows  # on use: the package must not need Triton where no GPU does

        decode_rows(payload, out, layout)
    else:
        reference.dequantize_sum(payload.unsqueeze(0), out, payload.shape[0], 1, layout, 1.0)


@_dequantize_rows.register_fake
def _(payload: Tensor, out: Tensor, bits: int, block: int) -> None:
    _check(payload, out, bits, block)


def _check(payload: Tensor, out: Tensor, bits: int, block: int) -> PayloadLayout:
    layout = PayloadLayout(bits, block)
    if payload.dtype != torch.uint8:
        raise TypeError(f"payload is {payload.dtype}, but must be torch.uint8")
    if payload.dim() != 2:
        raise ValueError(f"payload has shape {tuple(payload.shape)}, but must have two axes")
    numel = check_values("out", out, payload.shape[0], 1)
    check_device(payload=payload, out=out)
    if payload.shape[1] != layout.nbytes(numel):
        raise ValueError(
            f"payload has rows of {payload.shape[1]} bytes, but chunks of {numel} values with bits {bits} and block "
            f"{block} take {layout.nbytes(numel)}"
        )
    starts = (payload.storage_offset(), payload.stride(0) if payload.shape[0] > 1 else 0)
    if payload.shape[1] and (payload.stride(1) != 1 or any(start % ALIGNMENT for start in starts)):
        raise ValueError(
            f"payload has strides {payload.stride()} and starts at byte {payload.storage_offset()} of its storage, but "
            f"its rows must be contiguous and start at multiples of {ALIGNMENT}"
        )
    return layout
