"""Differences against a payload: the kernels against the reference, and both against two plain operations."""

import pytest
import torch
from fsdp_zpp.kernels import PayloadLayout, difference_blockwise, reference
from fsdp_zpp.kernels.difference import add_difference, quantize_difference
from harness.covering import over_each
from samples import DTYPES, normal
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # 0 * Inf, interpreted

# held bits and block, bits and block of the difference, values
SHAPES = [
    (8, 256, 4, 256, 4096),
    (8, 64, 4, 4096, 5001),
    (8, 4096, 4, 32, 4097),
    (8, 32, 4, 64, 1),
    (4, 128, 8, 64, 2050),
]
shapes = pytest.mark.parametrize(("held_bits", "held_block", "bits", "block", "numel"), SHAPES)
CHUNKS = 3


def held_of(numel: int, layout: PayloadLayout, lost: int | None = None) -> Tensor:
    values = normal(CHUNKS * numel, torch.float32, seed=1)
    if lost is not None:
        values[lost % len(values)] = torch.nan
    return reference.quantize(values, 1, CHUNKS, layout)


def decoded(payload: Tensor, numel: int, layout: PayloadLayout) -> Tensor:
    out = torch.empty(CHUNKS * numel)
    reference.dequantize_sum(payload[None], out, 1, CHUNKS, layout, 1.0)
    return out


@over_each(shape=SHAPES, dtype=DTYPES)
def test_quantize_difference(shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    held_bits, held_block, bits, block, numel = shape
    layouts = PayloadLayout(held_bits, held_block), PayloadLayout(bits, block)
    values, held = normal(CHUNKS * numel, dtype), held_of(numel, layouts[0], lost=numel // 2)
    values[numel // 3] = torch.inf
    expected = reference.quantize_difference(values, held, *layouts)
    difference = values.float() - decoded(held, numel, layouts[0])
    assert torch.equal(expected, reference.quantize(difference, 1, CHUNKS, layouts[1]))
    payload = difference_blockwise.quantize_difference(values.to(device), held.to(device), *layouts)
    assert torch.equal(payload.cpu(), expected)


@shapes
def test_add_difference(
    held_bits: int, held_block: int, bits: int, block: int, numel: int, device: torch.device
) -> None:
    layouts = PayloadLayout(held_bits, held_block), PayloadLayout(bits, block)
    held, values = held_of(numel, layouts[0], lost=numel // 2), 0.1 * normal(CHUNKS * numel, torch.float32)
    values[numel // 3] = -torch.inf
    difference = reference.quantize(values, 1, CHUNKS, layouts[1])
    expected = reference.add_difference(held, difference, numel, *layouts)
    total = decoded(held, numel, layouts[0]) + decoded(difference, numel, layouts[1])
    assert torch.equal(expected, reference.quantize(total, 1, CHUNKS, layouts[0]))
    assert total.isnan().any()
    assert decoded(expected, numel, layouts[0])[total.isnan()].isnan().all()
    result = difference_blockwise.add_difference(held.to(device), difference.to(device), numel, *layouts)
    assert torch.equal(result.cpu(), expected)


def test_receivers_come_near(device: torch.device) -> None:
    """One difference takes what is held to within half a step of the difference and half one of what is held."""
    held_layout = PayloadLayout(8, 64)
    held = held_of(640, held_layout)
    values = decoded(held, 640, held_layout) + 0.01 * normal(CHUNKS * 640, torch.float32)
    difference = quantize_difference(values.to(device), held.to(device), 8, 64, 4, 64)
    now = decoded(add_difference(held.to(device), difference, 640, 8, 64, 4, 64).cpu(), 640, held_layout)
    change = (values - decoded(held, 640, held_layout)).view(-1, 64).abs().amax(1)
    step = change / 7 + now.view(-1, 64).abs().amax(1) / 127
    assert ((now - values).view(-1, 64).abs().amax(1) <= 0.501 * step).all()


@pytest.mark.parametrize("numel", [0, 300])
def test_opcheck(numel: int) -> None:
    values = torch.randn(2 * numel)
    held = reference.quantize(values, 1, 2, PayloadLayout(8, 64)) if numel else torch.empty(2, 0, dtype=torch.uint8)
    torch.library.opcheck(torch.ops.fsdp_zpp.quantize_difference.default, (values, held, 8, 64, 4, 32))
    difference = quantize_difference(values, held, 8, 64, 4, 32)
    torch.library.opcheck(torch.ops.fsdp_zpp.add_difference.default, (held, difference, numel, 8, 64, 4, 32))


HELD = torch.zeros(2, PayloadLayout(8, 64).nbytes(300), dtype=torch.uint8)
CHANGE = torch.zeros(2, PayloadLayout(4, 64).nbytes(300), dtype=torch.uint8)


def test_bad_input() -> None:
    with pytest.raises(TypeError, match=r"must be torch\.uint8"):
        quantize_difference(torch.zeros(600), HELD.float(), 8, 64, 4, 64)
    with pytest.raises(ValueError, match="2 chunks of 200 values"):
        quantize_difference(torch.zeros(400), HELD, 8, 64, 4, 64)
    with pytest.raises(ValueError, match="payload has shape"):
        add_difference(HELD[0], CHANGE, 300, 8, 64, 4, 64)
    with pytest.raises(ValueError, match="2 chunks of 300 values with bits 4"):
        add_difference(HELD, HELD, 300, 8, 64, 4, 64)
    with pytest.raises(ValueError, match="numel is -1"):
        add_difference(HELD, CHANGE, -1, 8, 64, 4, 64)
