"""Checks of the ops' arguments, so that a wrong one raises here and does not reach a kernel."""

import torch
from torch import Tensor

from .payload import ALIGNMENT, PayloadLayout

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Rows and columns are the second and third axis of a kernel's grid, which CUDA limits to this many programs.
_MAX_GRID = 65535


def check_values(name: str, values: Tensor, rows: int, cols: int, flat: bool = True) -> int:
    """Check a tensor of ``rows * cols`` chunks, which need not be flat unless ``flat``.

    Returns:
        The number of values in a chunk.

    Raises:
        TypeError: If ``values`` is not bf16, fp16 or fp32.
        ValueError: If ``values`` is not contiguous, or not flat though it must be, or does not divide into the grid.
    """
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
    """Check a payload of ``chunks`` rows for chunks of ``numel`` values, with a leading axis if ``lead`` names one.

    Raises:
        TypeError: If ``payload`` is not uint8.
        ValueError: If its shape is not the layout's, the leading axis is empty, or it is not contiguous from a multiple
            of 16 bytes of its storage on.
    """
    if payload.dtype != torch.uint8:
        raise TypeError(f"payload is {payload.dtype}, but must be torch.uint8")
    row = (chunks, layout.nbytes(numel))
    # An empty leading axis is refused because kernels decode the first peer before they loop over the others.
    if payload.dim() != len(row) + bool(lead) or payload.shape[-2:] != row or payload.shape[0] == 0:
        wanted = ", ".join([lead, *map(str, row)] if lead else map(str, row))
        raise ValueError(
            f"payload has shape {tuple(payload.shape)}, but {chunks} chunks of {numel} values with bits "
            f"{layout.bits}, block {layout.block} and tail {layout.tail} make ({wanted})"
        )
    # The offset stands in for the address, which a tensor lacks while tracing; allocators align storages to more.
    if not payload.is_contiguous() or payload.storage_offset() % ALIGNMENT:
        raise ValueError(
            f"payload has strides {payload.stride()} and starts at byte {payload.storage_offset()} of its storage, "
            f"but must be contiguous and start at a multiple of {ALIGNMENT}"
        )


def check_grid(rows: int, cols: int) -> None:
    """Raise a ValueError unless ``rows`` and ``cols`` are from 1 to 65535."""
    for name, size in (("rows", rows), ("cols", cols)):
        if not 1 <= size <= _MAX_GRID:
            raise ValueError(f"{name} is {size}, but must be from 1 to {_MAX_GRID}")


def check_device(**tensors: Tensor) -> None:
    """Raise a ValueError that names the tensors unless all are on the same device."""
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
    if numel < 0:
        raise ValueError(f"numel is {numel}, but a chunk must have at least 0 values")
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


def check_delta(
    values: Tensor, base: Tensor, base_bits: int, base_block: int, bits: int, block: int, tail: int
) -> tuple[PayloadLayout, PayloadLayout, int]:
    """Check values and the base of their delta; return the layouts of base and delta and the size of a chunk."""
    layouts = PayloadLayout(base_bits, base_block, tail), PayloadLayout(bits, block, tail)
    # check_payload refuses a base without two axes; until then any count will do.
    chunks = base.shape[0] if base.dim() == 2 else 1
    numel = check_values("values", values, 1, chunks)
    check_payload(base, "", chunks, numel, layouts[0])
    check_device(values=values, base=base)
    return *layouts, numel


def check_add_delta(
    base: Tensor, delta: Tensor, numel: int, base_bits: int, base_block: int, bits: int, block: int, tail: int
) -> tuple[PayloadLayout, PayloadLayout]:
    """Check a base and the delta that is added to it; return their layouts."""
    if numel < 0:
        raise ValueError(f"numel is {numel}, but a chunk must have at least 0 values")
    layouts = PayloadLayout(base_bits, base_block, tail), PayloadLayout(bits, block, tail)
    chunks = base.shape[0] if base.dim() == 2 else 1
    check_payload(base, "", chunks, numel, layouts[0])
    check_payload(delta, "", chunks, numel, layouts[1])
    check_device(base=base, delta=delta)
    return layouts


def check_rows(payload: Tensor, out: Tensor, bits: int, block: int) -> tuple[PayloadLayout, int]:
    """Check a payload whose rows may lie apart, and the output; return the payload's layout and the size of a chunk."""
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
    # Torch may give the axis of a single row any stride, and rows without bytes have nothing to align.
    starts = (payload.storage_offset(), payload.stride(0) if payload.shape[0] > 1 else 0)
    if payload.shape[1] and (payload.stride(1) != 1 or any(start % ALIGNMENT for start in starts)):
        raise ValueError(
            f"payload has strides {payload.stride()} and starts at byte {payload.storage_offset()} of its storage, but "
            f"its rows must be contiguous and start at multiples of {ALIGNMENT}"
        )
    return layout, numel


def check_whole_blocks(numel: int, block: int) -> None:
    """Raise a ValueError unless chunks of ``numel`` values consist of whole blocks."""
    if numel % block:
        raise ValueError(f"chunks have {numel} values, but must consist of whole blocks of {block}")
