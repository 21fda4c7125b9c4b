"""Calls of all ops, the values in them, and a comparison of backends on one call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
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
    quantize,
    quantize_delta,
    quantize_with_feedback,
    triton_backend,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EXPONENTS = {torch.float32: (-149, 120), torch.bfloat16: (-133, 120), torch.float16: (-24, 12)}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where Triton kernels run here: compiled on a GPU, interpreted elsewhere."""
JUNK = 0xAB
ROWS, COLS, CHUNKS = 2, 3, 6
BETA, SCALE = 0.8, 0.3

# ---- values


def spread(numel: int, dtype: torch.dtype, seed: int = 0, piece: int = 37) -> Tensor:
    """Make values whose magnitude jumps every ``piece`` values, over all of the dtype's range, with zeros between."""
    rng = np.random.default_rng(seed)
    low, high = EXPONENTS[dtype]
    exponents = rng.integers(low, high, size=numel // piece + 1).repeat(piece)[:numel]
    values = rng.standard_normal(numel) * 2.0**exponents
    values[rng.random(numel) < 0.05] = 0
    return torch.from_numpy(values).to(dtype)


def normal(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Make values that look like weights."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


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


# ---- calls

CALLS: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "quantize int8": lambda n: (quantize, holed(CHUNKS * n, torch.bfloat16), ROWS, COLS, 8, 256),
    "quantize int4": lambda n: (quantize, holed(CHUNKS * n), ROWS, COLS, 4, 32),
    "dequantize int8": lambda n: (dequantize, payload(n, 8, 64), holed(CHUNKS * n), ROWS, COLS, 8, 64),
    "dequantize int4": lambda n: (dequantize, payload(n, 4, 32), holed(CHUNKS * n), ROWS, COLS, 4, 32),
    "sum of 3": lambda n: (dequantize_sum, payload(n, 8, 256, 3), holed(CHUNKS * n), ROWS, COLS, 8, 256, SCALE),
    "sum of 9": lambda n: (dequantize_sum, payload(n, 4, 128, 9), holed(CHUNKS * n), ROWS, COLS, 4, 128, SCALE),
    "sum encoded": lambda n: (dequantize_sum_quantize, payload(n, 8, 64, 3), n, ROWS, COLS, 8, 64, 4, 32, SCALE),
    "feedback": lambda n: (quantize_with_feedback, holed(CHUNKS * n), normal(CHUNKS * n), ROWS, COLS, 4, 64, 0, BETA),
    "feedback in int8": lambda n: (
        *(quantize_with_feedback, holed(CHUNKS * n), payload(n, 8, 128)),
        *(ROWS, COLS, 4, 64, 128, BETA),
    ),
    "sum with feedback": lambda n: (
        *(dequantize_sum_quantize_with_feedback, payload(n, 8, 64, 3), normal(CHUNKS * n)),
        *(n, 8, 64, 4, 32, SCALE, 0, BETA),
    ),
    "sum with feedback in int8": lambda n: (
        *(dequantize_sum_quantize_with_feedback, payload(n, 4, 32, 2), payload(n, 8, 128)),
        *(n, 4, 32, 8, 64, SCALE, 128, BETA),
    ),
    "delta": lambda n: (quantize_delta, holed(CHUNKS * n), payload(n, 8, 64), 8, 64, 4, 32),
    "delta added": lambda n: (add_delta, payload(n, 8, 64), payload(n, 4, 32), n, 8, 64, 4, 32),
    "rows": lambda n: (dequantize_rows, apart(payload(n, 8, 64)), torch.empty(CHUNKS, n), 8, 64),
    "rows of nf4": lambda n: (
        dequantize_nf4_rows,
        apart(nf4_rows(n // 64 * 64, 64)),
        torch.empty(CHUNKS, n // 64 * 64),
        64,
    ),
}
"""An op and its arguments, given the number of values in a chunk."""

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
    return tuple(_copied(each, device) if isinstance(each, Tensor) else each for each in arguments)


def _copied(tensor: Tensor, device: torch.device | str) -> Tensor:
    if tensor.is_contiguous():
        return tensor.to(device, copy=True)
    return tensor._base.to(device, copy=True).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


# ---- backends


def on_triton(op: Callable[..., Any], *args: Any) -> Any:
    """Run an op in Triton on whatever device its tensors are."""
    with patch.object(_ops, "backend_for", lambda tensor: triton_backend):
        call = op.__wrapped__(*args)  # type: ignore[attr-defined]
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
    """Return whether two tensors are equal, with NaN equal to NaN: its bits differ between processors."""
    if not actual.is_floating_point():
        return torch.equal(actual, expected)
    return torch.equal(actual.isnan(), expected.isnan()) and torch.equal(actual.nan_to_num(), expected.nan_to_num())
