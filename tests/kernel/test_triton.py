"""Triton kernels, compiled on a GPU and interpreted elsewhere, against the reference on CPU: the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import (
    BETA,
    CALLS,
    CHUNKS,
    DEVICE,
    DTYPES,
    JUNK,
    TAKES_TAILS,
    apart,
    check_triton,
    copied,
    holed,
    nf4_rows,
    normal,
    on_triton,
    payload,
    spread,
    with_tails,
)
from harness.covering import over_each
from torch import Tensor

from fsdp_zpp import Int8
from fsdp_zpp.collectives.held_errors import Extent, HeldErrors
from fsdp_zpp.kernels import (
    PayloadLayout,
    add_delta,
    dequantize,
    dequantize_nf4_rows,
    dequantize_rows,
    dequantize_sum,
    dequantize_sum_quantize,
    dequantize_sum_quantize_with_feedback,
    quantize,
    quantize_delta,
    quantize_with_feedback,
)

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # 0 * Inf, interpreted

SHAPES = [
    (8, 32, 1, 2, 3),
    (4, 32, 34, 2, 3),
    (8, 64, 2500, 1, 2),
    (8, 4096, 4097, 1, 1),
    (4, 128, 4096, 1, 1),
    (4, 256, 2175, 2, 1),
]
"""Bits, block, values in a chunk, and the grid of chunks.

A partial block, a partial word, whole tiles, a tile and a bit; aligned and not; padded scales and not.
"""
ERROR_BLOCKS = [0, 64, 1024]
AGAIN = [(8, 256, 4, 128, 4096, 1), (4, 32, 8, 4096, 4099, 1), (8, 4096, 8, 32, 1023, 2), (4, 128, 4, 256, 130, 3)]
"""Bits and block, those of what is encoded again, values in a chunk, and chunks."""
DELTAS = [(8, 256, 4, 256, 4096, 1), (8, 64, 4, 4096, 4097, 1), (8, 32, 4, 64, 1, 3), (4, 128, 8, 64, 1026, 2)]
"""The same of a base and of what is a delta against it."""


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the kernels fail to write, padding included, or write to a tail, shows."""
    new_empty_strided = Tensor.new_empty_strided

    def poisoned(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = new_empty_strided(self, *args, **kwargs)
        return out.fill_(JUNK) if out.dtype == torch.uint8 else out

    monkeypatch.setattr(Tensor, "new_empty_strided", poisoned)


@over_each(shape=SHAPES, dtype=DTYPES)
def test_quantize(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    bits, block, numel, *grid = shape
    values = spread(grid[0] * grid[1] * numel, dtype, piece=block * 2 // 3)
    values[:: 7 * block] = torch.nan
    values[1 :: 5 * block] = -torch.inf
    values[3 * block : 4 * block] = 0
    if DEVICE.type == "cpu" and dtype == torch.bfloat16:
        # The interpreter converts bf16's subnormals wrongly.
        values[values.abs() < torch.finfo(dtype).smallest_normal] = 0
    check_triton(quantize, values, *grid, bits, block)


@pytest.mark.parametrize("bits", [4, 8])
def test_ties_round_to_even(bits: int) -> None:
    qmax = PayloadLayout(bits, 256).qmax
    values = (torch.arange(256) % (2 * qmax + 1) - qmax) * 0.5 * 2.0**-130
    values[0] = qmax * 2.0**-130
    check_triton(quantize, values, 1, 1, bits, 256)


@over_each(shape=SHAPES, dtype=DTYPES, count=[1, 2, 8, 9])
def test_sums(shape: tuple[int, ...], dtype: torch.dtype, count: int) -> None:
    bits, block, numel, rows, cols = shape
    sent = payload(numel, bits, block, count, chunks=rows * cols)
    out = torch.full((rows * cols * numel,), 3, dtype=dtype)
    check_triton(dequantize_sum, sent, out, rows, cols, bits, block, 1 / count)
    check_triton(dequantize, sent[-1].clone(), out, cols, rows, bits, block)


@over_each(shape=AGAIN, count=[1, 3, 9])
def test_sums_that_are_encoded_again(shape: tuple[int, ...], count: int) -> None:
    *layouts, numel, chunks = shape
    sent = payload(numel, *layouts[:2], count, chunks=2 * chunks)
    check_triton(dequantize_sum_quantize, sent, numel, 2, chunks, *layouts, 0.3)


def errors_of(chunks: int, numel: int, error_block: int) -> Tensor:
    """Make errors left by earlier steps."""
    values = normal(chunks * numel, seed=7) * 0.1
    return quantize(values, 1, chunks, 8, error_block) if error_block else values


@over_each(shape=SHAPES, error_block=ERROR_BLOCKS, dtype=DTYPES)
def test_feedback(shape: tuple[int, ...], error_block: int, dtype: torch.dtype) -> None:
    bits, block, numel, rows, cols = shape
    values, errors = holed(rows * cols * numel, dtype, 7 * block), errors_of(rows * cols, numel, error_block)
    check_triton(quantize_with_feedback, values, errors, rows, cols, bits, block, error_block, BETA)


@over_each(shape=AGAIN, error_block=ERROR_BLOCKS, count=[1, 3, 9])
def test_sums_with_feedback(shape: tuple[int, ...], error_block: int, count: int) -> None:
    *layouts, numel, chunks = shape
    sent, rest = payload(numel, *layouts[:2], count, chunks=chunks), (numel, *layouts, 0.3, error_block, BETA)
    check_triton(dequantize_sum_quantize_with_feedback, sent, errors_of(chunks, numel, error_block), *rest)


def test_feedback_keeps_the_signs_of_zeros() -> None:
    values, errors = (zeros.repeat(32) for zeros in (torch.tensor([-0.0, 0.0, -0.0, 0.0]), torch.tensor([-0.0, 0.0])))
    errors = errors.repeat(2)
    values[0] = 1.0  # one block is not all zeros, the others are
    there = copied((values, errors), DEVICE)
    on_triton(quantize_with_feedback, *there, 1, 1, 8, 32, 0, BETA)
    quantize_with_feedback(values, errors, 1, 1, 8, 32, 0, BETA)
    assert torch.equal(there[1].cpu().view(torch.int32), errors.view(torch.int32))
    assert errors.view(torch.int32).count_nonzero() > 0  # some are -0


@pytest.mark.parametrize("error_block", ERROR_BLOCKS)
def test_errors_that_decay_between_calls(error_block: int) -> None:
    numel, rest = 1100, (1, 1, 4, 128, error_block, 0.0)
    extent, codec = Extent(numel, (0,)), Int8(error_block) if error_block else None
    ours, wanted = (HeldErrors.zeros(extent, codec, place) for place in (DEVICE, torch.device("cpu")))
    for step, decay in enumerate((0.95, 0.3, 0.95)):
        values = normal(numel, seed=step)
        expected = quantize_with_feedback(values, wanted.state, *rest)
        assert torch.equal(on_triton(quantize_with_feedback, values.to(DEVICE), ours.state, *rest).cpu(), expected)
        assert torch.equal(ours.state.cpu(), wanted.state)
        for errors in (ours, wanted):
            errors.decay(decay)


@over_each(shape=DELTAS, dtype=DTYPES)
def test_deltas(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    *layouts, numel, chunks = shape
    base, values = payload(numel, *layouts[:2], 2, chunks=chunks)[1].clone(), normal(chunks * numel, dtype)
    values[numel // 3] = torch.inf
    delta = check_triton(quantize_delta, values, base, *layouts)
    assert delta is not None
    check_triton(add_delta, base, delta, numel, *layouts)


@over_each(shape=SHAPES, dtype=DTYPES)
def test_rows_that_lie_apart(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    bits, block, numel, rows, cols = shape
    out = torch.empty(rows * cols * numel, dtype=dtype)
    check_triton(dequantize_rows, apart(payload(numel, bits, block, 2, chunks=rows * cols)[1]), out, bits, block)


@over_each(shape=[(64, 64, 3), (64, 64 * 41, 1), (128, 4096, 1), (256, 256 * 17, 1), (4096, 4096, 2)], dtype=DTYPES)
def test_rows_of_nf4(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    block, numel, chunks = shape
    out = torch.empty(chunks * numel, dtype=dtype)
    check_triton(dequantize_nf4_rows, apart(nf4_rows(numel, block, chunks)), out, block)


@over_each(case=TAKES_TAILS, numel=[33, 300, 0], tail=[4, 12, 256])
def test_no_kernel_reads_or_writes_tails(case: str, numel: int, tail: int) -> None:
    op, *rest = CALLS[case](numel)
    arguments = with_tails(op, tuple(rest), tail)
    given, there = copied(arguments), copied(arguments, DEVICE)
    coded, result = op(*rest), on_triton(op, *there)
    for before, without, after in zip(given, rest, there, strict=False):
        if isinstance(before, Tensor):
            # Payloads are as they were, and the call without tails has written the rest, too.
            expected = before if before.shape != without.shape else without
            assert torch.equal(after.cpu().view(torch.uint8), expected.view(torch.uint8))
    if coded is not None:
        nbytes = coded.shape[-1]
        assert result.shape == (CHUNKS, nbytes + 4 * tail)
        assert torch.equal(result[:, :nbytes].cpu(), coded)
        assert (result[:, nbytes:] == JUNK).all()


def test_chunks_without_values() -> None:
    nothing = torch.empty(0, device=DEVICE)
    assert on_triton(quantize, nothing, 2, 3, 8, 256).shape == (6, 0)
    sent = torch.empty(4, 6, 0, dtype=torch.uint8, device=DEVICE)
    on_triton(dequantize_sum, sent, nothing, 2, 3, 8, 256, 1.0)
    assert on_triton(dequantize_sum_quantize, sent, 0, 2, 3, 8, 256, 8, 256, 1.0).shape == (6, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs 16 GiB of GPU memory")
def test_offsets_past_32_bits() -> None:
    chunks, numel = 3, 3 * 2**28 + 8
    values = torch.empty(chunks * numel, dtype=torch.bfloat16, device=DEVICE)
    last = normal(numel // 2**10, torch.bfloat16)
    values.zero_()[-len(last) :] = last.to(DEVICE)
    sent = quantize(values, 1, chunks, 8, 256)
    out = torch.full_like(values, torch.nan)
    dequantize(sent, out, chunks, 1, 8, 256)
    assert not out[:-numel].any()
    torch.testing.assert_close(out[-len(last) :].cpu(), last, rtol=0, atol=0.03)
