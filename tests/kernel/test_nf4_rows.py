"""Rows of NF4 codes that lie apart: the values that bitsandbytes decodes to, from both backends."""

import pytest
import torch
from backends import as_stored, on_triton
from bitsandbytes.functional import QuantState, dequantize_4bit
from harness.covering import over_pairs
from samples import DTYPES
from torch import Tensor

from fsdp_zpp.kernels import PayloadLayout, dequantize_nf4_rows

SHAPES = [(64, 64), (64, 64 * 41), (128, 8192), (256, 256 * 17), (4096, 4096 * 3)]


def apart(chunks: int, numel: int, block: int, device: torch.device) -> Tensor:
    """Make rows of random codes and scales between others of a larger payload; one block is NaN."""
    layout, generator = PayloadLayout(4, block), torch.Generator().manual_seed(numel)
    larger = torch.randint(256, (chunks, layout.nbytes(numel) + 80), dtype=torch.uint8, generator=generator)
    rows = larger[:, 32 : 32 + layout.nbytes(numel)]
    scales = torch.rand(chunks, layout.blocks(numel), generator=generator)
    scales[-1, -1] = torch.nan
    layout.scales(rows, numel).copy_(scales)
    larger = larger.to(device)
    return larger[:, 32 : 32 + layout.nbytes(numel)]


def by_bitsandbytes(rows: Tensor, numel: int, block: int, dtype: torch.dtype) -> Tensor:
    """Decode each row as a tensor of its own, of one column of packed codes."""
    layout, decoded = PayloadLayout(4, block), []
    for row in rows.split(1):
        scales = layout.scales(row, numel).reshape(-1)
        state = QuantState(scales, torch.Size((1, numel)), blocksize=block, quant_type="nf4", dtype=dtype)
        decoded.append(dequantize_4bit(layout.codes(row, numel).reshape(-1, 1), state).view(-1))
    return torch.cat(decoded)


@over_pairs(shape=SHAPES, dtype=DTYPES, chunks=[1, 3])
def test_as_bitsandbytes_decodes(device: torch.device, chunks: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    block, numel = shape
    rows = apart(chunks, numel, block, device)
    out = torch.empty(chunks * numel, dtype=dtype, device=device)
    dequantize_nf4_rows(rows, out, block)
    torch.testing.assert_close(out, by_bitsandbytes(rows, numel, block, dtype), rtol=0, atol=0, equal_nan=True)


@over_pairs(shape=SHAPES, dtype=DTYPES, chunks=[1, 3])
def test_triton_equals_reference(device: torch.device, chunks: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    block, numel = shape
    rows = apart(chunks, numel, block, torch.device("cpu"))
    expected = torch.empty(chunks * numel)
    dequantize_nf4_rows(rows, expected, block)
    out = torch.empty(chunks * numel, dtype=dtype, device=device)
    on_triton(dequantize_nf4_rows, apart(chunks, numel, block, device), out, block)
    torch.testing.assert_close(out.cpu(), as_stored(expected, dtype, device), rtol=0, atol=0, equal_nan=True)


def test_opcheck() -> None:
    rows = apart(3, 320, 64, torch.device("cpu"))
    torch.library.opcheck(torch.ops.fsdp_zpp.dequantize_nf4_rows.default, (rows, torch.empty(960), 64))


def test_chunks_are_whole_blocks() -> None:
    rows = torch.zeros(2, PayloadLayout(4, 64).nbytes(100), dtype=torch.uint8)
    with pytest.raises(ValueError, match="chunks have 100 values, but must consist of whole blocks of 64"):
        dequantize_nf4_rows(rows, torch.empty(200), 64)
