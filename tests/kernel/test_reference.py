"""Ops on CPU against the oracle, byte for byte."""

import numpy as np
import pytest
import torch
from harness.covering import over_pairs
from oracle import decode, decode_sum, encode, transposed
from samples import DTYPES, peers, spread
from torch import Tensor

from fsdp_zpp import kernels

GRIDS = [(1, 1), (1, 3), (4, 1), (2, 3)]
SHAPES = [(8, 32, 1), (8, 64, 77), (8, 256, 256), (4, 32, 33), (4, 128, 130), (4, 4096, 65)]
over_pairs_of_all = over_pairs(
    shape={f"int{bits}-{block}-n{numel}": (bits, block, numel) for bits, block, numel in SHAPES},
    dtype=DTYPES,
    grid={f"{rows}x{cols}": (rows, cols) for rows, cols in GRIDS},
)


def chunks(values: Tensor, count: int) -> list[np.ndarray]:
    return list(values.float().numpy().reshape(count, -1))


def payload_of(rows: list[bytes]) -> Tensor:
    return torch.tensor([list(row) for row in rows], dtype=torch.uint8)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@over_pairs_of_all
def test_quantize(shape: tuple[int, int, int], dtype: torch.dtype, grid: tuple[int, int]) -> None:
    bits, block, numel = shape
    count = grid[0] * grid[1]
    values = spread(count * numel, dtype)
    values[::101] = torch.inf
    rows = [b""] * count
    for place, chunk in zip(transposed(*grid), chunks(values, count), strict=True):
        rows[place] = encode(chunk, bits, block)
    assert torch.equal(kernels.quantize(values, *grid, bits, block), payload_of(rows))


@over_pairs_of_all
def test_dequantize(shape: tuple[int, int, int], dtype: torch.dtype, grid: tuple[int, int]) -> None:
    bits, block, numel = shape
    count = grid[0] * grid[1]
    rows = [encode(chunk, bits, block) for chunk in chunks(spread(count * numel, dtype), count)]
    expected = torch.empty(count, numel)
    for place, row in zip(transposed(*grid), rows, strict=True):
        expected[place] = torch.tensor(np.array(decode(row, numel, bits, block)))
    out = torch.full((count * numel,), torch.nan, dtype=dtype)
    kernels.dequantize(payload_of(rows), out, *grid, bits, block)
    assert torch.equal(out, expected.flatten().to(dtype))


@over_pairs(shape=SHAPES, count=[1, 3], out_bits=[4, 8])
def test_sums(shape: tuple[int, int, int], count: int, out_bits: int) -> None:
    bits, block, numel = shape
    rows, cols, scale, out_block = 2, 2, 1 / 3, 64
    sent = [[encode(chunk, bits, block) for chunk in chunks(each, 4)] for each in peers(count, 4 * numel)]
    payload = torch.stack([payload_of(each) for each in sent])
    sums = torch.empty(4, numel)
    requantized = [b""] * 4
    for place, row in zip(transposed(rows, cols), range(4), strict=True):
        total = decode_sum([each[row] for each in sent], numel, bits, block, scale)
        sums[place] = torch.tensor(np.array(total))
        requantized[place] = encode(total, out_bits, out_block)

    out = torch.full((4 * numel,), torch.nan)
    kernels.dequantize_sum(payload, out, rows, cols, bits, block, scale)
    assert torch.equal(out, sums.flatten())
    fused = kernels.dequantize_sum_quantize(payload, numel, rows, cols, bits, block, out_bits, out_block, scale)
    assert torch.equal(fused, payload_of(requantized))
