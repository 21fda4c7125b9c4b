"""Rows that lie apart in a larger payload: the same bits as from a payload of these rows alone."""

import pytest
import torch
from backends import on_triton
from harness.covering import over_pairs
from samples import DTYPES
from torch import Tensor

from fsdp_zpp.kernels import dequantize, dequantize_rows, quantize

SHAPES = [(8, 32, 1), (8, 256, 4096), (8, 64, 5000), (4, 32, 34), (4, 128, 8192), (4, 256, 4223)]


def apart(chunks: int, numel: int, bits: int, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Make a payload, and the same rows between others in a larger one."""
    values = torch.randn(chunks * numel, generator=torch.Generator().manual_seed(numel)).to(device)
    payload = quantize(values, chunks, 1, bits, block)
    larger = torch.full((chunks, payload.shape[1] + 80), 0xAB, dtype=torch.uint8, device=device)
    larger[:, 32 : 32 + payload.shape[1]] = payload
    return payload, larger[:, 32 : 32 + payload.shape[1]]


@over_pairs(shape=SHAPES, dtype=DTYPES, chunks=[1, 3])
def test_same_bits(device: torch.device, chunks: int, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    bits, block, numel = shape
    payload, rows = apart(chunks, numel, bits, block, device)
    expected, out = torch.empty(2, chunks * numel, dtype=dtype, device=device)
    dequantize(payload, expected, chunks, 1, bits, block)
    dequantize_rows(rows, out, bits, block)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("bits", "block", "numel"), SHAPES)
def test_triton_equals_reference(device: torch.device, bits: int, block: int, numel: int) -> None:
    payload, rows = apart(3, numel, bits, block, device)
    expected, out = torch.empty(2, 3 * numel, device=device)
    dequantize(payload, expected, 3, 1, bits, block)
    on_triton(dequantize_rows, rows, out, bits, block)
    assert torch.equal(out, expected)


def test_opcheck() -> None:
    _, rows = apart(3, 300, 4, 64, torch.device("cpu"))
    torch.library.opcheck(torch.ops.fsdp_zpp.dequantize_rows.default, (rows, torch.empty(900), 4, 64))


ROWS = apart(3, 300, 8, 64, torch.device("cpu"))[1]


@pytest.mark.parametrize(
    ("payload", "numel", "error", "message"),
    [
        (ROWS.float(), 900, TypeError, "must be torch.uint8"),
        (ROWS[0], 900, ValueError, "two axes"),
        (ROWS, 800, ValueError, "do not divide"),
        (ROWS, 960, ValueError, "rows of 336 bytes"),
        (ROWS.t().contiguous().t(), 900, ValueError, "rows must be contiguous"),
        (torch.zeros(3, 344, dtype=torch.uint8)[:, 8:], 900, ValueError, "multiples of 16"),
    ],
)
def test_bad_input(payload: Tensor, numel: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dequantize_rows(payload, torch.empty(numel), 8, 64)
