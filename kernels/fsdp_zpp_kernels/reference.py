"""Operations in plain PyTorch, on any device. They run on CPUs, and the Triton kernels equal them bit for bit.

The functions rely on the checks of ``_ops.py`` and prepare a call: they take what its repetitions have in common, and
return a function of the tensors and factors. Each has a twin of the same name and signature in ``triton_backend`` and
one without values in ``fake.py``.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .nf4 import levels_on
from .payload import MIN_SCALE, SCALE_MASK, SCALE_RAISE, PayloadLayout


def quantize(numel: int, rows: int, cols: int, layout: PayloadLayout, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """See ``fsdp_zpp_kernels.quantize``."""
    return lambda values: _encode(values.view(rows * cols, numel), rows, cols, layout)


def dequantize_sum(
    peers: int, numel: int, rows: int, cols: int, layout: PayloadLayout, dtype: torch.dtype
) -> Callable[[Tensor, Tensor, float], None]:
    """See ``fsdp_zpp_kernels.dequantize_sum``."""

    def call(payload: Tensor, out: Tensor, scale: float) -> None:
        total = _sum_peers(payload.view(peers, rows * cols, -1), numel, layout).mul_(scale)
        out.view(cols, rows, numel).copy_(total.view(rows, cols, numel).transpose(0, 1))

    return call


def dequantize_sum_quantize(
    peers: int, numel: int, rows: int, cols: int, layout: PayloadLayout, out_layout: PayloadLayout
) -> Callable[[Tensor, float], Tensor]:
    """See ``fsdp_zpp_kernels.dequantize_sum_quantize``."""

    def call(payload: Tensor, scale: float) -> Tensor:
        return _encode(_sum_peers(payload, numel, layout).mul_(scale), rows, cols, out_layout)

    return call


def quantize_with_feedback(
    numel: int, rows: int, cols: int, layout: PayloadLayout, error_layout: PayloadLayout | None, dtype: torch.dtype
) -> Callable[[Tensor, Tensor, float], Tensor]:
    """See ``fsdp_zpp_kernels.quantize_with_feedback``."""

    def call(values: Tensor, errors: Tensor, beta: float) -> Tensor:
        in_order = values.view(rows, cols, numel).transpose(0, 1).flatten(0, 1).float()
        return _encode_with_feedback(in_order, errors, layout, error_layout, beta)

    return call


def dequantize_sum_quantize_with_feedback(
    peers: int,
    numel: int,
    chunks: int,
    layout: PayloadLayout,
    out_layout: PayloadLayout,
    error_layout: PayloadLayout | None,
) -> Callable[[Tensor, Tensor, float, float], Tensor]:
    """See ``fsdp_zpp_kernels.dequantize_sum_quantize_with_feedback``."""

    def call(payload: Tensor, errors: Tensor, scale: float, beta: float) -> Tensor:
        sums = _sum_peers(payload, numel, layout).mul_(scale)
        return _encode_with_feedback(sums, errors, out_layout, error_layout, beta)

    return call


def quantize_delta(
    chunks: int, numel: int, base_layout: PayloadLayout, layout: PayloadLayout, dtype: torch.dtype
) -> Callable[[Tensor, Tensor], Tensor]:
    """See ``fsdp_zpp_kernels.quantize_delta``."""

    def call(values: Tensor, base: Tensor) -> Tensor:
        delta = values.view(chunks, numel).float() - _decode(base, numel, base_layout)
        return _encode(delta, 1, chunks, layout)

    return call


def add_delta(
    chunks: int, numel: int, base_layout: PayloadLayout, layout: PayloadLayout
) -> Callable[[Tensor, Tensor], Tensor]:
    """See ``fsdp_zpp_kernels.add_delta``."""

    def call(base: Tensor, delta: Tensor) -> Tensor:
        values = _decode(base, numel, base_layout) + _decode(delta, numel, layout)
        return _encode(values, 1, chunks, base_layout)

    return call


def dequantize_rows(
    chunks: int, numel: int, stride: int, layout: PayloadLayout, dtype: torch.dtype
) -> Callable[[Tensor, Tensor], None]:
    """See ``fsdp_zpp_kernels.dequantize_rows``."""
    in_order = dequantize_sum(1, numel, chunks, 1, layout, dtype)
    return lambda payload, out: in_order(payload, out, 1.0)


def dequantize_nf4_rows(
    chunks: int, numel: int, stride: int, layout: PayloadLayout, dtype: torch.dtype
) -> Callable[[Tensor, Tensor], None]:
    """See ``fsdp_zpp_kernels.dequantize_nf4_rows``."""

    def call(payload: Tensor, out: Tensor) -> None:
        if numel == 0:  # torch views no rows without bytes as floats
            return
        levels = levels_on(payload.device)
        # Byte by byte, of whose two values the first is the high nibble: half as many look-ups as there are codes.
        pairs = torch.cartesian_prod(levels, levels)
        values = torch.nn.functional.embedding(layout.codes(payload, numel).int(), pairs)
        blocks = (chunks, layout.blocks(numel), layout.block)
        out.view(blocks).copy_(values.view(blocks).mul_(layout.scales(payload, numel).unsqueeze(-1)))

    return call


def _encode_with_feedback(
    values: Tensor, errors: Tensor, layout: PayloadLayout, error_layout: PayloadLayout | None, beta: float
) -> Tensor:
    """Quantize fp32 ``[n, numel]`` values plus errors into payload rows, and update the errors in place."""
    n, numel = values.shape
    old = errors.view(n, numel) if error_layout is None else _decode(errors, numel, error_layout)
    corrected = values + old
    payload = _encode(corrected, 1, n, layout)
    sent = _decode(payload, numel, layout)
    # A block that is not finite decodes to NaN as a whole. Its errors stay: NaN in them would never leave again.
    new = torch.where(sent.isnan(), old, old * beta + (corrected - sent) * (1 - beta))
    errors.copy_(new.view_as(errors) if error_layout is None else _encode(new, 1, n, error_layout))
    return payload


def _encode(values: Tensor, rows: int, cols: int, layout: PayloadLayout) -> Tensor:
    """Quantize ``[rows * cols, numel]`` values into payload rows, chunk (r, c) to row ``c * rows + r``."""
    numel = values.shape[1]
    codes, scales = _quantize_blocks(_blocks(values, layout.block), layout.qmax)
    packed = codes.flatten(1).view(torch.uint8)
    if layout.bits == 4:
        # The mask clears the sign extension of the low code; the shift drops that of the high one.
        packed = (packed[:, 0::2] & 15) | (packed[:, 1::2] << 4)

    # Zeros, not empty: ranks compare payloads byte by byte, padding included.
    payload = values.new_zeros((rows * cols, layout.nbytes(numel)), dtype=torch.uint8)
    chunks = payload.view(cols, rows, payload.shape[1]).transpose(0, 1)
    end, start = layout.codes_nbytes(numel), layout.scales_offset(numel)
    chunks[..., :end].copy_(packed[:, :end].unflatten(0, (rows, cols)))
    scale_bytes = scales.view(torch.uint8)
    chunks[..., start : start + scale_bytes.shape[1]].copy_(scale_bytes.unflatten(0, (rows, cols)))
    return payload


def _blocks(values: Tensor, block: int) -> Tensor:
    """View ``[n, numel]`` as fp32 ``[n, blocks, block]``, copying only to convert or to complete the last block."""
    numel = values.shape[1]
    missing = -numel % block
    if missing:
        padded = values.new_empty((values.shape[0], numel + missing), dtype=torch.float32)
        padded[:, :numel] = values
        padded[:, numel:] = 0  # zeros leave the maximum of the last block alone
        values = padded
    return values.float().view(len(values), (numel + missing) // block, block)


def _quantize_blocks(blocks: Tensor, qmax: int) -> tuple[Tensor, Tensor]:
    """Quantize fp32 ``[n, blocks, block]`` to int8 codes of that shape and fp32 scales ``[n, blocks]``."""
    absmax = blocks.abs().amax(-1)
    finite = absmax.isfinite()
    live = finite & (absmax > 0)
    # An fp32 tensor, as in the kernels: a Python number is fp64, and torch decides where it is rounded.
    reciprocal = torch.full_like(absmax, (1 + SCALE_RAISE) / qmax)
    # The mask cuts mantissa bits, so it rounds towards 0, as [Note: Exact products] in payload.py relies on.
    scales = ((absmax * reciprocal).clamp_min_(MIN_SCALE).view(torch.int32) & SCALE_MASK).view(torch.float32)
    inverse = torch.where(live, 1 / scales, 0)
    # round() takes half to even, as the kernels do. A live block has finite codes here and a zero block has zeros.
    codes = (blocks * inverse.unsqueeze(-1)).round_()
    if not finite.all():
        # A non-finite block may hold NaN, whose conversion to int8 is undefined.
        codes.masked_fill_(~finite.unsqueeze(-1), 0)
    scales = scales.masked_fill_(absmax == 0, 0).masked_fill_(~finite, torch.inf)
    return codes.to(torch.int8), scales


def _sum_peers(payload: Tensor, numel: int, layout: PayloadLayout) -> Tensor:
    """Decode ``[peers, n, nbytes]`` and sum over the peers in order: fp32 ``[n, numel]``."""
    # One after another, as the kernels do: fp32 sums depend on the order, which sum(0) leaves to torch.
    total = _decode(payload[0], numel, layout)
    for peer in payload[1:]:
        total += _decode(peer, numel, layout)
    return total


def _decode(payload: Tensor, numel: int, layout: PayloadLayout) -> Tensor:
    """Decode payload rows ``[n, nbytes]`` to fp32 ``[n, numel]``."""
    n, blocks = payload.shape[0], layout.blocks(numel)
    if numel == 0:  # torch views no rows without bytes as floats
        return payload.new_empty((n, 0), dtype=torch.float32)
    codes, scales = layout.codes(payload, numel).view(torch.int8), layout.scales(payload, numel)

    # The end of a partial last block stays uninitialized; the returned slice excludes it.
    values = payload.new_empty((n, blocks * layout.block), dtype=torch.float32)
    chunk = values[:, :numel]
    if layout.bits == 4:
        # int8 shifts right arithmetically, which extends a nibble's sign once its top bit is the byte's.
        chunk[:, 0::2] = (codes << 4) >> 4
        # With an odd number of values, the last high nibble is padding.
        chunk[:, 1::2] = codes[:, : numel // 2] >> 4
    else:
        chunk.copy_(codes)
    # Codes of a non-finite block are 0 and its scale is Inf, which makes NaN of every value in it.
    values.unflatten(1, (blocks, layout.block)).mul_(scales.unsqueeze(-1))
    return chunk
