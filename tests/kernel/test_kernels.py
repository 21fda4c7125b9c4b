"""Ops as callers and torch see them, and their Triton kernels: the same bits as the reference, and as an oracle.

Kernels are compiled on a GPU and interpreted elsewhere, as Python, which allows for more than the compiler. So this
file is a script, too, which compiles one kernel of each kind for an H100 or H200 on a machine without one. It prints
the names of the kernels compiled, and those of all kernels. It runs in a process of its own, since whether kernels are
compiled or interpreted is settled where they are defined.
"""

from __future__ import annotations

import gc
import inspect
import math
import os
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, Mock, patch

import numpy as np
import pytest
import torch
from harness.covering import over_each
from hypothesis import given, settings, strategies as st
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fsdp_zpp_kernels import (
    PayloadLayout,
    add_delta,
    dequantize,
    dequantize_nf4_rows,
    dequantize_rows,
    dequantize_sum,
    dequantize_sum_quantize,
    dequantize_sum_quantize_with_feedback,
    ops,
    quantize,
    quantize_delta,
    quantize_with_feedback,
    reference,
    triton as triton_backend,
)
from fsdp_zpp_kernels.triton import Launch, kernels

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # 0 * Inf, interpreted

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EXPONENTS = {torch.float32: (-149, 120), torch.bfloat16: (-133, 120), torch.float16: (-24, 12)}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where Triton kernels run here: compiled on a GPU, interpreted elsewhere."""
JUNK = 0xAB
CHUNKS, GRID = 6, (2, 3)
BETA, SCALE = 0.8, 0.3


def normal(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Make values that look like weights."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def spread(numel: int, dtype: torch.dtype, seed: int = 0, piece: int = 37) -> Tensor:
    """Make values whose magnitude jumps every ``piece`` values, over all of the dtype's range, with zeros between."""
    rng = np.random.default_rng(seed)
    exponents = rng.integers(*EXPONENTS[dtype], size=numel // piece + 1).repeat(piece)[:numel]
    values = rng.standard_normal(numel) * 2.0**exponents
    values[rng.random(numel) < 0.05] = 0
    return torch.from_numpy(values).to(dtype)


def holed(numel: int, dtype: torch.dtype = torch.float32, every: int = 997) -> Tensor:
    """Make values that look like weights, some of them NaN."""
    values = normal(numel, dtype)
    values[::every] = torch.nan
    return values


def payload(numel: int, bits: int, block: int, *lead: int, chunks: int = CHUNKS) -> Tensor:
    """Make payloads, as many as ``lead`` says; all but the first lose a block to a NaN."""
    made = []
    for seed in range(torch.Size(lead).numel()):
        values = normal(chunks * numel, seed=seed + 1)
        values[seed * 997 : seed * 997 + 1] = torch.nan if seed else 0.5
        made.append(quantize(values, 1, chunks, bits, block))
    return torch.stack(made).view(*lead, chunks, made[0].shape[1])


def apart(rows: Tensor) -> Tensor:
    """Return the same rows between others of a larger payload."""
    larger = torch.full((len(rows), rows.shape[1] + 80), JUNK, dtype=torch.uint8)
    larger[:, 32 : 32 + rows.shape[1]] = rows
    return larger[:, 32 : 32 + rows.shape[1]]


def nf4_rows(numel: int, block: int, chunks: int = CHUNKS) -> Tensor:
    """Make rows of random codes and scales, one of them NaN."""
    layout, generator = PayloadLayout(4, block), torch.Generator().manual_seed(numel)
    rows = torch.randint(256, (chunks, layout.nbytes(numel)), dtype=torch.uint8, generator=generator)
    layout.scales(rows, numel).copy_(torch.rand(chunks, layout.blocks(numel), generator=generator))
    layout.scales(rows, numel)[-1:, -1:] = torch.nan
    return rows


CALLS: dict[str, tuple[Any, Callable[[int], tuple[Any, ...]]]] = {
    "quantize": (quantize, lambda n: (holed(CHUNKS * n), *GRID, 4, 32)),
    "dequantize": (dequantize, lambda n: (payload(n, 8, 64), holed(CHUNKS * n), *GRID, 8, 64)),
    "sum of 3": (dequantize_sum, lambda n: (payload(n, 8, 256, 3), holed(CHUNKS * n), *GRID, 8, 256, SCALE)),
    "sum of 9": (dequantize_sum, lambda n: (payload(n, 4, 128, 9), holed(CHUNKS * n), *GRID, 4, 128, SCALE)),
    "sum encoded": (dequantize_sum_quantize, lambda n: (payload(n, 8, 64, 3), n, *GRID, 8, 64, 4, 32, SCALE)),
    "feedback": (quantize_with_feedback, lambda n: (holed(CHUNKS * n), normal(CHUNKS * n), *GRID, 4, 64, 0, BETA)),
    "feedback in int8": (
        quantize_with_feedback,
        lambda n: (holed(CHUNKS * n), payload(n, 8, 128), *GRID, 4, 64, 128, BETA),
    ),
    "sum with feedback": (
        dequantize_sum_quantize_with_feedback,
        lambda n: (payload(n, 8, 64, 3), normal(CHUNKS * n), n, 8, 64, 4, 32, SCALE, 0, BETA),
    ),
    "sum with feedback in int8": (
        dequantize_sum_quantize_with_feedback,
        lambda n: (payload(n, 4, 32, 2), payload(n, 8, 128), n, 4, 32, 8, 64, SCALE, 128, BETA),
    ),
    "delta": (quantize_delta, lambda n: (holed(CHUNKS * n), payload(n, 8, 64), 8, 64, 4, 32)),
    "delta added": (add_delta, lambda n: (payload(n, 8, 64), payload(n, 4, 32), n, 8, 64, 4, 32)),
    "rows": (dequantize_rows, lambda n: (apart(payload(n, 8, 64)), torch.empty(CHUNKS, n), 8, 64)),
    "rows of nf4": (
        dequantize_nf4_rows,
        lambda n: (apart(nf4_rows(n // 64 * 64, 64)), torch.empty(CHUNKS, n // 64 * 64), 64),
    ),
}
"""An op and its arguments, given the number of values in a chunk."""
CASE_OF = {op: case for case, (op, _) in CALLS.items()}
"""A case of each op."""
TAKES_TAILS = [case for case in CALLS if not case.startswith("rows")]


def arguments_of(op: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Return a call's arguments by name, but for those that are left out."""
    return dict(zip(inspect.signature(op).parameters, arguments, strict=False))


def with_tails(op: Any, arguments: tuple[Any, ...], tail: int) -> tuple[Any, ...]:
    """Return the arguments of the call whose payloads end in tails of junk, each as it is in no other row."""
    given = arguments_of(op, arguments)
    for name, rows in given.items():
        if name in ("payload", "base", "delta"):
            seed = torch.Generator().manual_seed(tail)
            junk = torch.randint(256, (*rows.shape[:-1], 4 * tail), dtype=torch.uint8, generator=seed)
            given[name] = torch.cat([rows, junk], dim=-1)
    return (*copied(tuple(given.values())), tail)


def copied(arguments: tuple[Any, ...], device: torch.device | str = "cpu") -> tuple[Any, ...]:
    """Return the arguments of the same call on tensors of its own."""

    def copy(tensor: Tensor) -> Tensor:
        if tensor.is_contiguous():
            return tensor.to(device, copy=True)
        return tensor._base.to(device, copy=True).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return tuple(copy(each) if isinstance(each, Tensor) else each for each in arguments)


def on_triton(op: Callable[..., Any], *args: Any) -> Any:
    """Run an op in Triton on whatever device its tensors are.

    Whatever the kernels fail to write, padding included, or write to a tail, shows.
    """
    new_empty_strided = Tensor.new_empty_strided

    def poisoned(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = new_empty_strided(self, *args, **kwargs)
        return out.fill_(JUNK) if out.dtype == torch.uint8 else out

    with patch.object(ops, "backend_for", lambda tensor: triton_backend):
        call = op.__wrapped__(*args)  # type: ignore[attr-defined]
    with patch.object(Tensor, "new_empty_strided", poisoned):
        return call(*[arg for arg in args if isinstance(arg, Tensor | float)])


def check_triton(op: Any, *arguments: Any) -> Tensor | None:
    """Compare a call in Triton to the reference bit for bit; return what the reference returns."""
    there, here = copied(arguments, DEVICE), arguments_of(op, copied(arguments))
    out = here.get("out")
    if out is not None:
        here["out"] = out.float()
    returned, result = op(*here.values()), on_triton(op, *there)
    if returned is not None:
        assert torch.equal(result.cpu(), returned)
    for name, after in arguments_of(op, there).items():
        if isinstance(after, Tensor):
            expected = as_stored(here[name], after.dtype) if name == "out" else here[name]
            assert same(after.cpu(), expected), name
    return returned


def as_stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return fp32 values as a kernel stores them. The interpreter, unlike GPUs, truncates to bf16."""
    if DEVICE.type == "cpu" and dtype == torch.bfloat16:
        values = (values.view(torch.int32) & -0x10000).view(torch.float32)
    return values.to(dtype)


def same(actual: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors have the same bits, but for those of NaN, which differ between processors."""
    if not actual.is_floating_point():
        return torch.equal(actual, expected)
    numbers = (each.nan_to_num().view(torch.uint8) for each in (actual, expected))
    return torch.equal(actual.isnan(), expected.isnan()) and torch.equal(*numbers)


# ---- the format once more, sharing no code with the package


def padded(data: bytes) -> bytes:
    """Append zeros to a multiple of 16 bytes."""
    return data + bytes(-len(data) % 16)


def truncated(value: np.float32) -> np.float32:
    """Truncate to 16 significant bits."""
    mantissa, exponent = math.frexp(float(value))
    return np.float32(math.ldexp(math.floor(mantissa * 2**16), exponent - 16))


def encode_block(values: Any, qmax: int) -> tuple[Any, np.float32]:
    absmax = np.float32(np.inf) if np.isnan(values).any() else np.abs(values).max()
    if absmax == 0 or np.isinf(absmax):
        return np.zeros(len(values), np.int8), absmax
    scale = truncated(max(absmax * np.float32((1 + 2.0**-22) / qmax), np.float32(2.0**-126)))
    return np.clip(np.rint(values * (np.float32(1) / scale)), -qmax, qmax).astype(np.int8), scale


def encode_block_by_rms(values: Any, bits: int) -> tuple[Any, np.float32]:
    absmax = np.abs(values).max()
    if absmax == 0 or not np.isfinite(absmax):
        return np.zeros(len(values), np.int8), np.float32(0 if absmax == 0 else np.nan)
    unit = max(absmax * np.float32(1 / 255), np.float32(2.0**-126))
    square = sum(int(step) ** 2 for step in np.rint(np.abs(values.astype(float)) * float(np.float32(1) / unit)))
    rms = np.sqrt(np.float32(square) / np.float32(len(values))) * unit
    step = {2: 0.49785, 3: 0.2930}[bits]
    scale, half = (
        truncated(np.clip(rms * np.float32(step), np.float32(2.0**-126), np.float32(2.0**125))),
        np.float32(0.5),
    )
    return np.clip(np.rint(values * (half / scale) - half), -(1 << bits - 1), (1 << bits - 1) - 1).astype(
        np.int8
    ), scale


def encode(values: Any, bits: int, block: int) -> bytes:
    qmax = PayloadLayout(bits, block).qmax
    pieces = [values[start : start + block] for start in range(0, len(values), block)]
    coded = [encode_block_by_rms(piece, bits) if bits < 4 else encode_block(piece, qmax) for piece in pieces]
    codes = np.concatenate([codes for codes, _ in coded]).view(np.uint8)
    if bits == 3:
        runs = np.pad(codes, (0, -len(codes) % 32)).reshape(-1, 32)
        fields = [sum(int(code & 3) << 2 * at for at, code in enumerate(run)) for run in runs]
        signs = [sum(int(code >> 2 & 1) << at for at, code in enumerate(run)) for run in runs]
        both = (struct.pack("<QI", *pair) for pair in zip(fields, signs, strict=True))
        codes = np.frombuffer(b"".join(both), np.uint8)
    elif bits < 8:
        bytewise = np.pad(codes, (0, -len(codes) % (8 // bits))).reshape(-1, 8 // bits) & (2**bits - 1)
        codes = np.array([sum(int(code) << bits * at for at, code in enumerate(byte)) for byte in bytewise], np.uint8)
    return padded(codes.tobytes()) + padded(np.array([scale for _, scale in coded], "<f4").tobytes())


def decode(row: bytes, numel: int, bits: int, block: int) -> Any:
    codes, nbytes = np.frombuffer(row, np.int8), (numel * bits + 7) // 8
    if bits == 3:
        nbytes = -(-numel // 32) * 12
        runs = struct.iter_unpack("<QI", row[:nbytes])
        codes = np.array([(low >> 2 * at & 3) - 4 * (signs >> at & 1) for low, signs in runs for at in range(32)])
    elif bits < 8:  # shifts to the right keep the sign
        codes = np.stack([codes << up for up in range(8 - bits, -1, -bits)], axis=1).flatten() >> (8 - bits)
    scales = np.frombuffer(row, "<f4", offset=len(padded(bytes(nbytes))))
    return (2 * codes[:numel] + 1 if bits < 4 else codes[:numel]) * scales.repeat(block)[:numel]


# ---- kernels beside the reference and the oracle

SHAPES = [
    (8, 32, 1, 2, 3),
    (4, 32, 34, 2, 3),
    (8, 64, 2500, 1, 2),
    (8, 4096, 4097, 1, 1),
    (4, 128, 4096, 1, 1),
    (4, 256, 2175, 2, 1),
    (2, 32, 45, 2, 3),
    (2, 256, 2175, 1, 2),
    (2, 4096, 4099, 1, 1),
    (3, 32, 45, 2, 3),
    (3, 128, 2175, 1, 2),
    (3, 128, 4096, 1, 1),
    (3, 4096, 4099, 1, 1),
]
"""Bits, block, values in a chunk, and the grid of chunks.

A partial block, a partial word, whole tiles, a tile and a bit; aligned and not; padded scales and not.
"""
ERROR_BLOCKS = [0, 64, 1024]
AGAIN = [(8, 256, 4, 128, 4096, 1), (4, 32, 8, 4096, 4099, 1), (8, 4096, 8, 32, 1023, 2), (4, 128, 4, 256, 130, 3)]
AGAIN += [(8, 256, 2, 256, 4096, 1), (8, 64, 2, 128, 2055, 2), (2, 32, 2, 32, 1037, 2), (2, 4096, 8, 256, 4099, 1)]
AGAIN += [(8, 128, 3, 128, 2080, 2), (3, 32, 3, 64, 1037, 2), (3, 4096, 8, 256, 4099, 1)]
"""Bits and block, those of what is encoded again or of a delta, values in a chunk, and chunks."""


def errors_of(chunks: int, numel: int, error_block: int) -> Tensor:
    values = normal(chunks * numel, seed=7) * 0.1
    return quantize(values, 1, chunks, 8, error_block) if error_block else values


@over_each(shape=SHAPES, dtype=DTYPES, error_block=ERROR_BLOCKS)
def test_encoding(shape: tuple[int, ...], dtype: torch.dtype, error_block: int) -> None:
    bits, block, numel, rows, cols = shape
    values = spread(rows * cols * numel, dtype, piece=block * 2 // 3)
    values[:: 7 * block] = torch.nan
    values[1 :: 5 * block] = -torch.inf
    values[3 * block : 4 * block] = 0
    sent, out = quantize(values, rows, cols, bits, block), torch.full_like(values, 3)
    dequantize(sent, out, cols, rows, bits, block)
    for at, (chunk, found) in enumerate(zip(values.split(numel), out.split(numel), strict=True)):
        row = encode(chunk.float().numpy(), bits, block)
        assert bytes(sent[at % cols * rows + at // cols].tolist()) == row
        assert same(found, torch.tensor(decode(row, numel, bits, block)).to(dtype))
    if DEVICE.type == "cpu" and dtype == torch.bfloat16:
        # The interpreter converts bf16's subnormals wrongly.
        values[values.abs() < torch.finfo(dtype).smallest_normal] = 0
    check_triton(quantize, values, rows, cols, bits, block)
    values, errors = holed(rows * cols * numel, dtype, 7 * block), errors_of(rows * cols, numel, error_block)
    check_triton(quantize_with_feedback, values, errors, rows, cols, bits, block, error_block, BETA)


@pytest.mark.parametrize("bits", [4, 8])
def test_ties_round_to_even(bits: int) -> None:
    qmax = PayloadLayout(bits, 256).qmax
    values = (torch.arange(256) % (2 * qmax + 1) - qmax) * 0.5 * 2.0**-130
    values[0] = qmax * 2.0**-130
    check_triton(quantize, values, 1, 1, bits, 256)


@over_each(shape=SHAPES, dtype=DTYPES, count=[1, 2, 8, 9])
def test_decoding(shape: tuple[int, ...], dtype: torch.dtype, count: int) -> None:
    bits, block, numel, rows, cols = shape
    sent = payload(numel, bits, block, count, chunks=rows * cols)
    out = torch.full((rows * cols * numel,), 3, dtype=dtype)
    check_triton(dequantize_sum, sent, out, rows, cols, bits, block, 1 / count)
    check_triton(dequantize, sent[-1].clone(), out, cols, rows, bits, block)
    check_triton(dequantize_rows, apart(sent[-1]), out, bits, block)


@over_each(rest=False, shape=AGAIN, error_block=ERROR_BLOCKS, count=[1, 3, 9])
def test_sums_that_are_encoded_again(shape: tuple[int, ...], error_block: int, count: int) -> None:
    *layouts, numel, chunks = shape
    sent, errors = payload(numel, *layouts[:2], count, chunks=2 * chunks), errors_of(chunks, numel, error_block)
    check_triton(dequantize_sum_quantize, sent, numel, 2, chunks, *layouts, SCALE)
    rest = (errors, numel, *layouts, SCALE, error_block, BETA)
    check_triton(dequantize_sum_quantize_with_feedback, sent[:, :chunks].clone(), *rest)


def test_feedback_keeps_the_signs_of_zeros() -> None:
    values, errors = torch.tensor([-0.0, -0.0, 0.0, 0.0]).repeat(32), torch.tensor([-0.0, 0.0]).repeat(64)
    values[0] = 1.0  # one block is not all zeros, the others are
    check_triton(quantize_with_feedback, values, errors, 1, 1, 8, 32, 0, BETA)


@over_each(shape=AGAIN, dtype=DTYPES)
def test_deltas(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    *layouts, numel, chunks = shape
    base, values = payload(numel, *layouts[:2], 2, chunks=chunks)[1].clone(), normal(chunks * numel, dtype)
    values[numel // 3] = torch.inf
    delta = check_triton(quantize_delta, values, base, *layouts)
    assert delta is not None
    check_triton(add_delta, base, delta, numel, *layouts)


@over_each(shape=[(64, 64, 3), (64, 64 * 41, 1), (128, 4096, 1), (256, 256 * 17, 1), (4096, 4096, 2)], dtype=DTYPES)
def test_rows_of_nf4(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    block, numel, chunks = shape
    out = torch.empty(chunks * numel, dtype=dtype)
    check_triton(dequantize_nf4_rows, apart(nf4_rows(numel, block, chunks)), out, block)


@over_each(rest=False, case=TAKES_TAILS, numel=[33, 300, 0], tail=[4, 12])
def test_no_kernel_reads_or_writes_tails(case: str, numel: int, tail: int) -> None:
    op, make = CALLS[case]
    rest = make(numel)
    arguments = with_tails(op, rest, tail)
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


def test_payloads_written_down_by_hand() -> None:
    values = torch.tensor([127.0, -127.0, 0.5, 1.5, -2.5, 0.0] + [0.0] * 26 + [254.0])
    expected = bytes([127, 129, 0, 2, 254]) + bytes(27) + bytes([127]) + bytes(15) + struct.pack("<4f", 1, 2, 0, 0)
    assert bytes(quantize(values, 1, 1, 8, 32)[0].tolist()) == expected
    values = torch.tensor([255.0, -255.0, 85.0, -85.0, 255.0])
    scale = truncated(np.float32(0.49785 * math.sqrt((3 * 255**2 + 2 * 85**2) / 5)))
    expected = bytes([0b11_00_10_01, 0b01]) + bytes(14) + struct.pack("<4f", scale, 0, 0, 0)
    assert bytes(quantize(values, 1, 1, 2, 32)[0].tolist()) == expected
    values = torch.tensor([7.0, -7.0, 1.0, -1.0, 3.0])  # codes 2, -3, 0, -1, 1
    scale = truncated(np.float32(0.2930 * math.sqrt((2 * 255**2 + 2 * 36**2 + 109**2) / 5) * 7 / 255))
    expected = (
        bytes([0b11_00_01_10, 0b01]) + bytes(6) + bytes([0b01010]) + bytes(7) + struct.pack("<4f", scale, 0, 0, 0)
    )
    assert bytes(quantize(values, 1, 1, 3, 32)[0].tolist()) == expected
    values = torch.tensor([7.0, -7.0, 1.0, -1.0, 2.5])
    expected = bytes([0x97, 0xF1, 0x02]) + bytes(13) + struct.pack("<4f", 1, 0, 0, 0)
    assert bytes(quantize(values, 1, 1, 4, 32)[0].tolist()) == expected


# ---- bounds, whatever the values

NUMEL = st.integers(1, 5000)
BITS = st.sampled_from([4, 8])
BLOCK = st.sampled_from([2**power for power in range(5, 13)])
DTYPE = st.sampled_from(list(DTYPES.values()))
SEED = st.integers(0, 2**32 - 1)
TINY = 2.0**-126
relaxed = settings(deadline=None, max_examples=30)


def of_block(values: Tensor, block: int) -> Tensor:
    """Return the absmax of each value's block."""
    return torch.cat([piece.abs().max().expand(len(piece)) for piece in values.double().split(block)])


@relaxed
@given(NUMEL, BITS, BLOCK, DTYPE, SEED)
def test_errors_are_at_most_half_a_step_and_nothing_clips(
    numel: int, bits: int, block: int, dtype: torch.dtype, seed: int
) -> None:
    values, out = spread(numel, dtype, seed), torch.empty(numel, dtype=dtype)
    dequantize(quantize(values, 1, 1, bits, block), out, 1, 1, bits, block)
    absmax, qmax, info = of_block(values, block), PayloadLayout(bits, block).qmax, torch.finfo(dtype)
    step = (absmax / qmax).clamp(min=TINY)
    rounding = out.double().abs() * info.eps + info.smallest_normal * info.eps
    assert ((out.double() - values.double()).abs() <= step / 2 * (1 + 1e-4) + rounding).all()
    largest = (values.double().abs() == absmax) & (absmax > qmax * TINY)
    precision = 2**-15 if dtype == torch.float32 else 0  # scales have 16 bits
    torch.testing.assert_close(out[largest], values[largest], rtol=precision, atol=0)


@relaxed
@given(NUMEL, st.sampled_from([(2, 3, 0.49785), (3, 7, 0.2930)]), BLOCK, DTYPE, SEED)
def test_two_and_three_bits_are_off_by_half_a_step_or_by_what_clips(
    numel: int, levels: tuple[int, int, float], block: int, dtype: torch.dtype, seed: int
) -> None:
    (bits, outer, step), values, out = levels, spread(numel, dtype, seed), torch.empty(numel)
    sent = quantize(values, 1, 1, bits, block)
    dequantize(sent, out, 1, 1, bits, block)
    mean = torch.cat([piece.square().mean().sqrt().expand(len(piece)) for piece in values.double().split(block)])
    scale = PayloadLayout(bits, block).scales(sent, numel)[0].repeat_interleave(block)[:numel].double()
    assert ((scale - step * mean).abs() <= 0.03 * mean + TINY).all()
    clips = (values.double().abs() - outer * scale).clamp(min=0)
    assert ((out.double() - values.double()).abs() <= torch.maximum(scale * (1 + 1e-4), clips * (1 + 1e-9))).all()


@relaxed
@given(NUMEL, BITS, BLOCK, SEED)
def test_what_was_decoded_is_quantized_to_what_it_came_from(numel: int, bits: int, block: int, seed: int) -> None:
    normal, values = torch.randn(numel, generator=torch.Generator().manual_seed(seed)), torch.empty(numel)
    payload = quantize(normal, 1, 1, bits, block)
    dequantize(payload, values, 1, 1, bits, block)
    assert torch.equal(quantize(values, 1, 1, bits, block), payload)
    assert not quantize(values * -0.0, 1, 1, bits, block).any()


# ---- compiled

COMPILED: dict[str, str] = {}
"""The names of kernels, by what tells apart those compiled from one function."""


class Hopper:
    """Driver that has as much as compiling takes."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only() -> None:
    """Make launches from now on compile and do nothing else."""
    run = JITFunction.run

    def compile_and_stop(self: JITFunction[Any], *args: Any, warmup: bool, **kwargs: Any) -> None:
        COMPILED[run(self, *args, warmup=True, **kwargs).hash] = self.__name__

    driver.set_active(Hopper())
    JITFunction.run = compile_and_stop


def launch_each_op(tail: int) -> None:
    """Launch the kernels of all ops, of rows that end in a tail."""
    for op, case in CASE_OF.items():
        arguments = CALLS[case][1](1001)
        on_triton(op, *(with_tails(op, arguments, tail) if case in TAKES_TAILS else arguments))


@pytest.mark.skipif(torch.cuda.is_available(), reason="all tests compile where there is a GPU")
def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled, functions = (set(line.split()) for line in done.stdout.splitlines())
    assert compiled == {name for name in functions if name.endswith("_kernel")}


# ---- calls, in Python and through torch


def arguments(op: Any) -> tuple[Any, ...]:
    return CALLS[CASE_OF[op]][1](64)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Note each call that is prepared, from none on; reaches into ops, since preparing shows in nothing but time."""
    choose = Mock(wraps=ops.backend_for)
    monkeypatch.setattr(ops, "backend_for", choose)
    for op in CASE_OF:
        monkeypatch.setattr(op, "_prepared", {})
    return choose


def result_of(op: Callable[..., Any], given: tuple[Any, ...]) -> list[Tensor]:
    """Return what a call returns and writes."""
    returned = op(*given)
    return [each for each in (returned, *given) if isinstance(each, Tensor)]


@pytest.mark.parametrize(
    ("op", "backend"),
    [
        *((op, reference) for op in CASE_OF),
        *((op, triton_backend) for op in CASE_OF if any(isinstance(each, float) for each in arguments(op))),
    ],
    ids=lambda each: each.__name__.rpartition(".")[2],
)
def test_a_second_call_checks_and_prepares_nothing_whatever_its_values_and_factor(
    op: Any, backend: ModuleType, prepared: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for factor in (1.0, 0.25):
        given: Any = tuple(factor * each if isinstance(each, float) else each for each in arguments(op))
        if given[0].is_floating_point():
            given[0].mul_(factor)
        op._prepared.clear()
        calls.append((given, result_of(op, copied(given))))
    op._prepared.clear()
    prepared.reset_mock()
    prepared.configure_mock(side_effect=[backend])
    in_torch = getattr(torch.ops.fsdp_zpp, op.__name__)
    place, forms = (DEVICE, [op]) if backend is triton_backend else ("cpu", [op, in_torch])
    for form in forms:
        for given, expected in calls:
            for one, other in zip(result_of(form, copied(given, place)), expected, strict=True):
                assert same(one.cpu(), other)
            for name in [name for name in vars(ops) if name.startswith("check_") or name == "PayloadLayout"]:
                monkeypatch.setattr(ops, name, None)
    assert prepared.call_count == 1


def test_what_differs_is_prepared_anew(prepared: Mock) -> None:
    unaligned = torch.frombuffer(bytearray(4 * 600 + 16), dtype=torch.float32, offset=4)[:600]
    assert (unaligned.data_ptr() % 16, unaligned.storage_offset()) == (4, 0)
    rows = quantize(normal(600), 1, 3, 8, 64)
    prepared.reset_mock()
    for _ in range(2):
        for differing in (
            (normal(600), 1, 2, 8, 64),
            (normal(600, torch.bfloat16), 1, 2, 8, 64),
            (torch.zeros(900), 1, 2, 8, 64),
            (torch.zeros(601)[1:], 1, 2, 8, 64),
            (unaligned, 1, 2, 8, 64),
            (normal(600), 2, 1, 8, 64),
            (normal(600), 1, 2, 4, 64),
            (normal(600), 1, 2, 8, 32),
        ):
            quantize(*differing)
        assert quantize(torch.zeros(600, device="meta"), 1, 2, 8, 64).is_meta
        for each in (rows, apart(rows), rows.repeat(1, 3)[:, : rows.shape[1]]):
            dequantize_rows(each, torch.empty(600), 8, 64)
        assert prepared.call_count == 12


def test_calls_of_other_forms_are_prepared_as_one(prepared: Mock) -> None:
    expected = quantize(normal(600), 1, 2, 8, 64)
    assert torch.equal(quantize(normal(600), 1, block=64, bits=8, cols=2), expected)
    for each in (torch.nn.Parameter(normal(600)), torch.nn.Parameter(normal(600), requires_grad=False)):
        assert torch.equal(quantize(each, 1, 2, 8, 64), expected)
    assert prepared.call_count == 1
    with pytest.raises(TypeError, match="bits"):
        quantize(normal(600), 1, 2, 8, 64, bits=8)


def test_ever_new_shapes_do_not_add_up(prepared: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_MAX_PREPARED", 3)
    for numel in range(1, 20):
        assert quantize(torch.ones(numel), 1, 1, 8, 32).shape == (1, PayloadLayout(8, 32).nbytes(numel))
        assert len(quantize._prepared) <= 3


def test_no_tensor_is_kept(prepared: Mock) -> None:
    kept = {op: [weakref.ref(each) for each in result_of(op, arguments(op))] for op in CASE_OF}
    assert prepared.call_count >= len(CASE_OF)
    prepared.reset_mock()  # which notes arguments
    gc.collect()
    assert not {op for op, tensors in kept.items() if any(each() is not None for each in tensors)}


def test_compiled_code_calls_ops() -> None:
    def there_and_back(tensor: Tensor) -> Tensor:
        out = torch.empty_like(tensor)
        dequantize(quantize(tensor * 2, 1, 2, 8, block=64), out, 2, 1, 8, 64)
        return out

    compiled = torch.compile(there_and_back, backend="aot_eager", fullgraph=True, dynamic=True)
    for numel in (600, 400, 100):
        tensor = normal(numel, torch.float32)
        assert torch.equal(compiled(tensor), there_and_back(tensor))


@over_each(rest=False, case=list(CALLS), numel=[300, 0])
def test_opcheck(case: str, numel: int) -> None:
    op, make = CALLS[case]
    registered, given = getattr(torch.ops.fsdp_zpp, op.__name__).default, make(numel)
    torch.library.opcheck(registered, given)
    if case in TAKES_TAILS:
        # Without the values of tails, which differ from call to call.
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(registered, with_tails(op, given, 8), test_utils=tests)


# ---- what they refuse

ROWS_APART = apart(torch.zeros(3, PayloadLayout(8, 64).nbytes(300), dtype=torch.uint8))
HELD = torch.zeros(2, PayloadLayout(8, 64).nbytes(300), dtype=torch.uint8)
CHANGE = torch.zeros(2, PayloadLayout(4, 64).nbytes(300), dtype=torch.uint8)


def bytes_(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def quantizing(given: Tensor | None = None, rows: int = 2, bits: int = 8, block: int = 32, tail: int = 0) -> Any:
    return lambda: quantize(torch.zeros(60) if given is None else given, rows, 3, bits, block, tail)


def dequantizing(payload: Tensor, out: Tensor | None = None) -> Any:
    return lambda: dequantize(payload, torch.zeros(60) if out is None else out, 2, 3, 8, 32)


def requantizing(payload: Tensor, numel: int = 10) -> Any:
    return lambda: dequantize_sum_quantize(payload, numel, 2, 3, 8, 32, 4, 32, 1.0)


def feeding_back(errors: Tensor) -> Any:
    return lambda: quantize_with_feedback(torch.zeros(100), errors, 1, 1, 4, 64, 0, 0.8)


def decoding_rows(payload: Tensor, numel: int = 900) -> Any:
    return lambda: dequantize_rows(payload, torch.empty(numel), 8, 64)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (quantizing(torch.zeros(60).double()), TypeError, "values is torch.float64, but can be torch.bfloat16"),
        (quantizing(torch.zeros(6, 10)), ValueError, r"values has shape \(6, 10\) .* must be flat and contiguous"),
        (quantizing(torch.zeros(61)), ValueError, "61 values, which do not divide into 2 x 3 chunks"),
        (quantizing(rows=0), ValueError, "rows is 0, but must be from 1 to 65535"),
        (quantizing(bits=5), ValueError, "bits is 5, but a code has 2, 3, 4 or 8 bits"),
        (quantizing(block=48), ValueError, "block is 48, but a block is a power of two from 32 to 4096"),
        (quantizing(tail=6), ValueError, "tail is 6, but a row ends in a multiple of 4 fp32 values"),
        (dequantizing(bytes_(6, 32).float()), TypeError, "payload is torch.float32, but must be torch.uint8"),
        (dequantizing(bytes_(6, 48)), ValueError, r"payload has shape \(6, 48\), but 6 chunks .* make \(6, 32\)"),
        (dequantizing(bytes_(6, 64)[:, :32]), ValueError, r"payload has strides \(64, 1\) .* be contiguous"),
        (dequantizing(bytes_(200)[8:].view(6, 32)), ValueError, "starts at byte 8 .* multiple of 16"),
        (dequantizing(bytes_(6, 32), torch.zeros(60, device="meta")), ValueError, "is on cpu and out is on meta"),
        (requantizing(bytes_(6, 32)), ValueError, r"but 6 chunks of 10 values .* make \(peers, 6, 32\)"),
        (requantizing(bytes_(2, 6, 32), numel=-1), ValueError, "numel is -1"),
        (feeding_back(torch.zeros(100, dtype=torch.bfloat16)), TypeError, "float32"),
        (feeding_back(torch.zeros(99)), ValueError, r"\(100,\)"),
        (lambda: add_delta(HELD[0], CHANGE, 300, 8, 64, 4, 64), ValueError, "payload has shape"),
        (lambda: add_delta(HELD, HELD, 300, 8, 64, 4, 64), ValueError, "2 chunks of 300 values with bits 4"),
        (decoding_rows(ROWS_APART[0]), ValueError, "two axes"),
        (decoding_rows(ROWS_APART, 960), ValueError, "rows of 336 bytes"),
        (decoding_rows(ROWS_APART.t().contiguous().t()), ValueError, "rows must be contiguous"),
        (decoding_rows(bytes_(3, 344)[:, 8:]), ValueError, "multiples of 16"),
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


# ---- launches, and how work is cut


def test_the_jit_is_asked_once_and_launches_on_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, launched = Mock(wraps=nullcontext), Mock()
    kernel = MagicMock(arg_names=("payload_ptr", "out_ptr", "factor", "numel", "BLOCK"))
    kernel[3, 2, 1].return_value = {(3, 2, 1): launched}
    launch = Launch(kernel, (3, 2, 1), triton_backend.Tiling(64, 2, 64), BLOCK=64, numel=10)
    payload, out = torch.zeros(16, dtype=torch.uint8), torch.zeros(8)
    launch(payload, out, 1)
    (words, first_out, factor, *fixed), options = kernel[3, 2, 1].call_args
    assert (words.dtype, words.data_ptr()) == (torch.int32, payload.data_ptr())
    assert first_out is out
    assert (factor, type(factor)) == (1, float)
    assert fixed == [10, 64]
    assert options == {"num_warps": 2, "maxnreg": 64, "enable_fp_fusion": False}
    launch._device = 1  # that of the tensors, on a machine with two GPUs
    monkeypatch.setattr(torch.cuda, "device", entered)
    for current, factor in ((0, 0.5), (1, 2.0)):
        monkeypatch.setattr(torch.cuda, "current_device", Mock(return_value=current))
        launch(payload, out, factor)
    launches = [each.args for each in launched.call_args_list]
    assert launches == [(payload, out, factor, 10, 64) for factor in (0.5, 2.0)]
    entered.assert_called_once_with(1)  # only a device that is not the current one is made current
    kernel[3, 2, 1].assert_called_once()


layouts = st.builds(PayloadLayout, BITS, BLOCK)


@relaxed
@given(layouts, layouts, st.integers(1, 64))
def test_a_tile_is_whole_blocks_and_whole_warps(one: PayloadLayout, other: PayloadLayout, peers: int) -> None:
    of_values = triton_backend.group(torch.bfloat16, one)
    for cut, touched, grouped in (
        (triton_backend.quantize_tiling(one), [one], of_values),
        (triton_backend.sum_tiling(peers, one), [one], of_values),
        (triton_backend.sum_quantize_tiling(peers, one, other), [one, other], 128 // one.bits),
        (triton_backend.feedback_tiling(one, other), [one, other], of_values),
        (triton_backend.sum_feedback_tiling(one, other, None), [one, other], 16),
        (triton_backend.sum_feedback_tiling(one, other, one), [one, other], 16),
        (triton_backend.delta_tiling(one, other), [one, other], 16),
    ):
        threads = cut.num_warps * 32
        assert 32 <= threads <= 1024
        assert cut.tile % threads == 0
        assert all(cut.tile % layout.block == 0 for layout in touched)
        assert cut.tile // threads >= grouped  # or threads would hold the same group
        assert cut.max_registers is None or threads * cut.max_registers <= 2**16  # of a multiprocessor


if __name__ == "__main__":
    compile_only()
    launch_each_op(tail=0)
    first = len(COMPILED)
    launch_each_op(tail=4)  # one unit, for which Triton would specialize
    assert len(COMPILED) == first
    print(*sorted(set(COMPILED.values())))
    launched = {name: each for name, each in vars(kernels).items() if isinstance(each, JITFunction)}
    print(*sorted(name for name, each in launched.items() if each.__module__ == kernels.__name__))
