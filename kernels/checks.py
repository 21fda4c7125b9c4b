"""What the ops ask of their arguments, so that a wrong one raises here and not in a kernel."""

import torch
from torch import Tensor

from .payload import ALIGNMENT, PayloadLayout

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_GRID = 65535  # of an axis of a kernel's grid


def check_values(name: str, values: Tensor, rows: int, cols: int) -> int:
    """Check a flat tensor of ``rows * cols`` chunks.

    Returns:
        The number of values in a chunk.

    Raises:
        TypeError: ``values`` is not bf16, fp16 or fp32.
        ValueError: its shape does not hold the grid, or is not flat and contiguous.
    """
    check_grid(rows, cols)
    if values.dtype not in _DTYPES:
        raise TypeError(f"{name} is {values.dtype}, but can be {', '.join(map(str, _DTYPES))}")
    if values.dim() != 1 or not values.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(values.shape)} and strides {values.stride()}, but must be flat and contiguous"
        )
    if values.numel() % (rows * cols):
        raise ValueError(
            f"{name} has {values.numel()} values, which do not divide into {rows} x {cols} chunks of equal size"
        )
    return values.numel() // (rows * cols)


def check_payload(payload: Tensor, lead: str, chunks: int, numel: int, layout: PayloadLayout) -> None:
    """Check a payload of ``chunks`` rows for chunks of ``numel`` values, with a leading axis if ``lead`` names one.

    Raises:
        TypeError: ``payload`` is not uint8.
        ValueError: its shape is not the layout's, or it is not contiguous from a 16-byte boundary on.
    """
    if payload.dtype != torch.uint8:
        raise TypeError(f"payload is {payload.dtype}, but must be torch.uint8")
    row = (chunks, layout.nbytes(numel))
    if payload.dim() != len(row) + bool(lead) or payload.shape[-2:] != row or payload.shape[0] == 0:
        wanted = ", ".join([lead, *map(str, row)] if lead else map(str, row))
        raise ValueError(
            f"payload has shape {tuple(payload.shape)}, but {chunks} chunks of {numel} values with bits "
            f"{layout.bits} and block {layout.block} make ({wanted})"
        )
    if not payload.is_contiguous() or payload.storage_offset() % ALIGNMENT:
        raise ValueError(
            f"payload has strides {payload.stride()} and starts at byte {payload.storage_offset()} of its storage, "
            f"but must be contiguous and start at a multiple of {ALIGNMENT}"
        )


def check_grid(rows: int, cols: int) -> None:
    """Raise a ValueError unless both are from 1 to 65535."""
    for name, size in (("rows", rows), ("cols", cols)):
        if not 1 <= size <= _MAX_GRID:
            raise ValueError(f"{name} is {size}, but must be from 1 to {_MAX_GRID}")


def check_device(**tensors: Tensor) -> None:
    """Raise a ValueError naming the tensors unless all are on one device."""
    if len({tensor.device for tensor in tensors.values()}) > 1:
        places = " and ".join(f"{name} is on {tensor.device}" for name, tensor in tensors.items())
        raise ValueError(f"{places}, but both must be on one device")
