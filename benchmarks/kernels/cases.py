"""Calls of this project's kernels that are measured, with the bytes that each reads and writes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from timing import Case, Prepared, tensors_nbytes

from fsdp_zpp.kernels import (
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


def quantize_case(numel: int, bits: int, block: int) -> Case:
    """Quantize."""

    def prepare() -> Prepared:
        x = _values(numel)
        return lambda: quantize(x, *GRID, bits, block), tensors_nbytes(x, quantize(x, *GRID, bits, block))

    return Case(f"quantize int{bits}", prepare)


def feedback_case(numel: int, bits: int, block: int, errors_in: str) -> Case:
    """Quantize with error feedback, whose errors are read and written, too."""
    error_block = ERRORS[errors_in]

    def prepare() -> Prepared:
        x, errors = _values(numel), _zero_errors(numel, CHUNKS, error_block)
        payload = quantize(x, *GRID, bits, block)
        return (
            lambda: quantize_with_feedback(x, errors, *GRID, bits, block, error_block, BETA),
            tensors_nbytes(x, payload, errors, errors),
        )

    return Case(f"quantize int{bits} with {errors_in} errors", prepare)


def dequantize_case(numel: int, bits: int, block: int) -> Case:
    """Dequantize."""

    def prepare() -> Prepared:
        x = _values(numel)
        payload = quantize(x, *GRID, bits, block)
        return lambda: dequantize(payload, x, *GRID[::-1], bits, block), tensors_nbytes(x, payload)

    return Case(f"dequantize int{bits}", prepare)


def sum_case(numel: int, bits: int, block: int, peers: int) -> Case:
    """Sum to bf16, the last step of a reduction."""

    def prepare() -> Prepared:
        payload = _payload_of_peers(numel, bits, block, peers)
        out = torch.empty(numel // peers, device="cuda", dtype=torch.bfloat16)
        layouts = (1, CHUNKS // peers, bits, block, 1 / peers)
        return lambda: dequantize_sum(payload, out, *layouts), tensors_nbytes(payload, out)

    return Case(f"dequantize + sum int{bits} over {peers}", prepare)


def requantize_case(numel: int, bits: int, block: int, peers: int, out_bits: int, errors_in: str = "") -> Case:
    """Sum and quantize again, the step of a reduction between its hops, with error feedback or without."""

    def prepare() -> Prepared:
        chunks, chunk_numel = CHUNKS // peers, numel // CHUNKS
        payload = _payload_of_peers(numel, bits, block, peers)
        if errors_in:
            error_block = ERRORS[errors_in]
            errors = _zero_errors(numel // peers, chunks, error_block)
            layouts = (chunk_numel, bits, block, out_bits, block, 1 / peers, error_block, BETA)
            call = lambda: dequantize_sum_quantize_with_feedback(payload, errors, *layouts)  # noqa: E731
            return call, tensors_nbytes(payload, call(), errors, errors)
        layouts = (chunk_numel, 1, chunks, bits, block, out_bits, block, 1 / peers)
        call = lambda: dequantize_sum_quantize(payload, *layouts)  # noqa: E731
        return call, tensors_nbytes(payload, call())

    feedback = f" with {errors_in} errors" if errors_in else ""
    return Case(f"dequantize + sum int{bits} over {peers} + quantize int{out_bits}{feedback}", prepare)


def delta_cases(numel: int, block: int) -> Iterator[Case]:
    """Encode weights as changes, and add them: int4 against int8."""
    layouts = (8, block, 4, block)

    def prepare(add: bool) -> Prepared:
        x, rows = _values(numel), (1, CHUNKS)
        base, delta = quantize(x, *rows, 8, block), quantize(x, *rows, 4, block)
        if add:
            return lambda: add_delta(base, delta, numel // CHUNKS, *layouts), tensors_nbytes(base, delta, base)
        return lambda: quantize_delta(x, base, *layouts), tensors_nbytes(x, base, delta)

    yield Case("quantize int4 difference from int8", lambda: prepare(False))
    yield Case("add int4 difference to int8", lambda: prepare(True))


def own_cases(numel: int, block: int) -> Iterator[Case]:
    """Yield all of this project's kernels."""
    for bits in (8, 4):
        yield quantize_case(numel, bits, block)
        yield dequantize_case(numel, bits, block)
        for peers in (4, 8):
            yield sum_case(numel, bits, block, peers)
        for out_bits in (8, 4)[bits == 4 :]:
            for peers in (4, 8):
                yield requantize_case(numel, bits, block, peers, out_bits)
        for errors_in in ERRORS:
            yield feedback_case(numel, bits, block, errors_in)
            yield requantize_case(numel, bits, block, 4, 4, errors_in)
    yield from delta_cases(numel, block)
