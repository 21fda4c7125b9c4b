"""The reference backend beside an oracle of the payload format, and bounds that hold whatever the values.

The contract of the codecs (codecs/test_codecs.py) has the laws of order, sums, errors and tails.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from harness.covering import over_each
from hypothesis import given, settings, strategies as st
from torch import Tensor

from fsdp_zpp.kernels import PayloadLayout, dequantize, quantize

relaxed = settings(deadline=None, max_examples=30)
f32 = np.float32
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EXPONENTS = {torch.float32: (-149, 120), torch.bfloat16: (-133, 120), torch.float16: (-24, 12)}


def spread(numel: int, dtype: torch.dtype, seed: int = 0, piece: int = 37) -> Tensor:
    """Make values whose magnitude jumps every ``piece`` values, over all of the dtype's range, with zeros between."""
    rng = np.random.default_rng(seed)
    exponents = rng.integers(*EXPONENTS[dtype], size=numel // piece + 1).repeat(piece)[:numel]
    values = rng.standard_normal(numel) * 2.0**exponents
    values[rng.random(numel) < 0.05] = 0
    return torch.from_numpy(values).to(dtype)


# ---- the format once more, one value at a time and sharing no code with the package


def pad16(row: bytearray) -> None:
    row.extend(bytes(-len(row) % 16))


def truncated(value: np.float32) -> np.float32:
    """Truncate to 16 significant bits."""
    mantissa, exponent = math.frexp(float(value))
    return f32(math.ldexp(math.floor(mantissa * 2**16), exponent - 16))


def encode_block(values: Sequence[np.float32], qmax: int) -> tuple[list[int], np.float32]:
    absmax = f32(0)
    for value in values:
        absmax = max(absmax, f32(np.inf) if np.isnan(value) else abs(value))
    if absmax == 0 or np.isinf(absmax):
        return [0] * len(values), absmax
    scale = truncated(max(absmax * f32((1 + 2.0**-22) / qmax), f32(2.0**-126)))
    inverse = f32(1) / scale
    return [int(np.clip(np.rint(value * inverse), -qmax, qmax)) for value in values], scale


def encode(values: Sequence[np.float32], bits: int, block: int) -> bytes:
    """Return the payload of one chunk."""
    codes: list[int] = []
    scales: list[np.float32] = []
    for start in range(0, len(values), block):
        block_codes, scale = encode_block(values[start : start + block], {4: 7, 8: 127}[bits])
        codes += block_codes
        scales.append(scale)
    row = bytearray()
    if bits == 8:
        for code in codes:
            row += struct.pack("b", code)
    else:
        codes += [0] * (len(codes) % 2)
        for low, high in zip(codes[0::2], codes[1::2], strict=True):
            row.append((low & 0xF) | (high & 0xF) << 4)
    pad16(row)
    for scale in scales:
        row += struct.pack("<f", scale)
    pad16(row)
    return bytes(row)


def decode(row: bytes, numel: int, bits: int, block: int) -> list[np.float32]:
    """Return the values of one payload row."""
    nbytes = numel if bits == 8 else (numel + 1) // 2
    scales_at = (nbytes + 15) // 16 * 16
    values = []
    for i in range(numel):
        if bits == 8:
            code = row[i] - 256 * (row[i] > 127)
        else:
            nibble = row[i // 2] >> 4 * (i % 2) & 0xF
            code = nibble - 16 * (nibble > 7)
        (scale,) = struct.unpack_from("<f", row, scales_at + 4 * (i // block))
        values.append(f32(code) * f32(scale))
    return values


def payload_of(rows: Sequence[bytes]) -> Tensor:
    return torch.tensor([list(row) for row in rows], dtype=torch.uint8)


def transposed(rows: int, cols: int) -> list[int]:
    """Return where chunks of a row-major grid go: chunk i of it to place ``transposed(rows, cols)[i]``."""
    return [col * rows + row for row in range(rows) for col in range(cols)]


# ---- ops beside it

GRIDS = [(1, 1), (1, 3), (4, 1), (2, 3)]
SHAPES = [(8, 32, 1), (8, 64, 77), (8, 256, 256), (4, 32, 33), (4, 128, 130), (4, 4096, 65)]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@over_each(rest=False, shape=SHAPES, dtype=DTYPES, grid=GRIDS)
def test_payloads_are_those_of_the_oracle_byte_for_byte(
    shape: tuple[int, int, int], dtype: torch.dtype, grid: tuple[int, int]
) -> None:
    bits, block, numel = shape
    count = grid[0] * grid[1]
    values = spread(count * numel, dtype)
    finite = [encode(chunk, bits, block) for chunk in values.float().numpy().reshape(count, -1)]
    expected = torch.empty(count, numel)
    for place, row in zip(transposed(*grid), finite, strict=True):
        expected[place] = torch.tensor(np.array(decode(row, numel, bits, block)))
    out = torch.full((count * numel,), torch.nan, dtype=dtype)
    dequantize(payload_of(finite), out, *grid, bits, block)
    assert torch.equal(out, expected.flatten().to(dtype))

    values[::101] = torch.inf
    rows = [b""] * count
    for place, chunk in zip(transposed(*grid), values.float().numpy().reshape(count, -1), strict=True):
        rows[place] = encode(chunk, bits, block)
    assert torch.equal(quantize(values, *grid, bits, block), payload_of(rows))


def test_payloads_written_down_by_hand() -> None:
    values = torch.tensor([127.0, -127.0, 0.5, 1.5, -2.5, 0.0] + [0.0] * 26 + [254.0])
    expected = bytes([127, 129, 0, 2, 254]) + bytes(27) + bytes([127]) + bytes(15) + struct.pack("<4f", 1, 2, 0, 0)
    assert bytes(quantize(values, 1, 1, 8, 32)[0].tolist()) == expected
    values = torch.tensor([7.0, -7.0, 1.0, -1.0, 2.5])
    expected = bytes([0x97, 0xF1, 0x02]) + bytes(13) + struct.pack("<4f", 1, 0, 0, 0)
    assert bytes(quantize(values, 1, 1, 4, 32)[0].tolist()) == expected


# ---- layouts


def test_codes_scales_and_tail_follow_each_other_at_multiples_of_16_bytes() -> None:
    for bits, block, numel, codes, offset, nbytes in (
        (8, 32, 0, 0, 0, 0),
        (8, 32, 160, 160, 160, 192),
        (4, 32, 33, 17, 32, 48),
        (4, 4096, 4096, 2048, 2048, 2064),
        (8, 256, 2**33, 2**33, 2**33, 2**33 + 2**27),
    ):
        layout = PayloadLayout(bits, block)
        found = layout.codes_nbytes(numel), layout.scales_offset(numel), layout.nbytes(numel), layout.blocks(numel)
        assert found == (codes, offset, nbytes, -(-numel // block))
        layout = PayloadLayout(bits, block, 20)
        assert (layout.tail_offset(numel), layout.nbytes(numel)) == (nbytes, nbytes + 80)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        *(((bits, 256), rf"bits is {bits}, .* 4 or 8 bits") for bits in (0, 16)),
        *(((8, block), rf"block is {block}, .* power of two from 32 to 4096") for block in (0, -256, 16, 48, 8192)),
        *(((8, 32, tail), rf"tail is {tail}, .* multiple of 4 fp32 values") for tail in (-4, 6)),
    ],
)
def test_layouts_out_of_range_are_refused(layout: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PayloadLayout(*layout)


# ---- bounds, whatever the values

NUMEL = st.integers(1, 5000)
BITS = st.sampled_from([4, 8])
BLOCK = st.sampled_from([2**power for power in range(5, 13)])
DTYPE = st.sampled_from(list(DTYPES.values()))
SEED = st.integers(0, 2**32 - 1)
TINY = 2.0**-126


def of_block(values: Tensor, block: int) -> Tensor:
    """Return the absmax of each value's block."""
    return torch.cat([piece.abs().max().expand(len(piece)) for piece in values.double().split(block)])


@relaxed
@given(NUMEL, BITS, BLOCK, DTYPE, SEED)
def test_errors_are_at_most_half_a_step_and_nothing_clips(
    numel: int, bits: int, block: int, dtype: torch.dtype, seed: int
) -> None:
    values, out = spread(numel, dtype, seed), torch.empty(numel, dtype=dtype)
    dequantize(quantize(values, 1, 1, bits, block), out, 1, 1, bits, block)
    absmax, qmax, info = of_block(values, block), PayloadLayout(bits, block).qmax, torch.finfo(dtype)
    step = (absmax / qmax).clamp(min=TINY)
    rounding = out.double().abs() * info.eps + info.smallest_normal * info.eps
    assert ((out.double() - values.double()).abs() <= step / 2 * (1 + 1e-4) + rounding).all()
    largest = (values.double().abs() == absmax) & (absmax > qmax * TINY)
    precision = 2**-15 if dtype == torch.float32 else 0  # scales have 16 bits
    torch.testing.assert_close(out[largest], values[largest], rtol=precision, atol=0)


@relaxed
@given(NUMEL, BITS, BLOCK, SEED)
def test_what_was_decoded_is_quantized_to_what_it_came_from(numel: int, bits: int, block: int, seed: int) -> None:
    normal, values = torch.randn(numel, generator=torch.Generator().manual_seed(seed)), torch.empty(numel)
    payload = quantize(normal, 1, 1, bits, block)
    dequantize(payload, values, 1, 1, bits, block)
    assert torch.equal(quantize(values, 1, 1, bits, block), payload)
    assert not quantize(values * -0.0, 1, 1, bits, block).any()


@relaxed
@given(NUMEL, BITS, BLOCK, SEED)
def test_products_are_exact(numel: int, bits: int, block: int, seed: int) -> None:
    """So that sums do not depend on whether a processor fuses products into them."""
    layout = PayloadLayout(bits, block)
    scales = layout.scales(quantize(spread(numel, torch.float32, seed), 1, 1, bits, block), numel)
    codes = torch.arange(-layout.qmax, layout.qmax + 1)[:, None]
    assert torch.equal((codes * scales).double(), codes.double() * scales.double())
