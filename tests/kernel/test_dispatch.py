"""Ops as callers and torch see them: what they check, what they prepare once for calls of the same signature."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from cases import CALLS, DEVICE, TAKES_TAILS, apart, copied, normal, same, with_tails
from harness.covering import over_each
from torch import Tensor

from fsdp_zpp.kernels import (
    PayloadLayout,
    _ops,
    add_delta,
    dequantize,
    dequantize_nf4_rows,
    dequantize_rows,
    dequantize_sum_quantize,
    dispatch,
    quantize,
    quantize_delta,
    quantize_with_feedback,
    triton_backend,
)

NUMEL = 64
CASES: dict[Any, str] = {call(NUMEL)[0]: case for case, call in reversed(CALLS.items())}
"""A case of each op."""
each_op = pytest.mark.parametrize("op", CASES, ids=lambda op: op.__name__)


def arguments(op: Any) -> tuple[Any, ...]:
    return CALLS[CASES[op]](NUMEL)[1:]


def values(dtype: torch.dtype = torch.float32) -> Tensor:
    return normal(600, dtype)


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note each call that is prepared, from none on; reaches into ops, since preparing shows in nothing but time."""
    noted: list[str] = []
    choose = _ops.backend_for

    def note_and_choose(tensor: Tensor) -> ModuleType:
        noted.append(str(tensor.device))
        return choose(tensor)

    monkeypatch.setattr(_ops, "backend_for", note_and_choose)
    for op in CASES:
        monkeypatch.setattr(op, "_prepared", {})
    return noted


def result_of(op: Callable[..., Any], given: tuple[Any, ...]) -> list[Tensor]:
    """Return what a call returns and writes."""
    returned = op(*given)
    return [each for each in (returned, *given) if isinstance(each, Tensor)]


@each_op
def test_a_second_call_checks_and_prepares_nothing(
    op: Callable[..., Any], prepared: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments(op)
    prepared.clear()
    first = result_of(op, copied(given))
    assert len(prepared) == 1
    for name in [name for name in vars(_ops) if name.startswith("check_") or name == "PayloadLayout"]:
        monkeypatch.setattr(_ops, name, None)
    second = result_of(op, copied(given))
    in_torch = result_of(getattr(torch.ops.fsdp_zpp, op.__name__), copied(given))
    assert len(prepared) == 1
    for one, other, third in zip(first, second, in_torch, strict=True):
        assert same(one, other)
        assert same(one, third)


@each_op
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_prepared_call_serves_other_values_and_factors(
    op: Callable[..., Any], prepared: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for factor in (1.0, 0.25):
        given: Any = tuple(factor * each if isinstance(each, float) else each for each in arguments(op))
        if given[0].is_floating_point():
            given[0].mul_(factor)
        calls.append((given, result_of(op, copied(given))))
    monkeypatch.setattr(op, "_prepared", {})
    monkeypatch.setattr(_ops, "backend_for", lambda tensor: prepared.append("triton") or triton_backend)
    prepared.clear()
    for given, expected in calls:
        for one, other in zip(result_of(op, copied(given, DEVICE)), expected, strict=True):
            assert same(one.cpu(), other)
    assert len(prepared) == 1


def test_what_differs_is_prepared_anew(prepared: list[str]) -> None:
    unaligned = torch.frombuffer(bytearray(4 * 600 + 16), dtype=torch.float32, offset=4)[:600]
    assert (unaligned.data_ptr() % 16, unaligned.storage_offset()) == (4, 0)
    calls = [
        (values(), 1, 2, 8, 64),
        (values(torch.bfloat16), 1, 2, 8, 64),
        (torch.zeros(900), 1, 2, 8, 64),
        (torch.zeros(601)[1:], 1, 2, 8, 64),
        (unaligned, 1, 2, 8, 64),
        (torch.zeros(600, device="meta"), 1, 2, 8, 64),
        (values(), 2, 1, 8, 64),
        (values(), 1, 2, 4, 64),
        (values(), 1, 2, 8, 32),
    ]
    for _ in range(2):
        for call in calls:
            quantize(*call)
    assert len(prepared) == len(calls)
    assert quantize(*calls[5]).is_meta


def test_rows_at_other_distances_are_prepared_anew(prepared: list[str]) -> None:
    rows, (expected, out) = quantize(values(), 1, 3, 8, 64), torch.empty(2, 3, 200)
    dequantize(rows, expected.view(-1), 1, 3, 8, 64)
    prepared.clear()
    for each in (rows, apart(rows), rows.repeat(1, 3)[:, : rows.shape[1]]):
        for _ in range(2):
            dequantize_rows(each, out.zero_(), 8, 64)
            assert torch.equal(out, expected)
    assert len(prepared) == 3


def test_arguments_may_be_named(prepared: list[str]) -> None:
    expected = quantize(values(), 1, 2, 8, 64)
    assert torch.equal(quantize(values(), 1, block=64, bits=8, cols=2), expected)
    assert len(prepared) == 1
    with pytest.raises(TypeError, match="bits"):
        quantize(values(), 1, 2, 8, 64, bits=8)


def test_ever_new_shapes_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_MAX_PREPARED", 3)
    for numel in range(1, 20):
        assert quantize(torch.ones(numel), 1, 1, 8, 32).shape == (1, PayloadLayout(8, 32).nbytes(numel))
        assert len(quantize._prepared) <= 3


@each_op
def test_no_tensor_is_kept(op: Callable[..., Any]) -> None:
    given = arguments(op)
    kept = [weakref.ref(each) for each in result_of(op, given)]
    del given
    gc.collect()
    assert not any(each() is not None for each in kept)


def test_functorch_maps_over_ops() -> None:
    batch = torch.stack([values(), 2 * values()])
    mapped = torch.vmap(lambda each: quantize(each, 1, 2, 8, 64))(batch)
    assert torch.equal(mapped, torch.stack([quantize(each, 1, 2, 8, 64) for each in batch]))


def test_parameters_and_gradients_go_through_torch(prepared: list[str]) -> None:
    expected = quantize(values(), 1, 2, 8, 64)
    for each in (torch.nn.Parameter(values()), torch.nn.Parameter(values(), requires_grad=False)):
        assert torch.equal(quantize(each, 1, 2, 8, 64), expected)
    assert len(prepared) == 1


def test_compiled_code_calls_ops() -> None:
    def there_and_back(tensor: Tensor) -> Tensor:
        out = torch.empty_like(tensor)
        dequantize(quantize(tensor * 2, 1, 2, 8, block=64), out, 2, 1, 8, 64)
        return out

    compiled = torch.compile(there_and_back, backend="aot_eager", fullgraph=True, dynamic=True)
    for numel in (600, 400, 100):
        tensor = normal(numel, torch.float32)
        assert torch.equal(compiled(tensor), there_and_back(tensor))


# ---- as torch sees them


@over_each(case=list(CALLS), numel=[300, 0])
def test_opcheck(case: str, numel: int) -> None:
    op, *rest = CALLS[case](numel)
    registered = getattr(torch.ops.fsdp_zpp, op.__name__).default
    torch.library.opcheck(registered, tuple(rest))
    if case in TAKES_TAILS:
        # Without the values of tails, which differ from call to call.
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(registered, with_tails(op, tuple(rest), 8), test_utils=tests)


# ---- what they refuse

ROWS_APART = apart(torch.zeros(3, PayloadLayout(8, 64).nbytes(300), dtype=torch.uint8))
HELD = torch.zeros(2, PayloadLayout(8, 64).nbytes(300), dtype=torch.uint8)
CHANGE = torch.zeros(2, PayloadLayout(4, 64).nbytes(300), dtype=torch.uint8)


def bytes_(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def quantizing(given: Tensor | None = None, rows: int = 2, cols: int = 3, bits: int = 8, tail: int = 0) -> Any:
    return lambda: quantize(torch.zeros(60) if given is None else given, rows, cols, bits, 32, tail)


def dequantizing(payload: Tensor, out: Tensor | None = None, tail: int = 0) -> Any:
    return lambda: dequantize(payload, torch.zeros(60) if out is None else out, 2, 3, 8, 32, tail)


def requantizing(payload: Tensor, numel: int = 10, out_bits: int = 4) -> Any:
    return lambda: dequantize_sum_quantize(payload, numel, 2, 3, 8, 32, out_bits, 32, 1.0)


def feeding_back(errors: Tensor, error_block: int) -> Any:
    return lambda: quantize_with_feedback(torch.zeros(100), errors, 1, 1, 4, 64, error_block, 0.8)


def decoding_rows(payload: Tensor, numel: int) -> Any:
    return lambda: dequantize_rows(payload, torch.empty(numel), 8, 64)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (quantizing(torch.zeros(60).double()), TypeError, "values is torch.float64, but can be torch.bfloat16"),
        (quantizing(torch.zeros(6, 10)), ValueError, r"values has shape \(6, 10\) .* must be flat"),
        (quantizing(torch.zeros(120)[::2]), ValueError, r"strides \(2,\), but must be flat and contiguous"),
        (quantizing(torch.zeros(60).to_sparse()), ValueError, "values"),
        (lambda: quantize(values(), 1, 2, 8), TypeError, "block"),
        (lambda: quantize(values(), 1, 2, 8, 64, 0, 1), TypeError, "arguments"),
        (quantizing(torch.zeros(61)), ValueError, "61 values, which do not divide into 2 x 3 chunks"),
        (quantizing(rows=0), ValueError, "rows is 0, but must be from 1 to 65535"),
        (quantizing(cols=65536), ValueError, "cols is 65536, but must be from 1 to 65535"),
        (quantizing(bits=5), ValueError, "bits is 5"),
        (quantizing(tail=6), ValueError, "tail is 6, but a row ends in a multiple of 4 fp32 values"),
        (dequantizing(bytes_(6, 32).float()), TypeError, "payload is torch.float32, but must be torch.uint8"),
        (dequantizing(bytes_(6, 48)), ValueError, r"payload has shape \(6, 48\), but 6 chunks .* make \(6, 32\)"),
        (dequantizing(bytes_(1, 6, 32)), ValueError, r"payload has shape \(1, 6, 32\), but .* make \(6, 32\)"),
        (dequantizing(bytes_(6, 64)[:, :32]), ValueError, r"payload has strides \(64, 1\) .* be contiguous"),
        (dequantizing(bytes_(200)[8:].view(6, 32)), ValueError, "starts at byte 8 .* multiple of 16"),
        (dequantizing(bytes_(6, 48), tail=8), ValueError, r"bits 8, block 32 and tail 8 make \(6, 64\)"),
        (dequantizing(bytes_(6, 32), torch.zeros(60).int()), TypeError, "out is torch.int32"),
        (dequantizing(bytes_(6, 32), torch.zeros(60, device="meta")), ValueError, "is on cpu and out is on meta"),
        (requantizing(bytes_(6, 32)), ValueError, r"but 6 chunks of 10 values .* make \(peers, 6, 32\)"),
        (requantizing(bytes_(0, 6, 32)), ValueError, r"payload has shape \(0, 6, 32\)"),
        (requantizing(bytes_(2, 6, 32), numel=-1), ValueError, "numel is -1"),
        (requantizing(bytes_(2, 6, 32), out_bits=3), ValueError, "bits is 3"),
        (feeding_back(torch.zeros(100, dtype=torch.bfloat16), 0), TypeError, "float32"),
        (feeding_back(torch.zeros(99), 0), ValueError, r"\(100,\)"),
        (feeding_back(torch.zeros(100), 64), TypeError, "uint8"),
        (feeding_back(bytes_(1, 100), 64), ValueError, "make"),
        (lambda: quantize_delta(torch.zeros(600), HELD.float(), 8, 64, 4, 64), TypeError, r"must be torch\.uint8"),
        (lambda: quantize_delta(torch.zeros(400), HELD, 8, 64, 4, 64), ValueError, "2 chunks of 200 values"),
        (lambda: add_delta(HELD[0], CHANGE, 300, 8, 64, 4, 64), ValueError, "payload has shape"),
        (lambda: add_delta(HELD, HELD, 300, 8, 64, 4, 64), ValueError, "2 chunks of 300 values with bits 4"),
        (lambda: add_delta(HELD, CHANGE, -1, 8, 64, 4, 64), ValueError, "numel is -1"),
        (decoding_rows(ROWS_APART.float(), 900), TypeError, "must be torch.uint8"),
        (decoding_rows(ROWS_APART[0], 900), ValueError, "two axes"),
        (decoding_rows(ROWS_APART, 800), ValueError, "do not divide"),
        (decoding_rows(ROWS_APART, 960), ValueError, "rows of 336 bytes"),
        (decoding_rows(ROWS_APART.t().contiguous().t(), 900), ValueError, "rows must be contiguous"),
        (decoding_rows(bytes_(3, 344)[:, 8:], 900), ValueError, "multiples of 16"),
        (lambda: dequantize_nf4_rows(CHANGE, torch.empty(600), 64), ValueError, "whole blocks of 64"),
    ],
)
def test_wrong_arguments_are_refused_and_named_every_time(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    for _ in range(2):
        for right in (quantizing(), dequantizing(bytes_(6, 32)), requantizing(bytes_(2, 6, 32))):
            right()
        with pytest.raises(error, match=message):
            call()
