"""Dispatch: what ops do once for calls of the same signature, and what makes signatures differ."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from samples import normal
from torch import Tensor

from fsdp_zpp.kernels import (
    PayloadLayout,
    _ops,
    add_delta,
    dequantize,
    dequantize_nf4_rows,
    dequantize_rows,
    dequantize_sum,
    dequantize_sum_quantize,
    dequantize_sum_quantize_with_feedback,
    dispatch,
    quantize,
    quantize_delta,
    quantize_with_feedback,
    triton_backend,
)

NUMEL = 300


def payload(bits: int, block: int, *lead: int) -> Tensor:
    count = torch.Size(lead).numel()
    return quantize(normal(2 * count * NUMEL, torch.float32), 1, 2 * count, bits, block).unflatten(0, (*lead, 2))


def values(dtype: torch.dtype = torch.float32) -> Tensor:
    return normal(2 * NUMEL, dtype)


CASES: dict[Any, Callable[[], tuple[Any, ...]]] = {
    quantize: lambda: (values(), 1, 2, 8, 64),
    dequantize: lambda: (payload(8, 64, 1)[0], values(), 2, 1, 8, 64),
    dequantize_sum: lambda: (payload(4, 64, 3), values(), 1, 2, 4, 64, 0.5),
    dequantize_sum_quantize: lambda: (payload(4, 64, 3), NUMEL, 1, 2, 4, 64, 8, 32, 0.5),
    quantize_with_feedback: lambda: (values(), values(), 1, 2, 4, 64, 0, 0.8),
    dequantize_sum_quantize_with_feedback: lambda: (payload(8, 64, 3), values(), NUMEL, 8, 64, 4, 32, 0.5, 0, 0.8),
    quantize_delta: lambda: (values(), payload(8, 64, 1)[0], 8, 64, 4, 32),
    add_delta: lambda: (payload(8, 64, 1)[0], payload(4, 32, 1)[0], NUMEL, 8, 64, 4, 32),
    dequantize_rows: lambda: (payload(8, 64, 3)[:, 0], torch.empty(3, NUMEL), 8, 64),
    dequantize_nf4_rows: lambda: (quantize(normal(640, torch.float32), 1, 2, 4, 64), torch.empty(2, 320), 64),
}
each_op = pytest.mark.parametrize("op", CASES, ids=lambda op: op.__name__)


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


def result_of(op: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Tensor]:
    """Return what a call returns and writes."""
    returned = op(*arguments)
    return [each for each in (returned, *arguments) if isinstance(each, Tensor)]


def copied(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(argument.clone() if isinstance(argument, Tensor) else argument for argument in arguments)


@each_op
def test_a_second_call_checks_and_prepares_nothing(
    op: Callable[..., Any], prepared: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = CASES[op]()
    prepared.clear()
    first = result_of(op, copied(arguments))
    assert len(prepared) == 1
    for name in [name for name in vars(_ops) if name.startswith("check_") or name == "PayloadLayout"]:
        monkeypatch.setattr(_ops, name, None)
    second = result_of(op, copied(arguments))
    in_torch = result_of(getattr(torch.ops.fsdp_zpp, op.__name__), copied(arguments))
    assert len(prepared) == 1
    for one, other, third in zip(first, second, in_torch, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


@each_op
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_prepared_call_serves_other_values_and_factors(
    op: Callable[..., Any], prepared: list[str], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    calls = []
    for factor in (1.0, 0.25):
        arguments: Any = tuple(factor * each if isinstance(each, float) else each for each in CASES[op]())
        if arguments[0].is_floating_point():
            arguments[0].mul_(factor)
        calls.append((arguments, result_of(op, copied(arguments))))
    monkeypatch.setattr(op, "_prepared", {})
    monkeypatch.setattr(_ops, "backend_for", lambda tensor: prepared.append("triton") or triton_backend)
    prepared.clear()
    for arguments, expected in calls:
        there = tuple(each.to(device) if isinstance(each, Tensor) else each for each in copied(arguments))
        for one, other in zip(result_of(op, there), expected, strict=True):
            assert torch.equal(one.cpu(), other)
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
    expected, out = torch.empty(2, 3, NUMEL)
    dequantize(payload(8, 64, 3).flatten(0, 1)[::2].contiguous(), expected.view(-1), 1, 3, 8, 64)
    rows = payload(8, 64, 3)[:, 0]
    apart = torch.zeros(3, 4 * rows.shape[1], dtype=torch.uint8)[:, rows.shape[1] : 2 * rows.shape[1]]
    apart.copy_(rows)
    prepared.clear()
    for each in (rows, apart, rows.contiguous()):
        for _ in range(2):
            dequantize_rows(each, out.zero_(), 8, 64)
            assert torch.equal(out, expected)
    assert len(prepared) == 3


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ((values().double(), 1, 2, 8, 64), TypeError),
        ((values().view(2, -1), 1, 2, 8, 64), ValueError),
        ((torch.zeros(1200)[::2], 1, 2, 8, 64), ValueError),
        ((values().to_sparse(), 1, 2, 8, 64), ValueError),
        ((values(), 1, 7, 8, 64), ValueError),
        ((values(), 1, 2, 5, 64), ValueError),
        ((values(), 1, 2, 8), TypeError),
        ((values(), 1, 2, 8, 64, 0, 1), TypeError),
        ((values(), 1, 2, 8, 64, 2), ValueError),
    ],
)
def test_what_is_wrong_is_refused_every_time(wrong: tuple[Any, ...], error: type[Exception]) -> None:
    for _ in range(2):
        quantize(values(), 1, 2, 8, 64)
        with pytest.raises(error):
            quantize(*wrong)


def test_payloads_off_their_alignment_are_refused_every_time() -> None:
    right, out = payload(8, 64, 1)[0], values()
    shifted = torch.cat([right.new_zeros(8), right.flatten()])[8:].view_as(right)
    for _ in range(2):
        dequantize(right, out, 1, 2, 8, 64)
        with pytest.raises(ValueError, match="starts at byte 8"):
            dequantize(shifted, out, 1, 2, 8, 64)


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
    arguments = CASES[op]()
    kept = [weakref.ref(each) for each in result_of(op, arguments)]
    del arguments
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
