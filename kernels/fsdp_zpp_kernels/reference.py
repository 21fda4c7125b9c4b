"""The layout of a payload, and all operations in plain PyTorch; other backends return the same bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# ---- payload
#
# Payload format: the layout of a chunk's quantized values in memory and on the wire.
#
# A *chunk* is a run of contiguous values, one rank's shard. It is quantized in blocks of ``block`` values. No block
# spans two chunks; the last block of a chunk may be partial. The payload of a chunk is one row of bytes::
#
#     | codes, ``bits`` each | zeros to 16 | one fp32 scale a block | zeros to 16 | ``tail`` fp32 values |
#
# An int8 code is one two's-complement byte. Two int4 codes share a byte: value ``2i`` is the low nibble, value ``2i +
# 1`` the high one. Four int2 codes share a byte in the same order. So code ``i`` of a little-endian word starts at bit
# ``i * bits``, and kernels can handle codes as 32-bit words. Every 32 int3 codes are three words: the codes' lower two
# bits as int2 codes lie, then their sign bits. The padding is zero because ranks compare payloads byte by byte.
#
# The tail is room for values that travel exactly. It belongs to the caller: the ops neither read nor write it, so it
# is uninitialized in the payloads that ops return. An empty chunk has a tail like any other; its row is the tail alone.
#
# In 4 and 8 bits, encoding takes ``scale = truncated(max(absmax * ((1 + SCALE_RAISE) / qmax), MIN_SCALE))`` and
# ``code = round_half_even(value * (1 / scale))``; decoding takes ``code * scale``. Each operation rounds to fp32. An
# all-zero block has scale 0 and codes 0. A block that holds an Inf or a NaN has scale Inf and codes 0, so all of it
# decodes to NaN (0 * Inf).
#
# [Note: Levels without a zero]
# If one of int2's symmetric levels were 0, there would be three, not four. A scale from a block's largest value would
# put levels where few values lie. So int2 and int3 codes, from -qmax - 1 to qmax, decode to ``(2 * code + 1) * scale``,
# and the scale is RMS_SCALES[bits] times the block's root mean square: for normally distributed values, these are the
# best equidistant levels (J. Max, "Quantizing for minimum distortion", 1960, table II). Lloyd and Max's unequal levels
# have 1.2 % less squared error in 2 bits, 8 % in 3, but need a table. Larger values clip. Only integers are squared:
# ``|value| * SQUARED_STEPS / absmax`` rounded once, half to even, so their sum is exact in any order. In a partial
# block, the mean is over the values that exist. Encoding takes ``scale = truncated(min(max(rms * RMS_SCALES[bits],
# MIN_SCALE), MAX_SCALE))`` and ``code = round_half_even(min(max(value * (0.5 / scale) - 0.5, -qmax - 1), qmax))``. So a
# zero decodes to ``scale``, unless its whole block is zero. A block that is not finite has scale NaN and codes 0.
#
# [Note: Exact products]
# A scale is truncated to 16 significant bits and a code has at most 7, so ``code * scale`` needs 23 of fp32's 24 bits
# and is exact. A sum over peers is then the same to the bit whether or not a processor fuses the multiplication into
# the addition, as the GPU kernels do. Truncation lowers a scale by less than one part in 2**15. So ``absmax * (1 /
# scale)`` is less than 0.004 above ``qmax`` and rounds to ``qmax``, and codes of 4 and 8 bits need no clamping.
# For such codes SCALE_RAISE compensates for earlier roundings, so that ``absmax = qmax * scale`` yields the same scale
# again: decoding and encoding again reproduces the payload.

# In bytes. Rows and their scales start at multiples of this, the widest access of a GPU thread.
ALIGNMENT = 16
# Tails have a multiple of this many fp32 values, so that no padding follows them.
TAIL_STEP = ALIGNMENT // 4

BITS = (2, 3, 4, 8)
# A thread reads up to 32 codes (16 bytes of int4) with one scale, so they must all belong to one block.
MIN_BLOCK = 32
# A Triton program holds a whole block in registers. In larger blocks, the maximum would take a second pass over memory.
MAX_BLOCK = 4096

# Smallest normal fp32. It keeps 1 / scale finite for blocks of tiny values.
MIN_SCALE = 2.0**-126
# Mask of the bits of an fp32 that a scale keeps, as an int32: 16 of 24 significant bits. See [Note: Exact products].
SCALE_MASK = -0x100
# More than the sum of two rounding errors of 2**-24: of 1 / qmax, and of the product of absmax and that.
SCALE_RAISE = 2.0**-22
# By bits, scales (half the distance of levels) in units of the root mean square; see [Note: Levels without a zero].
RMS_SCALES = {2: 0.49785, 3: 0.2930}
# The largest integer that is squared. The sum of 32 squares takes less than 23 bits, that of a block less than 32.
SQUARED_STEPS = 255
# The largest scale in 2 and 3 bits: the outer level, up to 7 * scale, is finite.
MAX_SCALE = 2.0**125


@dataclass(frozen=True)
class PayloadLayout:
    """Layout of the codes, the scales and the tail in a chunk's payload.

    Args:
        bits: Width of a code, 2, 3, 4 or 8.
        block: Number of values that share a scale, a power of two from 32 to 4096.
        tail: Number of fp32 values at the end of each row, a multiple of 4.

    Raises:
        ValueError: If ``bits``, ``block`` or ``tail`` has any other value.
    """

    bits: int
    block: int
    tail: int = 0

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits is {self.bits!r}, but a code has 2, 3, 4 or 8 bits")
        # Triton's ranges are powers of two. If blocks are, too, a tile holds whole blocks of every layout.
        if not MIN_BLOCK <= self.block <= MAX_BLOCK or self.block & (self.block - 1):
            raise ValueError(
                f"block is {self.block!r}, but a block is a power of two from {MIN_BLOCK} to {MAX_BLOCK} values"
            )
        if self.tail < 0 or self.tail % TAIL_STEP:
            raise ValueError(
                f"tail is {self.tail!r}, but a row ends in a multiple of 4 fp32 values; round it up, and set the "
                "surplus to 0"
            )

    @property
    def qmax(self) -> int:
        """Return the largest code, 1, 3, 7 or 127. Codes of 4 and 8 bits are symmetric, so -8 and -128 never occur."""
        return (1 << (self.bits - 1)) - 1

    def blocks(self, numel: int) -> int:
        """Return the number of blocks, and of scales, in a chunk of ``numel`` values."""
        return (numel + self.block - 1) // self.block

    def codes_nbytes(self, numel: int) -> int:
        """Return the bytes of the codes of ``numel`` values, without padding; int3 codes are padded to 32."""
        if self.bits == 3:
            return -(-numel // 32) * 12
        return (numel * self.bits + 7) // 8

    def scales_offset(self, numel: int) -> int:
        """Return the offset of the scales in the row, in bytes."""
        return _align(self.codes_nbytes(numel))

    def codes(self, payload: Tensor, numel: int) -> Tensor:
        """Return a view of the codes in a payload of chunks of ``numel`` values: uint8 [chunks, codes_nbytes]."""
        return payload[:, : self.codes_nbytes(numel)]

    def scales(self, payload: Tensor, numel: int) -> Tensor:
        """Return a view of the scales in a payload of chunks of ``numel`` values: fp32 [chunks, blocks(numel)]."""
        start = self.scales_offset(numel)
        return payload[:, start : start + 4 * self.blocks(numel)].view(torch.float32)

    def nbytes(self, numel: int) -> int:
        """Return the length of a row in bytes, a multiple of 16. The row of an empty chunk is its tail."""
        return self.scales_offset(numel) + _align(4 * self.blocks(numel)) + 4 * self.tail


def _align(nbytes: int) -> int:
    return (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


# ---- nf4
#
# NF4's levels: the values of its 4-bit codes, as fractions of a block's scale.
#
# A payload of NF4 codes has the layout of int4 codes and holds whole blocks. It differs in the meaning of a code and in
# the order of the two codes of a byte: value ``2i`` is the high nibble, value ``2i + 1`` the low one, as in
# bitsandbytes. Decoding takes ``level * scale`` in fp32 and rounds once, to the dtype of the output. The scale of a
# block that is not finite is NaN, so the whole block decodes to NaN.

# The level of each code: fp32 values, ascending, as in QLoRA (arXiv 2305.14314, appendix E).
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@functools.cache  # a process has few devices
def levels_on(device: torch.device) -> Tensor:
    """Return the levels on ``device``, fp32 [16].

    The first call for a GPU copies the levels there: the CPU waits, and no CUDA graph can capture the copy. Make that
    call before a forward.
    """
    with torch.inference_mode(False):
        return torch.tensor(LEVELS, dtype=torch.float32, device=device)


# ---- reference
#
# Operations in plain PyTorch. They run on CPUs, and the Triton kernels return the same bits.
#
# ``ops.py`` has checked the arguments. Each function prepares a call: it takes the arguments that repeated calls share,
# and returns a function of tensors and factors. ``triton`` has a twin of each, with the same signature.


def quantize(numel: int, rows: int, cols: int, layout: PayloadLayout, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda values: _encode(values.view(rows * cols, numel), rows, cols, layout)


def dequantize_sum(
    peers: int, numel: int, rows: int, cols: int, layout: PayloadLayout, dtype: torch.dtype
) -> Callable[[Tensor, Tensor, float], None]:
    def call(payload: Tensor, out: Tensor, scale: float) -> None:
        total = _sum_peers(payload.view(peers, rows * cols, -1), numel, layout).mul_(scale)
        out.view(cols, rows, numel).copy_(total.view(rows, cols, numel).transpose(0, 1))

    return call


def dequantize_sum_quantize(
    peers: int, numel: int, rows: int, cols: int, layout: PayloadLayout, out_layout: PayloadLayout
) -> Callable[[Tensor, float], Tensor]:
    return lambda payload, scale: _encode(_sum_peers(payload, numel, layout).mul_(scale), rows, cols, out_layout)


def quantize_with_feedback(
    numel: int, rows: int, cols: int, layout: PayloadLayout, error_layout: PayloadLayout | None, dtype: torch.dtype
) -> Callable[[Tensor, Tensor, float], Tensor]:
    return lambda values, errors, beta: _encode_with_feedback(
        values.view(rows, cols, numel).transpose(0, 1).flatten(0, 1).float(), errors, layout, error_layout, beta
    )


def dequantize_sum_quantize_with_feedback(
    peers: int,
    numel: int,
    chunks: int,
    layout: PayloadLayout,
    out_layout: PayloadLayout,
    error_layout: PayloadLayout | None,
) -> Callable[[Tensor, Tensor, float, float], Tensor]:
    return lambda payload, errors, scale, beta: _encode_with_feedback(
        _sum_peers(payload, numel, layout).mul_(scale), errors, out_layout, error_layout, beta
    )


def quantize_delta(
    chunks: int, numel: int, base_layout: PayloadLayout, layout: PayloadLayout, dtype: torch.dtype
) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda values, base: _encode(
        values.view(chunks, numel).float() - _decode(base, numel, base_layout), 1, chunks, layout
    )


def add_delta(
    chunks: int, numel: int, base_layout: PayloadLayout, layout: PayloadLayout
) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda base, delta: _encode(
        _decode(base, numel, base_layout) + _decode(delta, numel, layout), 1, chunks, base_layout
    )


def dequantize_rows(
    chunks: int, numel: int, stride: int, layout: PayloadLayout, dtype: torch.dtype
) -> Callable[[Tensor, Tensor], None]:
    in_order = dequantize_sum(1, numel, chunks, 1, layout, dtype)
    return lambda payload, out: in_order(payload, out, 1.0)


def dequantize_nf4_rows(
    chunks: int, numel: int, stride: int, layout: PayloadLayout, dtype: torch.dtype
) -> Callable[[Tensor, Tensor], None]:
    def call(payload: Tensor, out: Tensor) -> None:
        if numel == 0:  # torch can't view empty rows as floats
            return
        levels = levels_on(payload.device)
        # One look-up per byte returns both of its values, that of the high nibble first.
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
    # A block that is not finite decodes to NaN as a whole. It keeps its old errors: a NaN in them would stay.
    new = torch.where(sent.isnan(), old, old * beta + (corrected - sent) * (1 - beta))
    errors.copy_(new.view_as(errors) if error_layout is None else _encode(new, 1, n, error_layout))
    return payload


def _encode(values: Tensor, rows: int, cols: int, layout: PayloadLayout) -> Tensor:
    """Quantize ``[rows * cols, numel]`` values into payload rows, chunk (r, c) to row ``c * rows + r``."""
    numel = values.shape[1]
    codes, scales = _quantize_blocks(_blocks(values, layout.block), layout, numel)
    codes = codes.flatten(1).view(torch.uint8)
    if layout.bits == 3:
        runs = codes.unflatten(1, (-1, 32))
        packed = torch.cat([_packed(runs, 2), _packed(runs >> 2, 1)], dim=-1).flatten(1)
    else:
        packed = _packed(codes, layout.bits)

    # Zeros, not empty: ranks compare payloads byte by byte, padding included.
    payload = values.new_zeros((rows * cols, layout.nbytes(numel)), dtype=torch.uint8)
    chunks = payload.view(cols, rows, payload.shape[1]).transpose(0, 1)
    end, start = layout.codes_nbytes(numel), layout.scales_offset(numel)
    chunks[..., :end].copy_(packed[:, :end].unflatten(0, (rows, cols)))
    scale_bytes = scales.view(torch.uint8)
    chunks[..., start : start + scale_bytes.shape[1]].copy_(scale_bytes.unflatten(0, (rows, cols)))
    return payload


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Pack the lowest ``bits`` bits of uint8 ``[..., n]``, the first code lowest: uint8 ``[..., n * bits / 8]``."""
    if bits == 8:
        return codes
    codes, per = codes & ((1 << bits) - 1), 8 // bits
    return functools.reduce(torch.bitwise_or, (codes[..., at::per] << at * bits for at in range(per)))


def _unpacked(packed: Tensor, bits: int, numel: int) -> Tensor:
    """Return the ``numel`` codes of int8 ``[..., nbytes]``, with their signs: int8 ``[..., numel]``."""
    # The left shift moves a code to the top of its byte, and the arithmetic right shift extends its sign.
    return torch.stack([packed << up for up in range(8 - bits, -1, -bits)], dim=-1).flatten(-2)[..., :numel] >> (
        8 - bits
    )


def _blocks(values: Tensor, block: int) -> Tensor:
    """View ``[n, numel]`` as fp32 ``[n, blocks, block]``, copying only to convert or to complete the last block."""
    numel = values.shape[1]
    missing = -numel % block
    if missing:
        padded = values.new_empty((values.shape[0], numel + missing), dtype=torch.float32)
        padded[:, :numel] = values
        padded[:, numel:] = 0  # zeros do not change the maximum of the last block
        values = padded
    return values.float().view(len(values), (numel + missing) // block, block)


def _quantize_blocks(blocks: Tensor, layout: PayloadLayout, numel: int) -> tuple[Tensor, Tensor]:
    """Quantize fp32 ``[n, blocks, block]`` to int8 codes of that shape and fp32 scales ``[n, blocks]``."""
    absmax = blocks.abs().amax(-1)
    finite = absmax.isfinite()
    live = finite & (absmax > 0)
    has_rms_scales = layout.bits in RMS_SCALES
    if has_rms_scales:
        largest = _rms_scales(blocks, absmax, numel, RMS_SCALES[layout.bits])
    else:
        largest = _times(absmax, (1 + SCALE_RAISE) / layout.qmax)
    # The mask cuts mantissa bits, so it rounds towards 0. [Note: Exact products] needs this.
    scales = (largest.clamp_min_(MIN_SCALE).view(torch.int32) & SCALE_MASK).view(torch.float32)
    inverse = torch.where(live, (0.5 if has_rms_scales else 1) / scales, 0)
    codes = blocks * inverse.unsqueeze(-1)
    if has_rms_scales:
        codes.sub_(0.5).clamp_(-layout.qmax - 1, layout.qmax)
    # round() takes half to even, as the kernels do. A live block has finite codes here and a zero block has zeros.
    codes.round_()
    if not finite.all():
        # A non-finite block may hold NaN, whose conversion to int8 is undefined.
        codes.masked_fill_(~finite.unsqueeze(-1), 0)
    scales = scales.masked_fill_(absmax == 0, 0).masked_fill_(~finite, torch.nan if has_rms_scales else torch.inf)
    return codes.to(torch.int8), scales


def _rms_scales(blocks: Tensor, absmax: Tensor, numel: int, factor: float) -> Tensor:
    """Return ``factor`` times the root mean square of each block, fp32 ``[n, blocks]``."""
    unit = _times(absmax, 1 / SQUARED_STEPS).clamp_min_(MIN_SCALE)
    # Products of fp32 and sums of squares are exact in fp64. Zeros that complete a block do not count.
    steps = (blocks.double().abs_() * (1 / unit).double().unsqueeze(-1)).round_()
    squares = steps.square_().sum(-1).float()
    starts = torch.arange(0, numel, blocks.shape[-1], device=blocks.device)
    counts = (numel - starts).clamp_max_(blocks.shape[-1])
    # On some CPUs, torch's square root of an fp32 is not rounded correctly, unlike the kernels'.
    roots = (squares / counts).double().sqrt_().float()
    return _times(roots * unit, factor).clamp_max_(MAX_SCALE)


def _times(values: Tensor, factor: float) -> Tensor:
    # The factor is an fp32 tensor, as in the kernels: a Python number is fp64, and torch decides when to round it.
    return values * torch.full_like(values, factor)


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
    if numel == 0:  # torch can't view empty rows as floats
        return payload.new_empty((n, 0), dtype=torch.float32)
    codes, scales = layout.codes(payload, numel).view(torch.int8), layout.scales(payload, numel)

    if layout.bits == 3:
        runs = codes.unflatten(1, (-1, 12))
        codes = (_unpacked(runs[..., :8], 2, 32) & 3 | _unpacked(runs[..., 8:], 1, 32) << 2).flatten(1)[:, :numel]
    elif layout.bits < 8:
        codes = _unpacked(codes, layout.bits, numel)
    # The end of a partial last block stays uninitialized; the returned slice excludes it.
    values = payload.new_empty((n, blocks * layout.block), dtype=torch.float32)
    chunk = values[:, :numel].copy_(codes)
    if layout.bits in RMS_SCALES:
        chunk.mul_(2).add_(1)
    # A non-finite block has codes 0 and the scale Inf (NaN in 2 and 3 bits), so all of its values become NaN.
    values.unflatten(1, (blocks, layout.block)).mul_(scales.unsqueeze(-1))
    return chunk
