"""Triton kernels, compiled on a GPU and interpreted elsewhere, against the reference on CPU: the same bits."""

from typing import Any

import pytest
import torch
from backends import as_stored, on_triton
from harness.covering import over_pairs
from samples import DTYPES, normal, peers, same, spread
from torch import Tensor

from fsdp_zpp.kernels import PayloadLayout, dequantize, dequantize_sum, dequantize_sum_quantize, quantize

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # 0 * Inf, interpreted

GRIDS = [(1, 1), (2, 3)]
# A partial block, a partial word, whole tiles, a tile and a bit; aligned and not; padded scales and not.
SHAPES = [(8, 32, 1), (8, 256, 4096), (8, 4096, 4097), (8, 64, 5000), (4, 32, 33), (4, 128, 8192), (4, 256, 4223)]
over_pairs_of_all = over_pairs(
    shape={f"int{bits}-{block}-n{numel}": (bits, block, numel) for bits, block, numel in SHAPES},
    dtype=DTYPES,
    grid={f"{rows}x{cols}": (rows, cols) for rows, cols in GRIDS},
)


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the kernels fail to write, padding included, shows."""
    new_empty_strided = Tensor.new_empty_strided

    def poisoned(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = new_empty_strided(self, *args, **kwargs)
        return out.fill_(0xAB) if out.dtype == torch.uint8 else out

    monkeypatch.setattr(Tensor, "new_empty_strided", poisoned)


def gather(count: int, chunks: int, numel: int, bits: int, block: int) -> Tensor:
    """Make the payloads of several peers, with a block of each lost to a NaN."""
    payloads = []
    for peer, values in enumerate(peers(count, chunks * numel)):
        values[peer * 997 % len(values)] = torch.nan
        payloads.append(quantize(values, 1, chunks, bits, block))
    return torch.stack(payloads)


@over_pairs_of_all
def test_quantize(shape: tuple[int, int, int], dtype: torch.dtype, grid: tuple[int, int], device: torch.device) -> None:
    bits, block, numel = shape
    values = spread(grid[0] * grid[1] * numel, dtype, piece=block * 2 // 3)
    values[:: 7 * block] = torch.nan
    values[1 :: 5 * block] = -torch.inf
    values[3 * block : 4 * block] = 0
    if device.type == "cpu" and dtype == torch.bfloat16:
        # The interpreter converts bf16's subnormals wrongly.
        values[values.abs() < torch.finfo(dtype).smallest_normal] = 0
    payload = on_triton(quantize, values.to(device), *grid, bits, block)
    assert torch.equal(payload.cpu(), quantize(values, *grid, bits, block))


@pytest.mark.parametrize("bits", [4, 8])
def test_ties_round_to_even(bits: int, device: torch.device) -> None:
    qmax = PayloadLayout(bits, 256).qmax
    values = (torch.arange(256) % (2 * qmax + 1) - qmax) * 0.5 * 2.0**-130
    values[0] = qmax * 2.0**-130
    payload = on_triton(quantize, values.to(device), 1, 1, bits, 256)
    assert torch.equal(payload.cpu(), quantize(values, 1, 1, bits, 256))


@over_pairs_of_all
def test_dequantize(
    shape: tuple[int, int, int], dtype: torch.dtype, grid: tuple[int, int], device: torch.device
) -> None:
    bits, block, numel = shape
    chunks = grid[0] * grid[1]
    (payload,) = gather(1, chunks, numel, bits, block)
    expected = torch.empty(chunks * numel)
    dequantize(payload, expected, *grid, bits, block)
    out = torch.full((chunks * numel,), 3, dtype=dtype, device=device)
    on_triton(dequantize, payload.to(device), out, *grid, bits, block)
    assert same(out.cpu(), as_stored(expected, dtype, device))


@over_pairs(
    shape=[(8, 256, 2049), (4, 4096, 5001), (4, 64, 4096)], dtype=[torch.float32, torch.bfloat16], count=[2, 8, 9]
)
def test_dequantize_sum(shape: tuple[int, int, int], dtype: torch.dtype, count: int, device: torch.device) -> None:
    bits, block, numel = shape
    payload = gather(count, 2, numel, bits, block)
    expected = torch.empty(2 * numel)
    dequantize_sum(payload, expected, 2, 1, bits, block, 1 / count)
    out = torch.full((2 * numel,), 3, dtype=dtype, device=device)
    on_triton(dequantize_sum, payload.to(device), out, 2, 1, bits, block, 1 / count)
    assert same(out.cpu(), as_stored(expected, dtype, device))


@pytest.mark.parametrize("count", [1, 3, 9])
@pytest.mark.parametrize(
    ("bits", "block", "out_bits", "out_block", "numel"),
    [(8, 256, 4, 128, 4096), (4, 32, 8, 4096, 5001), (8, 4096, 8, 32, 4095), (4, 128, 4, 256, 2050)],
)
def test_dequantize_sum_quantize(
    bits: int, block: int, out_bits: int, out_block: int, numel: int, count: int, device: torch.device
) -> None:
    payload, rest = gather(count, 2, numel, bits, block), (numel, 1, 2, bits, block, out_bits, out_block, 0.3)
    expected = dequantize_sum_quantize(payload, *rest)
    fused = on_triton(dequantize_sum_quantize, payload.to(device), *rest)
    assert torch.equal(fused.cpu(), expected)


def test_empty_chunks(device: torch.device) -> None:
    nothing = torch.empty(0, device=device)
    assert on_triton(quantize, nothing, 2, 3, 8, 256).shape == (6, 0)
    payload = torch.empty(4, 6, 0, dtype=torch.uint8, device=device)
    on_triton(dequantize_sum, payload, nothing, 2, 3, 8, 256, 1.0)
    assert on_triton(dequantize_sum_quantize, payload, 0, 2, 3, 8, 256, 8, 256, 1.0).shape == (6, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs 16 GiB of GPU memory")
def test_offsets_past_32_bits(device: torch.device) -> None:
    chunks, numel = 3, 3 * 2**28 + 8
    values = torch.empty(chunks * numel, dtype=torch.bfloat16, device=device)
    last = normal(numel // 2**10, torch.bfloat16)
    values.zero_()[-len(last) :] = last.to(device)
    payload = quantize(values, 1, chunks, 8, 256)
    out = torch.full_like(values, torch.nan)
    dequantize(payload, out, chunks, 1, 8, 256)
    assert not out[:-numel].any()
    torch.testing.assert_close(out[-len(last) :].cpu(), last, rtol=0, atol=0.03)
