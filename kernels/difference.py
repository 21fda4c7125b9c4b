"""Differences of values against a payload, and their sum with it, each in one pass, with nothing in fp32 in memory.

A sender that knows what its receivers hold sends what its values differ from that, and receivers add it to what they
hold. Triton on CUDA, the reference on CPU, as ``torch.library`` ops like those of ``ops.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_device, check_payload, check_values
from .dispatch import op
from .payload import PayloadLayout


def quantize_difference(values: Tensor, held: Tensor, held_bits: int, held_block: int, bits: int, block: int) -> Tensor:
    """Quantize what values differ from those that a payload stands for.

    Args:
        values: flat, contiguous ``[chunks * numel]`` in bf16, fp16 or fp32.
        held: uint8 ``[chunks, PayloadLayout(held_bits, held_block).nbytes(numel)]``, contiguous, starting at a multiple
            of 16 bytes of its storage.
        held_bits: width of a code of ``held``, 4 or 8.
        held_block: values of ``held`` that share a scale, a power of two from 32 to 4096.
        bits: width of a code of the result.
        block: values of the result that share a scale.

    Returns:
        The payload of ``values - held``, uint8 ``[chunks, PayloadLayout(bits, block).nbytes(numel)]``, in order.

    Raises:
        TypeError: ``values`` or ``held`` has another dtype.
        ValueError: a shape or a stride is not as above, the two are on different devices, or another argument is out of
            its range.
    """
    return _quantize_difference(values, held, held_bits, held_block, bits, block)


def add_difference(
    held: Tensor, difference: Tensor, numel: int, held_bits: int, held_block: int, bits: int, block: int
) -> Tensor:
    """Add a payload of differences to the payload that they are against.

    Args:
        held: as for ``quantize_difference``.
        difference: uint8 ``[chunks, PayloadLayout(bits, block).nbytes(numel)]``, likewise.
        numel: values in a chunk; their number does not follow from the size of a payload.
        held_bits: width of a code of ``held``, 4 or 8.
        held_block: values of ``held`` that share a scale, a power of two from 32 to 4096.
        bits: width of a code of ``difference``.
        block: values of ``difference`` that share a scale.

    Returns:
        The payload of the sum, in the shape of ``held``.

    Raises:
        TypeError: ``held`` or ``difference`` is not uint8.
        ValueError: as for ``quantize_difference``, or ``numel`` is negative.
    """
    return _add_difference(held, difference, numel, held_bits, held_block, bits, block)


def _check_difference(
    values: Tensor, held: Tensor, held_bits: int, held_block: int, bits: int, block: int
) -> tuple[PayloadLayout, PayloadLayout, int]:
    layouts = PayloadLayout(held_bits, held_block), PayloadLayout(bits, block)
    # A payload without two axes is refused below.
    chunks = held.shape[0] if held.dim() == 2 else 1
    numel = check_values("values", values, 1, chunks)
    check_payload(held, "", chunks, numel, layouts[0])
    check_device(values=values, held=held)
    return *layouts, numel


@op("quantize_difference")
def _quantize_difference(
    values: Tensor, held: Tensor, held_bits: int, held_block: int, bits: int, block: int
) -> Tensor:
    held_layout, layout, _ = _check_difference(values, held, held_bits, held_block, bits, block)
    if values.is_cuda:
        from . import difference_blockwise  # on use: the package must not need Triton where no GPU does

        return difference_blockwise.quantize_difference(values, held, held_layout, layout)
    from . import reference

    return reference.quantize_difference(values, held, held_layout, layout)


@_quantize_difference.register_fake
def _(values: Tensor, held: Tensor, held_bits: int, held_block: int, bits: int, block: int) -> Tensor:
    _, layout, numel = _check_difference(values, held, held_bits, held_block, bits, block)
    return held.new_empty((held.shape[0], layout.nbytes(numel)))


def _check_sum(
    held: Tensor, difference: Tensor, numel: int, held_bits: int, held_block: int, bits: int, block: int
) -> tuple[PayloadLayout, PayloadLayout]:
    if numel < 0:
        raise ValueError(f"numel is {numel}, but a chunk cannot have less than 0 values")
    layouts = PayloadLayout(held_bits, held_block), PayloadLayout(bits, block)
    chunks = held.shape[0] if held.dim() == 2 else 1
    check_payload(held, "", chunks, numel, layouts[0])
    check_payload(difference, "", chunks, numel, layouts[1])
    check_device(held=held, difference=difference)
    return layouts


@op("add_difference")
def _add_difference(
    held: Tensor, difference: Tensor, numel: int, held_bits: int, held_block: int, bits: int, block: int
) -> Tensor:
    layouts = _check_sum(held, difference, numel, held_bits, held_block, bits, block)
    if held.is_cuda:
        from . import difference_blockwise

        return difference_blockwise.add_difference(held, difference, numel, *layouts)
    from . import reference

    return reference.add_difference(held, difference, numel, *layouts)


@_add_difference.register_fake
def _(held: Tensor, difference: Tensor, numel: int, held_bits: int, held_block: int, bits: int, block: int) -> Tensor:
    _check_sum(held, difference, numel, held_bits, held_block, bits, block)
    return torch.empty_like(held)
