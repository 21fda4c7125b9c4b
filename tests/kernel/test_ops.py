"""Ops as torch sees them, and what they say about bad arguments."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fsdp_zpp import kernels

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
devices = pytest.mark.parametrize("device", DEVICES)
ops = torch.ops.fsdp_zpp


@devices
@pytest.mark.parametrize("numel", [0, 300])
def test_opcheck(numel: int, device: str) -> None:
    values = torch.randn(6 * numel, device=device)
    out = torch.empty_like(values)
    payload = kernels.quantize(values, 2, 3, 4, 64)
    three = payload.expand(3, -1, -1).contiguous()
    torch.library.opcheck(ops.quantize.default, (values, 2, 3, 4, 64))
    torch.library.opcheck(ops.dequantize.default, (payload, out, 3, 2, 4, 64))
    torch.library.opcheck(ops.dequantize_sum.default, (three, out, 3, 2, 4, 64, 0.5))
    torch.library.opcheck(ops.dequantize_sum_quantize.default, (three, numel, 3, 2, 4, 64, 8, 32, 0.5))


@devices
@pytest.mark.parametrize("numel", [1, 300])
def test_reach_their_backend(numel: int, device: str) -> None:
    values = torch.randn(6 * numel)
    payload = kernels.quantize(values.to(device), 2, 3, 8, 64)
    assert torch.equal(payload.cpu(), kernels.quantize(values, 2, 3, 8, 64))
    out = torch.empty_like(values, device=device)
    kernels.dequantize(payload, out, 3, 2, 8, 64)
    torch.testing.assert_close(out.cpu(), values, rtol=0, atol=values.abs().max().item() / 254 + 1e-6)
    kernels.dequantize_sum(payload.expand(4, -1, -1).contiguous(), out, 3, 2, 8, 64, 0.25)
    torch.testing.assert_close(out.cpu(), values, rtol=0, atol=values.abs().max().item() / 254 + 1e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_empty_chunks(bits: int) -> None:
    nothing = torch.empty(0)
    payload = kernels.quantize(nothing, 2, 3, bits, 32)
    assert payload.shape == (6, 0)
    kernels.dequantize(payload, nothing, 2, 3, bits, 32)
    kernels.dequantize_sum(payload[None], nothing, 2, 3, bits, 32, 1.0)
    assert kernels.dequantize_sum_quantize(payload[None], 0, 2, 3, bits, 32, 8, 64, 1.0).shape == (6, 0)


def quantize(values: Tensor | None = None, rows: int = 2, cols: int = 3, bits: int = 8, block: int = 32) -> None:
    kernels.quantize(torch.zeros(60) if values is None else values, rows, cols, bits, block)


def dequantize(payload: Tensor | None = None, out: Tensor | None = None) -> None:
    payload = torch.zeros(6, 32, dtype=torch.uint8) if payload is None else payload
    kernels.dequantize(payload, torch.zeros(60) if out is None else out, 2, 3, 8, 32)


def requantize(payload: Tensor, numel: int = 10, out_bits: int = 4) -> None:
    kernels.dequantize_sum_quantize(payload, numel, 2, 3, 8, 32, out_bits, 32, 1.0)


def bytes_(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: quantize(torch.zeros(60).double()), TypeError, "values is torch.float64, but can be torch.bfloat16"),
        (lambda: quantize(torch.zeros(6, 10)), ValueError, r"values has shape \(6, 10\) .* must be flat"),
        (lambda: quantize(torch.zeros(120)[::2]), ValueError, r"strides \(2,\), but must be flat and contiguous"),
        (lambda: quantize(torch.zeros(61)), ValueError, "61 values, which do not divide into 2 x 3 chunks"),
        (lambda: quantize(rows=0), ValueError, "rows is 0, but must be from 1 to 65535"),
        (lambda: quantize(cols=65536), ValueError, "cols is 65536, but must be from 1 to 65535"),
        (lambda: quantize(bits=5), ValueError, "bits is 5"),
        (lambda: quantize(block=33), ValueError, "block is 33"),
        (lambda: dequantize(bytes_(6, 32).float()), TypeError, "payload is torch.float32, but must be torch.uint8"),
        (lambda: dequantize(bytes_(6, 48)), ValueError, r"payload has shape \(6, 48\), but 6 chunks .* make \(6, 32\)"),
        (lambda: dequantize(bytes_(1, 6, 32)), ValueError, r"payload has shape \(1, 6, 32\), but .* make \(6, 32\)"),
        (lambda: dequantize(bytes_(6, 64)[:, :32]), ValueError, r"payload has strides \(64, 1\) .* be contiguous"),
        (lambda: dequantize(bytes_(200)[8:].view(6, 32)), ValueError, "starts at byte 8 .* multiple of 16"),
        (lambda: dequantize(out=torch.zeros(60).int()), TypeError, "out is torch.int32"),
        (lambda: dequantize(out=torch.zeros(60, device="meta")), ValueError, "payload is on cpu and out is on meta"),
        (lambda: requantize(bytes_(6, 32)), ValueError, r"but 6 chunks of 10 values .* make \(peers, 6, 32\)"),
        (lambda: requantize(bytes_(0, 6, 32)), ValueError, r"payload has shape \(0, 6, 32\)"),
        (lambda: requantize(bytes_(2, 6, 32), numel=-1), ValueError, "numel is -1"),
        (lambda: requantize(bytes_(2, 6, 32), out_bits=3), ValueError, "bits is 3"),
    ],
)
def test_bad_arguments(call: Callable[[], None], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
