"""Blockwise quantization kernels for two-hop collectives: Triton on GPUs, PyTorch on CPU, the same bits from both.

``payload.py`` says what the bytes mean. One side of every operation is a ``rows x cols`` grid of chunks in row-major
order, the other the transposed grid: the hops of a two-hop collective leave chunks in (local, node) order where its
caller has (node, local), and a kernel that reads or writes through the transposition saves a copy.

The operations are ``torch.library`` ops, ``torch.ops.fsdp_zpp.*``, and trace under ``torch.compile``. They are not
differentiable. All math is fp32.
"""

from torch import Tensor

from . import ops
from .payload import PayloadLayout

__all__ = [
    "PayloadLayout",
    "dequantize",
    "dequantize_sum",
    "dequantize_sum_quantize",
    "dequantize_sum_quantize_corrected",
    "quantize",
    "quantize_corrected",
]


def quantize(values: Tensor, rows: int, cols: int, bits: int, block: int) -> Tensor:
    """Quantize a ``rows x cols`` grid of chunks into the rows of a payload, in transposed order.

    Args:
        values: flat, contiguous ``[rows * cols * numel]`` in bf16, fp16 or fp32; chunk (r, c) starts at
            ``(r * cols + c) * numel``.
        rows: rows of the grid of chunks, from 1 to 65535.
        cols: columns of it, likewise.
        bits: width of a code, 4 or 8.
        block: values that share a scale, a power of two from 32 to 4096.

    Returns:
        The payload, uint8 ``[rows * cols, PayloadLayout(bits, block).nbytes(numel)]``, with chunk (r, c) in row
        ``c * rows + r``. Every byte is a function of the values, padding too.

    Raises:
        TypeError: ``values`` has another dtype.
        ValueError: ``values`` is not flat and contiguous or does not divide into the grid, or another argument is out
            of its range.
    """
    return ops.quantize(values, rows, cols, bits, block)


def dequantize(payload: Tensor, out: Tensor, rows: int, cols: int, bits: int, block: int) -> None:
    """Dequantize the ``rows x cols`` grid of a payload's rows into chunks in transposed order.

    ``quantize`` over an ``a x b`` grid and ``dequantize`` over the ``b x a`` grid restore the order.

    Args:
        payload: uint8 ``[rows * cols, PayloadLayout(bits, block).nbytes(numel)]``, contiguous, starting at a multiple
            of 16 bytes of its storage.
        out: flat, contiguous ``[rows * cols * numel]`` in bf16, fp16 or fp32. Row ``r * cols + c`` of the payload is
            written to chunk ``c * rows + r``.
        rows: rows of the payload's grid, from 1 to 65535.
        cols: columns of it, likewise.
        bits: width of a code, 4 or 8.
        block: values that share a scale, a power of two from 32 to 4096.

    Raises:
        TypeError: ``payload`` or ``out`` has another dtype.
        ValueError: a shape or a stride is not as above, ``payload`` and ``out`` are on different devices, or another
            argument is out of its range.
    """
    ops.dequantize(payload, out, rows, cols, bits, block)


def dequantize_sum(payload: Tensor, out: Tensor, rows: int, cols: int, bits: int, block: int, scale: float) -> None:
    """Dequantize the payloads of several peers, sum them and scale the sum: a reduction's last step.

    Args:
        payload: uint8 ``[peers, rows * cols, nbytes]``, otherwise as for ``dequantize``.
        out: as for ``dequantize``. The sum is taken in fp32 in the order of the peers, multiplied by ``scale``, and
            cast once.
        rows: rows of each peer's grid, from 1 to 65535.
        cols: columns of it, likewise.
        bits: width of a code, 4 or 8.
        block: values that share a scale, a power of two from 32 to 4096.
        scale: factor of the sum; 1 / world makes it a mean.

    Raises:
        TypeError: ``payload`` or ``out`` has another dtype.
        ValueError: as for ``dequantize``, or there is no peer.
    """
    ops.dequantize_sum(payload, out, rows, cols, bits, block, scale)


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
    """``dequantize_sum`` into fp32 and ``quantize`` of the result, without its trip through memory.

    Args:
        payload: uint8 ``[peers, rows * cols, nbytes]``, as for ``dequantize_sum``.
        numel: values in a chunk; their number does not follow from the size of the payload.
        rows: rows of each peer's grid, from 1 to 65535.
        cols: columns of it, likewise.
        bits: width of a code of ``payload``, 4 or 8.
        block: values of ``payload`` that share a scale, a power of two from 32 to 4096.
        out_bits: width of a code of the result.
        out_block: values of the result that share a scale.
        scale: factor of the sum.

    Returns:
        The payload of the scaled sum, uint8 ``[rows * cols, PayloadLayout(out_bits, out_block).nbytes(numel)]``, with
        the sum of the peers' rows ``r * cols + c`` in row ``c * rows + r``.

    Raises:
        TypeError: ``payload`` is not uint8.
        ValueError: as for ``dequantize_sum``, or ``numel`` is negative.
    """
    return ops.dequantize_sum_quantize(payload, numel, rows, cols, bits, block, out_bits, out_block, scale)


def quantize_corrected(
    values: Tensor, errors: Tensor, rows: int, cols: int, bits: int, block: int, error_block: int, beta: float
) -> Tensor:
    """``quantize`` with error feedback, in one pass: what earlier calls left out is added, and what this one does kept.

    ``h = values + errors`` is quantized, and ``errors = beta * errors + (1 - beta) * (h - dequantized)`` (LoCo, arXiv
    2407.04480). A block in which ``h`` is not finite is sent so, and leaves its errors as they are.

    Args:
        values: as for ``quantize``.
        errors: updated in place; in the order of the payload's rows. fp32 ``[rows * cols * numel]``, or quantized
            themselves: uint8 ``[rows * cols, PayloadLayout(8, error_block).nbytes(numel)]``.
        rows: as for ``quantize``.
        cols: likewise.
        bits: likewise.
        block: likewise.
        error_block: values of the errors that share a scale; 0 if they are fp32.
        beta: weight of the old errors, from 0 to less than 1.

    Returns:
        The payload, as of ``quantize``.

    Raises:
        TypeError: ``values`` or ``errors`` has another dtype.
        ValueError: a shape or a stride is not as above, or the tensors are on different devices.
    """
    return ops.quantize_corrected(values, errors, rows, cols, bits, block, error_block, beta)


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
    """``dequantize_sum_quantize``, in order, with the error feedback of ``quantize_corrected`` on what it quantizes.

    Args:
        payload: uint8 ``[peers, chunks, nbytes]``, as for ``dequantize_sum``.
        errors: as for ``quantize_corrected``, of ``chunks`` chunks.
        numel: values in a chunk.
        bits: width of a code of ``payload``, 4 or 8.
        block: values of ``payload`` that share a scale.
        out_bits: width of a code of the result.
        out_block: values of the result that share a scale.
        scale: factor of the sum, to which the errors are added.
        error_block: values of the errors that share a scale; 0 if they are fp32.
        beta: weight of the old errors, from 0 to less than 1.

    Returns:
        uint8 ``[chunks, PayloadLayout(out_bits, out_block).nbytes(numel)]``.

    Raises:
        TypeError: ``payload`` or ``errors`` has another dtype.
        ValueError: as for ``dequantize_sum_quantize`` and ``quantize_corrected``.
    """
    return ops.dequantize_sum_quantize_corrected(
        payload, errors, numel, bits, block, out_bits, out_block, scale, error_block, beta
    )
