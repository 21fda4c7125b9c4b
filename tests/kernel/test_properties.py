"""Properties that hold whatever the values, on the reference: kernels equal it bit for bit (test_triton.py)."""

import torch
from hypothesis import given, settings, strategies as st
from samples import DTYPES, normal, peers, same, spread
from torch import Tensor

from fsdp_zpp.kernels import PayloadLayout, dequantize, dequantize_sum, dequantize_sum_quantize, quantize

settings.register_profile("kernels", deadline=None, max_examples=30)
settings.load_profile("kernels")

BITS = st.sampled_from([4, 8])
BLOCK = st.sampled_from([32, 64, 128, 256, 512, 1024, 2048, 4096])
DTYPE = st.sampled_from(list(DTYPES.values()))
NUMEL = st.integers(1, 5000)
SIDE = st.integers(1, 4)
SEED = st.integers(0, 2**32 - 1)
TINY = 2.0**-126


def round_trip(values: Tensor, bits: int, block: int) -> Tensor:
    out = torch.empty_like(values)
    dequantize(quantize(values, 1, 1, bits, block), out, 1, 1, bits, block)
    return out


def of_block(values: Tensor, block: int) -> Tensor:
    """Return the absmax of each value's block."""
    absmax = [piece.abs().max().expand(len(piece)) for piece in values.double().split(block)]
    return torch.cat(absmax)


@given(NUMEL, BITS, BLOCK, DTYPE, SEED)
def test_error_is_at_most_half_a_step(numel: int, bits: int, block: int, dtype: torch.dtype, seed: int) -> None:
    values = spread(numel, dtype, seed)
    out = round_trip(values, bits, block).double()
    step = (of_block(values, block) / PayloadLayout(bits, block).qmax).clamp(min=TINY)
    info = torch.finfo(dtype)
    rounding = out.abs() * info.eps + info.smallest_normal * info.eps
    assert ((out - values.double()).abs() <= step / 2 * (1 + 1e-4) + rounding).all()


@given(NUMEL, BITS, BLOCK, DTYPE, SEED)
def test_nothing_clips(numel: int, bits: int, block: int, dtype: torch.dtype, seed: int) -> None:
    values = spread(numel, dtype, seed)
    absmax = of_block(values, block)
    largest = (values.double().abs() == absmax) & (absmax > PayloadLayout(bits, block).qmax * TINY)
    out, values = round_trip(values, bits, block)[largest], values[largest]
    if dtype == torch.float32:
        torch.testing.assert_close(out, values, rtol=2**-15, atol=0)  # scales have 16 bits
    else:
        assert torch.equal(out, values)


@given(NUMEL, BITS, BLOCK, SEED)
def test_what_was_decoded_is_quantized_to_what_it_came_from(numel: int, bits: int, block: int, seed: int) -> None:
    payload = quantize(normal(numel, torch.float32, seed), 1, 1, bits, block)
    values = torch.empty(numel)
    dequantize(payload, values, 1, 1, bits, block)
    assert torch.equal(quantize(values, 1, 1, bits, block), payload)


@given(NUMEL, BITS, BLOCK, SEED)
def test_products_are_exact(numel: int, bits: int, block: int, seed: int) -> None:
    """So that sums do not depend on whether a processor fuses products into them."""
    payload = quantize(spread(numel, torch.float32, seed), 1, 1, bits, block)
    layout = PayloadLayout(bits, block)
    start = layout.scales_offset(numel)
    scales = payload[0, start : start + 4 * layout.blocks(numel)].view(torch.float32)
    codes = torch.arange(-layout.qmax, layout.qmax + 1)[:, None]
    assert torch.equal((codes * scales).double(), codes.double() * scales.double())


@given(NUMEL, BITS, BLOCK, DTYPE, SEED, st.sampled_from([torch.inf, -torch.inf, torch.nan]))
def test_overflow_stays_in_its_block_and_is_seen(
    numel: int, bits: int, block: int, dtype: torch.dtype, seed: int, bad: float
) -> None:
    values = spread(numel, dtype, seed)
    before = round_trip(values, bits, block)
    at = seed % numel
    values[at] = bad
    after = round_trip(values, bits, block)
    hit = torch.arange(numel) // block == at // block
    assert not after[hit].isfinite().any()
    assert torch.equal(after[~hit], before[~hit])


@given(NUMEL, BITS, BLOCK, DTYPE)
def test_zeros_stay_zero(numel: int, bits: int, block: int, dtype: torch.dtype) -> None:
    zeros = torch.zeros(numel, dtype=dtype)
    assert not quantize(-zeros, 1, 1, bits, block).any()
    assert torch.equal(round_trip(zeros, bits, block), zeros)


@given(st.integers(1, 300), SIDE, SIDE, BITS, BLOCK, DTYPE, SEED)
def test_grids_transpose(
    numel: int, rows: int, cols: int, bits: int, block: int, dtype: torch.dtype, seed: int
) -> None:
    values = normal(rows * cols * numel, dtype, seed)
    payload = quantize(values, rows, cols, bits, block)
    alone = torch.cat([quantize(chunk, 1, 1, bits, block) for chunk in values.split(numel)])
    assert torch.equal(payload, alone.unflatten(0, (rows, cols)).transpose(0, 1).flatten(0, 1))

    back, in_order = torch.empty_like(values), torch.empty_like(values)
    dequantize(payload, back, cols, rows, bits, block)
    dequantize(alone, in_order, 1, rows * cols, bits, block)
    assert torch.equal(back, in_order)


@given(st.integers(1, 300), SIDE, SIDE, st.integers(1, 9), BITS, BLOCK, BITS, BLOCK, SEED)
def test_sums_are_sums_of_what_decodes(
    numel: int,
    rows: int,
    cols: int,
    count: int,
    bits: int,
    block: int,
    out_bits: int,
    out_block: int,
    seed: int,
) -> None:
    payload = torch.stack([quantize(each, 1, rows * cols, bits, block) for each in peers(count, rows * cols * numel)])
    if seed % 4 == 0:
        payload[seed % count] = quantize(torch.full((rows * cols * numel,), torch.nan), 1, rows * cols, bits, block)
    scale = 1 / count
    total = torch.zeros(rows * cols * numel)
    one = torch.empty_like(total)
    for each in payload:
        dequantize(each, one, rows, cols, bits, block)
        total += one
    out = torch.empty_like(total)
    dequantize_sum(payload, out, rows, cols, bits, block, scale)
    assert same(out, total * scale)

    fused = dequantize_sum_quantize(payload, numel, rows, cols, bits, block, out_bits, out_block, scale)
    assert torch.equal(fused, quantize(out, 1, rows * cols, out_bits, out_block))
