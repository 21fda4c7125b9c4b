"""Operations as ``torch.library`` ops of the namespace ``fsdp_zpp``: their arguments, checks and results.

Each function checks the arguments of a call and returns the call as a backend prepares it. ``op`` turns the function
into the operation that its docstring describes, which prepares once for all calls that differ in values and factors
alone. All backends have the same functions; ``dispatch.py`` chooses one.
"""

from collections.abc import Callable

from torch import Tensor

from . import checks
from .dispatch import backend_for, op
from .payload import PayloadLayout


@op("quantize")
def quantize(values: Tensor, rows: int, cols: int, bits: int, block: int, tail: int = 0) -> Callable[[Tensor], Tensor]:
    """Quantize a ``rows x cols`` grid of chunks into the rows of a payload, in transposed order.

    Args:
        values: Flat, contiguous ``[rows * cols * numel]`` in bf16, fp16 or fp32; chunk (r, c) starts at
            ``(r * cols + c) * numel``.
        rows: Rows of the grid of chunks, from 1 to 65535.
        cols: Columns of the grid, from 1 to 65535.
        bits: Width of a code, 4 or 8.
        block: Number of values that share a scale, a power of two from 32 to 4096.
        tail: Number of fp32 values at the end of each row, a multiple of 4, that the caller fills in.

    Returns:
        The payload, uint8 ``[rows * cols, PayloadLayout(bits, block, tail).nbytes(numel)]``, with chunk (r, c) in row
        ``c * rows + r``. The values determine every byte, padding included, but the tail is uninitialized.

    Raises:
        TypeError: If ``values`` has another dtype.
        ValueError: If ``values`` is not flat and contiguous or does not divide into the grid, or another argument is
            out of range.
    """
    numel = checks.check_values("values", values, rows, cols)
    return backend_for(values).quantize(numel, rows, cols, PayloadLayout(bits, block, tail), values.dtype)


@op("dequantize", ("out",))
def dequantize(
    payload: Tensor, out: Tensor, rows: int, cols: int, bits: int, block: int, tail: int = 0
) -> Callable[[Tensor, Tensor], None]:
    """Dequantize the ``rows x cols`` grid of a payload's rows into chunks in transposed order.

    ``quantize`` over an ``a x b`` grid followed by ``dequantize`` over the ``b x a`` grid restores the order.

    Args:
        payload: uint8 ``[rows * cols, PayloadLayout(bits, block, tail).nbytes(numel)]``, contiguous, starting at a
            multiple of 16 bytes of its storage.
        out: Flat, contiguous ``[rows * cols * numel]`` in bf16, fp16 or fp32. Row ``r * cols + c`` of the payload is
            written to chunk ``c * rows + r``.
        rows: Rows of the payload's grid, from 1 to 65535.
        cols: Columns of the grid, from 1 to 65535.
        bits: Width of a code, 4 or 8.
        block: Number of values that share a scale, a power of two from 32 to 4096.
        tail: Number of fp32 values at the end of each row, a multiple of 4, which are not read.

    Raises:
        TypeError: If ``payload`` or ``out`` has another dtype.
        ValueError: If a shape or a stride is not as above, ``payload`` and ``out`` are on different devices, or another
            argument is out of range.
    """
    layout, numel = checks.check_sum(payload, "", out, rows, cols, bits, block, tail)
    # The sum over one peer, times 1, is exact, so that one kernel serves both ops.
    one_peer = backend_for(payload).dequantize_sum(1, numel, rows, cols, layout, out.dtype)
    return lambda payload, out: one_peer(payload, out, 1.0)


@op("dequantize_sum", ("out",))
def dequantize_sum(
    payload: Tensor, out: Tensor, rows: int, cols: int, bits: int, block: int, scale: float, tail: int = 0
) -> Callable[[Tensor, Tensor, float], None]:
    """Dequantize the payloads of several peers, sum them and scale the sum: the last step of a reduction.

    Args:
        payload: uint8 ``[peers, rows * cols, nbytes]``, otherwise as for ``dequantize``.
        out: As for ``dequantize``. The sum is taken in fp32 in the order of the peers, multiplied by ``scale``, and
            cast once.
        rows: Rows of each peer's grid, from 1 to 65535.
        cols: Columns of the grid, from 1 to 65535.
        bits: Width of a code, 4 or 8.
        block: Number of values that share a scale, a power of two from 32 to 4096.
        scale: Factor on the sum; 1 / world makes it a mean.
        tail: As for ``dequantize``.

    Raises:
        TypeError: If ``payload`` or ``out`` has another dtype.
        ValueError: As for ``dequantize``, or if there is no peer.
    """
    layout, numel = checks.check_sum(payload, "peers", out, rows, cols, bits, block, tail)
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

    Args:
        payload: uint8 ``[peers, rows * cols, nbytes]``, as for ``dequantize_sum``.
        numel: Number of values in a chunk. The padded size of the payload does not tell it.
        rows: Rows of each peer's grid, from 1 to 65535.
        cols: Columns of the grid, from 1 to 65535.
        bits: Width of a code of ``payload``, 4 or 8.
        block: Number of values of ``payload`` that share a scale, a power of two from 32 to 4096.
        out_bits: Width of a code of the result.
        out_block: Number of values of the result that share a scale.
        scale: Factor on the sum.
        tail: Number of fp32 values at the end of each row of ``payload`` and of the result, a multiple of 4. The
            former are not read, the latter are for the caller to fill in.

    Returns:
        The payload of the scaled sum, uint8 ``[rows * cols, PayloadLayout(out_bits, out_block, tail).nbytes(numel)]``,
        with the sum of the peers' rows ``r * cols + c`` in row ``c * rows + r``.

    Raises:
        TypeError: If ``payload`` is not uint8.
        ValueError: As for ``dequantize_sum``, or if ``numel`` is negative.
    """
    layouts = checks.check_requantize(payload, numel, rows, cols, bits, block, out_bits, out_block, tail)
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
    2407.04480). A block in which ``h`` is not finite is encoded as such and keeps its old errors.

    Args:
        values: As for ``quantize``.
        errors: Updated in place, in the order of the payload's rows: fp32 ``[rows * cols * numel]``, or quantized,
            uint8 ``[rows * cols, PayloadLayout(8, error_block).nbytes(numel)]``, without tails.
        rows: As for ``quantize``.
        cols: As for ``quantize``.
        bits: As for ``quantize``.
        block: As for ``quantize``.
        error_block: Number of values of the errors that share a scale; 0 if the errors are fp32.
        beta: Weight of the old errors, at least 0 and less than 1.
        tail: As for ``quantize``.

    Returns:
        The payload, as from ``quantize``.

    Raises:
        TypeError: If ``values`` or ``errors`` has another dtype.
        ValueError: If a shape or a stride is not as above, or the tensors are on different devices.
    """
    numel = checks.check_values("values", values, rows, cols)
    error_layout = checks.check_errors(errors, rows * cols, numel, error_block)
    checks.check_device(values=values, errors=errors)
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
    """Do ``dequantize_sum_quantize`` in the same order, with error feedback as in ``quantize_with_feedback``.

    Args:
        payload: uint8 ``[peers, chunks, nbytes]``, as for ``dequantize_sum``.
        errors: As for ``quantize_with_feedback``, of ``chunks`` chunks.
        numel: Number of values in a chunk.
        bits: Width of a code of ``payload``, 4 or 8.
        block: Number of values of ``payload`` that share a scale.
        out_bits: Width of a code of the result.
        out_block: Number of values of the result that share a scale.
        scale: Factor on the sum. The errors are added to the product.
        error_block: Number of values of the errors that share a scale; 0 if the errors are fp32.
        beta: Weight of the old errors, at least 0 and less than 1.
        tail: As for ``dequantize_sum_quantize``.

    Returns:
        The payload of the corrected sums, uint8 ``[chunks, PayloadLayout(out_bits, out_block, tail).nbytes(numel)]``.

    Raises:
        TypeError: If ``payload`` or ``errors`` has another dtype.
        ValueError: As for ``dequantize_sum_quantize`` and ``quantize_with_feedback``.
    """
    chunks = payload.shape[1] if payload.dim() == 3 else 1  # check_requantize refuses any other payload
    layouts = checks.check_requantize(payload, numel, 1, chunks, bits, block, out_bits, out_block, tail)
    error_layout = checks.check_errors(errors, chunks, numel, error_block)
    checks.check_device(payload=payload, errors=errors)
    backend = backend_for(payload)
    return backend.dequantize_sum_quantize_with_feedback(payload.shape[0], numel, chunks, *layouts, error_layout)


@op("quantize_delta")
def quantize_delta(
    values: Tensor, base: Tensor, base_bits: int, base_block: int, bits: int, block: int, tail: int = 0
) -> Callable[[Tensor, Tensor], Tensor]:
    """Quantize the difference between values and those that a payload encodes.

    Args:
        values: Flat, contiguous ``[chunks * numel]`` in bf16, fp16 or fp32.
        base: uint8 ``[chunks, PayloadLayout(base_bits, base_block, tail).nbytes(numel)]``, contiguous, starting at a
            multiple of 16 bytes of its storage.
        base_bits: Width of a code of ``base``, 4 or 8.
        base_block: Number of values of ``base`` that share a scale, a power of two from 32 to 4096.
        bits: Width of a code of the result.
        block: Number of values of the result that share a scale.
        tail: As for ``dequantize_sum_quantize``, of ``base`` and of the result.

    Returns:
        The payload of ``values - base``, uint8 ``[chunks, PayloadLayout(bits, block, tail).nbytes(numel)]``, in order.

    Raises:
        TypeError: If ``values`` or ``base`` has another dtype.
        ValueError: If a shape or a stride is not as above, the two are on different devices, or another argument is out
            of range.
    """
    base_layout, layout, numel = checks.check_delta(values, base, base_bits, base_block, bits, block, tail)
    return backend_for(values).quantize_delta(base.shape[0], numel, base_layout, layout, values.dtype)


@op("add_delta")
def add_delta(
    base: Tensor, delta: Tensor, numel: int, base_bits: int, base_block: int, bits: int, block: int, tail: int = 0
) -> Callable[[Tensor, Tensor], Tensor]:
    """Add a payload of deltas to the payload of their base.

    Args:
        base: As for ``quantize_delta``.
        delta: uint8 ``[chunks, PayloadLayout(bits, block, tail).nbytes(numel)]``, with the alignment of ``base``.
        numel: Number of values in a chunk. The padded size of a payload does not tell it.
        base_bits: Width of a code of ``base``, 4 or 8.
        base_block: Number of values of ``base`` that share a scale, a power of two from 32 to 4096.
        bits: Width of a code of ``delta``.
        block: Number of values of ``delta`` that share a scale.
        tail: As for ``dequantize_sum_quantize``, of ``base``, ``delta`` and the result.

    Returns:
        The payload of the sum, encoded as ``base`` is and of its shape.

    Raises:
        TypeError: If ``base`` or ``delta`` is not uint8.
        ValueError: As for ``quantize_delta``, or if ``numel`` is negative.
    """
    layouts = checks.check_add_delta(base, delta, numel, base_bits, base_block, bits, block, tail)
    return backend_for(base).add_delta(base.shape[0], numel, *layouts)


@op("dequantize_rows", ("out",))
def dequantize_rows(payload: Tensor, out: Tensor, bits: int, block: int) -> Callable[[Tensor, Tensor], None]:
    """Dequantize the rows of a payload, which may lie apart, into adjacent chunks in the same order.

    Args:
        payload: uint8 ``[chunks, PayloadLayout(bits, block).nbytes(numel)]``. Rows may lie apart, but each is
            contiguous and starts at a multiple of 16 bytes of the storage: of rows with a tail, give what precedes it.
        out: Contiguous, ``chunks * numel`` values of any shape in bf16, fp16 or fp32.
        bits: Width of a code, 4 or 8.
        block: Number of values that share a scale, a power of two from 32 to 4096.

    Raises:
        TypeError: If ``payload`` or ``out`` has another dtype.
        ValueError: If a shape or a stride is not as above, the two are on different devices, or another argument is
            out of range.
    """
    layout, numel = checks.check_rows(payload, out, bits, block)
    return backend_for(payload).dequantize_rows(payload.shape[0], numel, payload.stride(0), layout, out.dtype)


@op("dequantize_nf4_rows", ("out",))
def dequantize_nf4_rows(payload: Tensor, out: Tensor, block: int) -> Callable[[Tensor, Tensor], None]:
    """Dequantize the rows of a payload of NF4 codes, which may lie apart, into adjacent chunks in the same order.

    Args:
        payload: uint8 ``[chunks, PayloadLayout(4, block).nbytes(numel)]``, otherwise as for ``dequantize_rows``.
            ``nf4.py`` says what the codes mean.
        out: As for ``dequantize_rows``, but ``numel`` must be a multiple of ``block``.
        block: Number of values that share a scale, a power of two from 32 to 4096.

    Raises:
        TypeError: If ``payload`` or ``out`` has another dtype.
        ValueError: As for ``dequantize_rows``, or if chunks are not whole blocks.
    """
    layout, numel = checks.check_rows(payload, out, 4, block)
    checks.check_whole_blocks(numel, block)
    return backend_for(payload).dequantize_nf4_rows(payload.shape[0], numel, payload.stride(0), layout, out.dtype)
