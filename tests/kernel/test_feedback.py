"""Quantization with error feedback: the kernels against the reference, and the reference against the formula."""

import pytest
import torch
from backends import on_triton
from harness.covering import over_pairs
from samples import DTYPES, normal, peers
from torch import Tensor

from fsdp_zpp import Int8
from fsdp_zpp.collectives.held_errors import Extent, HeldErrors
from fsdp_zpp.kernels import (
    dequantize,
    dequantize_sum,
    dequantize_sum_quantize_with_feedback,
    quantize,
    quantize_with_feedback,
)

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # 0 * Inf, interpreted

BETA = 0.8
SHAPES = [(8, 32, 1), (4, 128, 4223), (4, 256, 4096), (8, 4096, 4097), (4, 64, 5000)]
ERROR_BLOCKS = [0, 64, 1024]
GRIDS = [(1, 1), (2, 3)]
error_blocks = pytest.mark.parametrize("error_block", ERROR_BLOCKS)


def errors_of(chunks: int, numel: int, error_block: int) -> Tensor:
    """Make errors left by earlier steps."""
    values = normal(chunks * numel, torch.float32, seed=7) * 0.1
    return quantize(values, 1, chunks, 8, error_block) if error_block else values


def as_values(errors: Tensor, chunks: int, numel: int, error_block: int) -> Tensor:
    """Return errors in fp32."""
    if not error_block:
        return errors.clone()
    values = torch.empty(chunks * numel)
    dequantize(errors, values, 1, chunks, 8, error_block)
    return values


@over_pairs(shape=SHAPES, error_block=ERROR_BLOCKS, grid=GRIDS, dtype=DTYPES)
def test_quantize_with_feedback_equals_the_reference(
    shape: tuple[int, int, int], error_block: int, grid: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    bits, block, numel = shape
    chunks = grid[0] * grid[1]
    values = normal(chunks * numel, dtype)
    values[:: 7 * block] = torch.nan
    rest = (*grid, bits, block, error_block, BETA)
    expected_errors = errors_of(chunks, numel, error_block)
    errors = expected_errors.clone().to(device)
    expected = quantize_with_feedback(values, expected_errors, *rest)
    payload = on_triton(quantize_with_feedback, values.to(device), errors, *rest)
    assert torch.equal(payload.cpu(), expected)
    assert torch.equal(errors.cpu(), expected_errors)


@error_blocks
@pytest.mark.parametrize("decay", [0.95, 0.3])
def test_errors_that_decay_between_calls_equal_those_of_the_reference(
    decay: float, error_block: int, device: torch.device
) -> None:
    numel, rest = 4223, (1, 1, 4, 128, error_block, 0.0)
    extent, codec = Extent(numel, (0,)), Int8(error_block) if error_block else None
    ours, wanted = (HeldErrors.zeros(extent, codec, place) for place in (device, torch.device("cpu")))
    for step in range(4):
        values = normal(numel, torch.float32, seed=step)
        expected = quantize_with_feedback(values, wanted.state, *rest)
        payload = on_triton(quantize_with_feedback, values.to(device), ours.state, *rest)
        assert torch.equal(payload.cpu(), expected)
        assert torch.equal(ours.state.cpu(), wanted.state)
        for errors in (ours, wanted):
            errors.decay(decay)


@over_pairs(
    shape=[(8, 256, 4, 128, 4096), (4, 32, 8, 4096, 5001), (4, 128, 4, 256, 2050)],
    error_block=ERROR_BLOCKS,
    count=[1, 3, 9],
)
def test_dequantize_sum_quantize_with_feedback_equals_the_reference(
    shape: tuple[int, int, int, int, int], error_block: int, count: int, device: torch.device
) -> None:
    bits, block, out_bits, out_block, numel = shape
    payload = torch.stack([quantize(values, 1, 2, bits, block) for values in peers(count, 2 * numel)])
    expected_errors = errors_of(2, numel, error_block)
    errors = expected_errors.clone().to(device)
    rest = (numel, bits, block, out_bits, out_block, 0.3, error_block, BETA)
    expected = dequantize_sum_quantize_with_feedback(payload, expected_errors, *rest)
    fused = on_triton(dequantize_sum_quantize_with_feedback, payload.to(device), errors, *rest)
    assert torch.equal(fused.cpu(), expected)
    assert torch.equal(errors.cpu(), expected_errors)


def test_zeros_keep_their_signs(device: torch.device) -> None:
    values, errors = (zeros.repeat(32) for zeros in (torch.tensor([-0.0, 0.0, -0.0, 0.0]), torch.tensor([-0.0, 0.0])))
    errors = errors.repeat(2)
    values[0] = 1.0  # one block is not all zeros, the others are
    on_device = errors.clone().to(device)
    on_triton(quantize_with_feedback, values.to(device), on_device, 1, 1, 8, 32, 0, BETA)
    quantize_with_feedback(values, errors, 1, 1, 8, 32, 0, BETA)
    assert torch.equal(on_device.cpu().view(torch.int32), errors.view(torch.int32))
    assert errors.view(torch.int32).count_nonzero() > 0  # some are -0


@over_pairs(shape=SHAPES, error_block=ERROR_BLOCKS, grid=GRIDS)
def test_formula(shape: tuple[int, int, int], error_block: int, grid: tuple[int, int]) -> None:
    """Compare with two plain operations: the payload is that of values plus errors, in the order of its rows."""
    bits, block, numel = shape
    chunks = grid[0] * grid[1]
    values, errors = normal(chunks * numel, torch.float32), errors_of(chunks, numel, error_block)
    old = as_values(errors, chunks, numel, error_block)
    payload = quantize_with_feedback(values, errors, *grid, bits, block, error_block, BETA)
    corrected = values.view(*grid, numel).transpose(0, 1).flatten() + old
    assert torch.equal(payload, quantize(corrected, 1, chunks, bits, block))
    sent = torch.empty(chunks * numel)
    dequantize(payload, sent, 1, chunks, bits, block)
    new = BETA * old.double() + (1 - BETA) * (corrected.double() - sent.double())
    precision = new.abs().max().item() * (1e-6 if error_block == 0 else 1 / 250)
    torch.testing.assert_close(as_values(errors, chunks, numel, error_block).double(), new, rtol=0, atol=precision)


@error_blocks
def test_what_is_not_finite_leaves_the_errors_of_its_block(error_block: int) -> None:
    values, errors = normal(1024, torch.float32), errors_of(1, 1024, error_block)
    values[300] = torch.inf
    old = as_values(errors, 1, 1024, error_block)
    payload = quantize_with_feedback(values, errors, 1, 1, 4, 256, error_block, BETA)
    new, sent = as_values(errors, 1, 1024, error_block), torch.empty(1024)
    dequantize(payload, sent, 1, 1, 4, 256)
    assert sent[256:512].isnan().all()
    assert sent.isnan().sum() == 256
    assert new.isfinite().all()
    if error_block in (0, 64):
        torch.testing.assert_close(new[256:512], old[256:512], rtol=1e-6, atol=0)
    assert not torch.equal(new[:256], old[:256])


@error_blocks
@pytest.mark.parametrize("beta", [0.0, 0.8])
def test_errors_do_not_build_up(error_block: int, beta: float) -> None:
    """Bound the root mean square of what 400 noisy steps on one gradient left out by a fifth of plain int4's."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(4096, generator=generator)
    errors = torch.zeros(4096)
    if error_block:
        errors = quantize(errors, 1, 1, 8, error_block)
    exact, plain, corrected = torch.zeros(3, 4096, dtype=torch.float64)
    decoded = torch.empty(4096)
    for _ in range(400):
        noisy = gradient + 0.01 * torch.randn(4096, generator=generator)
        exact += noisy
        dequantize(quantize(noisy, 1, 1, 4, 128), decoded, 1, 1, 4, 128)
        plain += decoded
        dequantize(quantize_with_feedback(noisy, errors, 1, 1, 4, 128, error_block, beta), decoded, 1, 1, 4, 128)
        corrected += decoded
    left_out = [(total - exact).square().mean().sqrt() for total in (plain, corrected)]
    assert left_out[1] < left_out[0] / 5


def test_sums_are_corrected_after_the_scale() -> None:
    payload = torch.stack([quantize(values, 1, 2, 8, 256) for values in peers(3, 2000)])
    sums = torch.empty(2000)
    dequantize_sum(payload, sums, 1, 2, 8, 256, 0.25)
    errors, expected_errors = errors_of(2, 1000, 0), errors_of(2, 1000, 0)
    fused = dequantize_sum_quantize_with_feedback(payload, errors, 1000, 8, 256, 4, 128, 0.25, 0, BETA)
    assert torch.equal(fused, quantize_with_feedback(sums, expected_errors, 1, 2, 4, 128, 0, BETA))
    assert torch.equal(errors, expected_errors)


@pytest.mark.parametrize(
    ("errors", "error_block", "message"),
    [
        (torch.zeros(100, dtype=torch.bfloat16), 0, "float32"),
        (torch.zeros(99), 0, r"\(100,\)"),
        (torch.zeros(100), 64, "uint8"),
        (torch.zeros(1, 100, dtype=torch.uint8), 64, "make"),
    ],
)
def test_wrong_errors_are_refused(errors: Tensor, error_block: int, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        quantize_with_feedback(torch.zeros(100), errors, 1, 1, 4, 64, error_block, BETA)


def test_ops_trace() -> None:
    values, errors = torch.randn(256), torch.zeros(256)
    torch.library.opcheck(torch.ops.fsdp_zpp.quantize_with_feedback, (values, errors, 2, 2, 4, 32, 0, BETA))
    payload = quantize(values, 1, 2, 8, 64)[None]
    arguments = (payload, errors, 128, 8, 64, 4, 32, 1.0, 0, BETA)
    torch.library.opcheck(torch.ops.fsdp_zpp.dequantize_sum_quantize_with_feedback, arguments)
