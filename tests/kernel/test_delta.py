"""Deltas against a payload: the kernels against the reference, and both against two plain operations."""

import pytest
import torch
from backends import on_triton
from harness.covering import over_each
from samples import DTYPES, normal
from torch import Tensor

from fsdp_zpp.kernels import PayloadLayout, add_delta, dequantize, quantize, quantize_delta

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # 0 * Inf, interpreted

# base bits and block, bits and block of the delta, values
SHAPES = [
    (8, 256, 4, 256, 4096),
    (8, 64, 4, 4096, 5001),
    (8, 4096, 4, 32, 4097),
    (8, 32, 4, 64, 1),
    (4, 128, 8, 64, 2050),
]
shapes = pytest.mark.parametrize(("base_bits", "base_block", "bits", "block", "numel"), SHAPES)
CHUNKS = 3


def held_of(numel: int, bits: int, block: int, lost: int | None = None) -> Tensor:
    values = normal(CHUNKS * numel, torch.float32, seed=1)
    if lost is not None:
        values[lost % len(values)] = torch.nan
    return quantize(values, 1, CHUNKS, bits, block)


def decoded(payload: Tensor, numel: int, bits: int, block: int) -> Tensor:
    out = torch.empty(CHUNKS * numel)
    dequantize(payload, out, 1, CHUNKS, bits, block)
    return out


@over_each(shape=SHAPES, dtype=DTYPES)
def test_quantize_delta(shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    base_bits, base_block, bits, block, numel = shape
    values, base = normal(CHUNKS * numel, dtype), held_of(numel, base_bits, base_block, lost=numel // 2)
    values[numel // 3] = torch.inf
    expected = quantize_delta(values, base, *shape[:4])
    delta = values.float() - decoded(base, numel, base_bits, base_block)
    assert torch.equal(expected, quantize(delta, 1, CHUNKS, bits, block))
    payload = on_triton(quantize_delta, values.to(device), base.to(device), *shape[:4])
    assert torch.equal(payload.cpu(), expected)


@shapes
def test_add_delta(base_bits: int, base_block: int, bits: int, block: int, numel: int, device: torch.device) -> None:
    layouts = base_bits, base_block, bits, block
    base, values = held_of(numel, *layouts[:2], lost=numel // 2), 0.1 * normal(CHUNKS * numel, torch.float32)
    values[numel // 3] = -torch.inf
    delta = quantize(values, 1, CHUNKS, bits, block)
    expected = add_delta(base, delta, numel, *layouts)
    total = decoded(base, numel, *layouts[:2]) + decoded(delta, numel, bits, block)
    assert torch.equal(expected, quantize(total, 1, CHUNKS, *layouts[:2]))
    assert total.isnan().any()
    assert decoded(expected, numel, *layouts[:2])[total.isnan()].isnan().all()
    result = on_triton(add_delta, base.to(device), delta.to(device), numel, *layouts)
    assert torch.equal(result.cpu(), expected)


def test_receivers_come_near(device: torch.device) -> None:
    """One delta takes what is base to within half a step of the delta and half one of what is base."""
    base = held_of(640, 8, 64)
    values = decoded(base, 640, 8, 64) + 0.01 * normal(CHUNKS * 640, torch.float32)
    delta = quantize_delta(values.to(device), base.to(device), 8, 64, 4, 64)
    now = decoded(add_delta(base.to(device), delta, 640, 8, 64, 4, 64).cpu(), 640, 8, 64)
    change = (values - decoded(base, 640, 8, 64)).view(-1, 64).abs().amax(1)
    step = change / 7 + now.view(-1, 64).abs().amax(1) / 127
    assert ((now - values).view(-1, 64).abs().amax(1) <= 0.501 * step).all()


@pytest.mark.parametrize("numel", [0, 300])
def test_opcheck(numel: int) -> None:
    values = torch.randn(2 * numel)
    base = quantize(values, 1, 2, 8, 64)
    torch.library.opcheck(torch.ops.fsdp_zpp.quantize_delta.default, (values, base, 8, 64, 4, 32))
    delta = quantize_delta(values, base, 8, 64, 4, 32)
    torch.library.opcheck(torch.ops.fsdp_zpp.add_delta.default, (base, delta, numel, 8, 64, 4, 32))


HELD = torch.zeros(2, PayloadLayout(8, 64).nbytes(300), dtype=torch.uint8)
CHANGE = torch.zeros(2, PayloadLayout(4, 64).nbytes(300), dtype=torch.uint8)


def test_bad_input() -> None:
    with pytest.raises(TypeError, match=r"must be torch\.uint8"):
        quantize_delta(torch.zeros(600), HELD.float(), 8, 64, 4, 64)
    with pytest.raises(ValueError, match="2 chunks of 200 values"):
        quantize_delta(torch.zeros(400), HELD, 8, 64, 4, 64)
    with pytest.raises(ValueError, match="payload has shape"):
        add_delta(HELD[0], CHANGE, 300, 8, 64, 4, 64)
    with pytest.raises(ValueError, match="2 chunks of 300 values with bits 4"):
        add_delta(HELD, HELD, 300, 8, 64, 4, 64)
    with pytest.raises(ValueError, match="numel is -1"):
        add_delta(HELD, CHANGE, -1, 8, 64, 4, 64)
