"""Calls of this project's kernels that are measured, with the bytes that each reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from timing import Case, Prepared, tensors_nbytes

from fsdp_zpp.codecs import Int3
from fsdp_zpp_kernels import (
    add_delta,
    dequantize,
    dequantize_sum,
    dequantize_sum_quantize,
    dequantize_sum_quantize_with_feedback,
    quantize,
    quantize_delta,
    quantize_with_feedback,
)

CHUNKS = 8
GRID = (2, 4)
BETA = 0.8
ERRORS = {"fp32": 0, "int8": 256}
"""Blocks of the errors; 0 keeps them in fp32."""


def _values(numel: int) -> torch.Tensor:
    return torch.randn(numel, device="cuda", dtype=torch.bfloat16)


def _zero_errors(numel: int, chunks: int, error_block: int) -> torch.Tensor:
    errors = torch.zeros(numel, device="cuda")
    return quantize(errors, 1, chunks, 8, error_block) if error_block else errors


def _payload_of_peers(numel: int, bits: int, block: int, peers: int) -> torch.Tensor:
    return quantize(_values(numel), *GRID, bits, block).view(peers, CHUNKS // peers, -1)


def copy_case(numel: int) -> Case:
    """Copy ``numel`` values on the device."""

    def prepare() -> Prepared:
        source = _values(numel)
        target = torch.empty_like(source)
        return lambda: target.copy_(source), tensors_nbytes(source, target)

    return Case("device copy", prepare)


def _quantize(numel: int, bits: int, block: int) -> Prepared:
    x = _values(numel)
    return lambda: quantize(x, *GRID, bits, block), tensors_nbytes(x, quantize(x, *GRID, bits, block))


def _quantize_with_feedback(numel: int, bits: int, block: int, error_block: int) -> Prepared:
    x, errors = _values(numel), _zero_errors(numel, CHUNKS, error_block)
    call = lambda: quantize_with_feedback(x, errors, *GRID, bits, block, error_block, BETA)  # noqa: E731
    # Errors are read and written, too.
    return call, tensors_nbytes(x, quantize(x, *GRID, bits, block), errors, errors)


def _dequantize(numel: int, bits: int, block: int) -> Prepared:
    x = _values(numel)
    payload = quantize(x, *GRID, bits, block)
    return lambda: dequantize(payload, x, *GRID[::-1], bits, block), tensors_nbytes(x, payload)


def _sum(numel: int, bits: int, block: int, peers: int) -> Prepared:
    """Prepare to sum to bf16, the last step of a reduction."""
    payload = _payload_of_peers(numel, bits, block, peers)
    out = torch.empty(numel // peers, device="cuda", dtype=torch.bfloat16)
    layouts = (1, CHUNKS // peers, bits, block, 1 / peers)
    return lambda: dequantize_sum(payload, out, *layouts), tensors_nbytes(payload, out)


def _requantize(numel: int, bits: int, block: int, peers: int, out_bits: int) -> Prepared:
    """Prepare to sum and quantize again, the step of a reduction between its hops."""
    payload = _payload_of_peers(numel, bits, block, peers)
    layouts = (numel // CHUNKS, 1, CHUNKS // peers, bits, block, out_bits, block, 1 / peers)
    call = lambda: dequantize_sum_quantize(payload, *layouts)  # noqa: E731
    return call, tensors_nbytes(payload, call())


def _requantize_with_feedback(numel: int, bits: int, block: int, error_block: int) -> Prepared:
    """Prepare to do so with error feedback, over 4 peers, to 4 bits."""
    payload = _payload_of_peers(numel, bits, block, 4)
    errors = _zero_errors(numel // 4, CHUNKS // 4, error_block)
    layouts = (numel // CHUNKS, bits, block, 4, block, 1 / 4, error_block, BETA)
    call = lambda: dequantize_sum_quantize_with_feedback(payload, errors, *layouts)  # noqa: E731
    return call, tensors_nbytes(payload, call(), errors, errors)


def _delta(numel: int, block: int, bits: int, add: bool) -> Prepared:
    """Prepare to encode weights as changes, or to add them, against int8."""
    x, rows, layouts = _values(numel), (1, CHUNKS), (8, block, bits, block)
    base, delta = quantize(x, *rows, 8, block), quantize(x, *rows, bits, block)
    if add:
        return lambda: add_delta(base, delta, numel // CHUNKS, *layouts), tensors_nbytes(base, delta, base)
    return lambda: quantize_delta(x, base, *layouts), tensors_nbytes(x, base, delta)


def _rotate_and_quantize(numel: int, block: int) -> Prepared:
    x = _values(numel)
    return lambda: Int3(block).encode(x, *GRID), tensors_nbytes(x, Int3(block).encode(x, *GRID))


def _sum_and_rotate(numel: int, block: int, peers: int) -> Prepared:
    payload = Int3(block).encode(_values(numel), *GRID).view(peers, CHUNKS // peers, -1)
    out = torch.empty(numel // peers, device="cuda", dtype=torch.bfloat16)
    call = lambda: Int3(block).decode_sum(payload, out, 1, CHUNKS // peers, 1 / peers)  # noqa: E731
    return call, tensors_nbytes(payload, out)


def own_cases(numel: int, block: int) -> Iterator[Case]:
    """Yield all of this project's kernels."""

    def case(name: str, prepare: Callable[..., Prepared], *arguments: int) -> Case:
        return Case(name, partial(prepare, numel, *arguments))

    for bits in (8, 4):
        yield case(f"quantize int{bits}", _quantize, bits, block)
        yield case(f"dequantize int{bits}", _dequantize, bits, block)
        summed = f"dequantize + sum int{bits} over"
        for peers in (4, 8):
            yield case(f"{summed} {peers}", _sum, bits, block, peers)
        for out_bits in (8, 4)[bits == 4 :]:
            for peers in (4, 8):
                yield case(f"{summed} {peers} + quantize int{out_bits}", _requantize, bits, block, peers, out_bits)
        for kind, error_block in ERRORS.items():
            yield case(f"quantize int{bits} with {kind} errors", _quantize_with_feedback, bits, block, error_block)
            name = f"{summed} 4 + quantize int4 with {kind} errors"
            yield case(name, _requantize_with_feedback, bits, block, error_block)
    for bits in (4, 2):
        yield case(f"quantize int{bits} difference from int8", _delta, block, bits, False)
        yield case(f"add int{bits} difference to int8", _delta, block, bits, True)
    yield case("rotate + quantize int3", _rotate_and_quantize, block)
    for peers in (2, 4):
        yield case(f"dequantize + sum int3 over {peers} + rotate", _sum_and_rotate, block, peers)
