"""``FullPrecision`` against the plain formula: a grid of chunks is transposed, and sums are taken in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdp_zpp.codecs.base import FullPrecision

GRIDS = [(1, 1), (1, 3), (3, 1), (2, 3)]
DTYPES = [torch.float32, torch.bfloat16]
grids = pytest.mark.parametrize(("rows", "cols"), GRIDS)
dtypes = pytest.mark.parametrize(("values_dtype", "dtype"), [(a, b) for a in DTYPES for b in DTYPES], ids=str)
numels = pytest.mark.parametrize("numel", [2, 40])


def bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, which tell -0 from 0."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def values_of(numel: int, dtype: torch.dtype) -> Tensor:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    values[::7] = -0.0
    return values


@grids
@dtypes
@numels
@pytest.mark.parametrize("step", [1, 2], ids=["contiguous", "strided"])
def test_encode(rows: int, cols: int, values_dtype: torch.dtype, dtype: torch.dtype, numel: int, step: int) -> None:
    values, codec = values_of(step * rows * cols * numel, values_dtype)[::step], FullPrecision(dtype)
    payload = codec.encode(values, rows, cols)
    assert payload.shape == (rows * cols, codec.nbytes(numel))
    expected = values.to(dtype).reshape(rows, cols, numel).transpose(0, 1)
    assert torch.equal(bits(payload), bits(expected))


@grids
def test_empty_chunks(rows: int, cols: int) -> None:
    codec, out = FullPrecision(torch.float32), torch.empty(0)
    payload = codec.encode(torch.empty(0), rows, cols)
    assert payload.shape == (rows * cols, 0)
    codec.decode_sum(payload[None], out, rows, cols, 0.3)


@grids
@dtypes
@numels
@pytest.mark.parametrize("apart", [0, 16])
def test_decode(rows: int, cols: int, values_dtype: torch.dtype, dtype: torch.dtype, numel: int, apart: int) -> None:
    codec = FullPrecision(dtype)
    values = values_of(rows * cols * numel, dtype).view(rows * cols, numel)
    payload = torch.zeros(rows * cols, codec.nbytes(numel) + apart, dtype=torch.uint8)[:, : codec.nbytes(numel)]
    payload.copy_(values.view(torch.uint8))
    out = torch.full((rows * cols * numel,), torch.nan, dtype=values_dtype)
    codec.decode(payload, out, rows, cols)
    assert torch.equal(bits(out), bits(values.view(rows, cols, numel).transpose(0, 1).to(values_dtype)))


@grids
@dtypes
@numels
@pytest.mark.parametrize("peers", [1, 3])
def test_decode_sum(
    rows: int, cols: int, values_dtype: torch.dtype, dtype: torch.dtype, numel: int, peers: int
) -> None:
    values = values_of(peers * rows * cols * numel, dtype).view(peers, rows * cols, numel)
    out = torch.full((rows * cols * numel,), torch.nan, dtype=values_dtype)
    FullPrecision(dtype).decode_sum(values.view(torch.uint8), out, rows, cols, 0.3)
    sums = values.sum(dim=0, dtype=torch.float32) * 0.3
    assert torch.equal(bits(out), bits(sums.view(rows, cols, numel).transpose(0, 1).to(values_dtype)))
