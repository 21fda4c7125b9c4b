"""Rows that end in a tail: what precedes it is what rows without one hold, and no op reads or writes it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backends import on_triton
from harness.covering import over_pairs
from samples import normal
from torch import Tensor

from fsdp_zpp.kernels import (
    PayloadLayout,
    add_delta,
    dequantize,
    dequantize_rows,
    dequantize_sum,
    dequantize_sum_quantize,
    dequantize_sum_quantize_with_feedback,
    quantize,
    quantize_delta,
    quantize_with_feedback,
)

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # 0 * Inf, interpreted

ROWS, COLS, CHUNKS = 2, 3, 6
JUNK = 0xAB
BETA, SCALE = 0.8, 0.3
NUMELS = [0, 33, 2112]  # no block, a partial one, a tile and a bit
TAILS = [4, 12, 256]


def values(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    result = normal(CHUNKS * numel, dtype)
    result[::997] = torch.nan
    return result


def payload(numel: int, bits: int, block: int, *lead: int) -> Tensor:
    count = torch.Size(lead).numel()
    result = quantize(normal(count * CHUNKS * numel, torch.float32, seed=1), 1, count * CHUNKS, bits, block)
    return result.view(*lead, CHUNKS, -1) if numel else result.view(*lead, CHUNKS, 0)


CASES: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "quantize int8": lambda n: (quantize, values(n, torch.bfloat16), ROWS, COLS, 8, 256),
    "quantize int4": lambda n: (quantize, values(n), ROWS, COLS, 4, 32),
    "dequantize int8": lambda n: (dequantize, payload(n, 8, 64), values(n), ROWS, COLS, 8, 64),
    "dequantize int4": lambda n: (dequantize, payload(n, 4, 32), values(n), ROWS, COLS, 4, 32),
    "sum of 3": lambda n: (dequantize_sum, payload(n, 8, 256, 3), values(n), ROWS, COLS, 8, 256, SCALE),
    "sum of 9": lambda n: (dequantize_sum, payload(n, 4, 128, 9), values(n), ROWS, COLS, 4, 128, SCALE),
    "sum encoded": lambda n: (dequantize_sum_quantize, payload(n, 8, 64, 3), n, ROWS, COLS, 8, 64, 4, 32, SCALE),
    "feedback": lambda n: (quantize_with_feedback, values(n), values(n), ROWS, COLS, 4, 64, 0, BETA),
    "feedback in int8": lambda n: (quantize_with_feedback, values(n), payload(n, 8, 128), ROWS, COLS, 4, 64, 128, BETA),
    "sum with feedback": lambda n: (
        *(dequantize_sum_quantize_with_feedback, payload(n, 8, 64, 3), values(n).nan_to_num()),
        *(n, 8, 64, 4, 32, SCALE, 0, BETA),
    ),
    "sum with feedback in int8": lambda n: (
        *(dequantize_sum_quantize_with_feedback, payload(n, 4, 32, 2), payload(n, 8, 128)),
        *(n, 4, 32, 8, 64, SCALE, 128, BETA),
    ),
    "delta": lambda n: (quantize_delta, values(n), payload(n, 8, 64), 8, 64, 4, 32),
    "delta added": lambda n: (add_delta, payload(n, 8, 64), payload(n, 4, 32), n, 8, 64, 4, 32),
}


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the Triton backend fails to write, or writes to a tail, shows."""
    new_empty_strided = Tensor.new_empty_strided

    def poisoned(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = new_empty_strided(self, *args, **kwargs)
        return out.fill_(JUNK) if out.dtype == torch.uint8 else out

    monkeypatch.setattr(Tensor, "new_empty_strided", poisoned)


def longer(rows: Tensor, tail: int) -> Tensor:
    """Return the same rows with tails of junk, each as it is in no other row."""
    seed = torch.Generator().manual_seed(tail)
    junk = torch.randint(256, (*rows.shape[:-1], 4 * tail), dtype=torch.uint8, generator=seed)
    return torch.cat([rows, junk], dim=-1)


def with_tails(op: Any, arguments: tuple[Any, ...], tail: int) -> tuple[Any, ...]:
    """Return the arguments of a call, payloads with tails. Errors have none."""
    names = inspect.signature(op).parameters
    return tuple(
        longer(each, tail)
        if name in ("payload", "base", "delta")
        else each.clone()
        if name in ("out", "errors")
        else each
        for name, each in zip(names, arguments, strict=False)
    )


def check(case: str, numel: int, tail: int, run: Callable[..., Any], device: torch.device) -> Tensor | None:
    """Compare a call with tails to the one without; return the tails that it leaves in its result."""
    op, *rest = CASES[case](numel)
    given = with_tails(op, tuple(rest), tail)
    there = tuple(each.to(device) if isinstance(each, Tensor) else each for each in given)
    if device.type == "cpu":
        there = tuple(each.clone() if isinstance(each, Tensor) else each for each in given)
    coded, result = op(*rest), run(op, *there, tail)
    for name, before, without, after in zip(inspect.signature(op).parameters, given, rest, there, strict=False):
        if isinstance(before, Tensor):
            expected = without if name in ("out", "errors") else before  # the call without tails has written it, too
            assert torch.equal(after.cpu().view(torch.uint8), expected.view(torch.uint8)), name
    if coded is None:
        return None
    nbytes = coded.shape[-1]
    assert result.shape == (CHUNKS, nbytes + 4 * tail)
    assert torch.equal(result[:, :nbytes].cpu(), coded)
    return result[:, nbytes:]


@over_pairs(case=list(CASES), numel=NUMELS, tail=TAILS)
def test_reference(case: str, numel: int, tail: int) -> None:
    check(case, numel, tail, lambda op, *arguments: op(*arguments), torch.device("cpu"))


@over_pairs(case=list(CASES), numel=NUMELS, tail=TAILS)
def test_triton(case: str, numel: int, tail: int, device: torch.device) -> None:
    tails = check(case, numel, tail, on_triton, device)
    assert tails is None or (tails == JUNK).all()


@pytest.mark.parametrize("numel", [0, 300])
def test_rows_without_their_tails_are_decoded_as_rows_that_lie_apart(numel: int) -> None:
    rows, (expected, out) = payload(numel, 8, 64), torch.empty(2, CHUNKS * numel)
    dequantize(rows, expected, 1, CHUNKS, 8, 64)
    dequantize_rows(longer(rows, 8)[:, : rows.shape[1]], out, 8, 64)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("case", ["quantize int4", "sum of 3", "sum encoded", "feedback", "delta", "delta added"])
@pytest.mark.parametrize("numel", [0, 300])
def test_opcheck(case: str, numel: int) -> None:
    op, *rest = CASES[case](numel)
    registered = getattr(torch.ops.fsdp_zpp, op.__name__)
    arguments = with_tails(op, tuple(rest), 8)
    # Without the values of tails, which differ from call to call, and those of NaN.
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(registered.default, (*arguments, 8), test_utils=tests)
    op_in_torch, in_place = registered(*arguments, 8), op(*arguments, 8)
    assert (op_in_torch is None) == (in_place is None)
    if in_place is not None:
        assert (
            op_in_torch.shape == in_place.shape == (CHUNKS, PayloadLayout(*layout_of(op, arguments), 8).nbytes(numel))
        )


def layout_of(op: Any, arguments: tuple[Any, ...]) -> tuple[int, int]:
    """Return bits and block of what an op returns."""
    named = dict(zip(inspect.signature(op).parameters, arguments, strict=False))
    prefix = "base_" if op is add_delta else "out_" if "out_bits" in named else ""
    return named[f"{prefix}bits"], named[f"{prefix}block"]


@pytest.mark.parametrize("tail", [-4, 1, 6])
def test_tails_are_multiples_of_16_bytes(tail: int) -> None:
    with pytest.raises(ValueError, match=rf"tail is {tail}, but a row ends in a multiple of 4 fp32 values"):
        quantize(values(10), ROWS, COLS, 8, 32, tail)


def test_payloads_of_other_tails_are_refused() -> None:
    rows = quantize(values(10), ROWS, COLS, 8, 32, 4)
    with pytest.raises(ValueError, match=r"bits 8, block 32 and tail 8 make \(6, 64\)"):
        dequantize(rows, values(10), COLS, ROWS, 8, 32, 8)
    with pytest.raises(ValueError, match=r"and tail 0 make \(6, 32\)"):
        dequantize(rows, values(10), COLS, ROWS, 8, 32)
