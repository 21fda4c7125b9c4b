"""The calls of this project's kernels that are measured, with how many bytes each reads and writes."""

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
ERROR_BLOCK = 256


def _values(numel: int) -> torch.Tensor:
    return torch.randn(numel, device="cuda", dtype=torch.bfloat16)


def _errors(numel: int, chunks: int, error_block: int) -> torch.Tensor:
    """No errors yet, in fp32 if ``error_block`` is 0, else in int8."""
    errors = torch.zeros(numel, device="cuda")
    return quantize(errors, 1, chunks, 8, error_block) if error_block else errors


def copy_case(numel: int) -> Case:
    """A copy of ``numel`` values on the device."""

    def prepare() -> Prepared:
        source = _values(numel)
        target = torch.empty_like(source)
        return lambda: target.copy_(source), tensors_nbytes(source, target)

    return Case("device copy", prepare)


def quantize_case(numel: int, bits: int, block: int) -> Case:
    """Quantization alone."""

    def prepare() -> Prepared:
        x = _values(numel)
        return lambda: quantize(x, *GRID, bits, block), tensors_nbytes(x, quantize(x, *GRID, bits, block))

    return Case(f"quantize int{bits}", prepare)


def feedback_case(numel: int, bits: int, block: int, error_block: int) -> Case:
    """Quantization with error feedback, whose errors are read and written, too."""

    def prepare() -> Prepared:
        x = _values(numel)
        errors = _errors(numel, CHUNKS, error_block)
        payload = quantize(x, *GRID, bits, block)
        return (
            lambda: quantize_with_feedback(x, errors, *GRID, bits, block, error_block, BETA),
            tensors_nbytes(x, payload, errors, errors),
        )

    return Case(f"quantize int{bits} with {'int8' if error_block else 'fp32'} errors", prepare)


def dequantize_case(numel: int, bits: int, block: int) -> Case:
    """Dequantization alone."""

    def prepare() -> Prepared:
        x = _values(numel)
        payload = quantize(x, *GRID, bits, block)
        return lambda: dequantize(payload, x, *GRID[::-1], bits, block), tensors_nbytes(x, payload)

    return Case(f"dequantize int{bits}", prepare)


def sum_case(numel: int, bits: int, block: int, peers: int) -> Case:
    """The last step of a reduction, to bf16."""

    def prepare() -> Prepared:
        payload = quantize(_values(numel), *GRID, bits, block).view(peers, CHUNKS // peers, -1)
        out = torch.empty(numel // peers, device="cuda", dtype=torch.bfloat16)
        return (
            lambda: dequantize_sum(payload, out, 1, CHUNKS // peers, bits, block, 1 / peers),
            tensors_nbytes(payload, out),
        )

    return Case(f"dequantize + sum int{bits} over {peers}", prepare)


def requantize_case(numel: int, bits: int, block: int, peers: int, out_bits: int) -> Case:
    """The step of a reduction between its hops."""

    def prepare() -> Prepared:
        payload = quantize(_values(numel), *GRID, bits, block).view(peers, CHUNKS // peers, -1)

        def call() -> torch.Tensor:
            chunks = CHUNKS // peers
            return dequantize_sum_quantize(payload, numel // CHUNKS, 1, chunks, bits, block, out_bits, block, 1 / peers)

        return call, tensors_nbytes(payload, call())

    return Case(f"dequantize + sum int{bits} over {peers} + quantize int{out_bits}", prepare)


def requantize_feedback_case(numel: int, bits: int, block: int, peers: int, out_bits: int, error_block: int) -> Case:
    """The step of a reduction between its hops, with error feedback."""

    def prepare() -> Prepared:
        chunks = CHUNKS // peers
        payload = quantize(_values(numel), *GRID, bits, block).view(peers, chunks, -1)
        errors = _errors(numel // peers, chunks, error_block)
        layouts = (numel // CHUNKS, bits, block, out_bits, block, 1 / peers, error_block, BETA)

        def call() -> torch.Tensor:
            return dequantize_sum_quantize_with_feedback(payload, errors, *layouts)

        return call, tensors_nbytes(payload, call(), errors, errors)

    errors = "int8" if error_block else "fp32"
    return Case(f"dequantize + sum int{bits} over {peers} + quantize int{out_bits} with {errors} errors", prepare)


def delta_cases(numel: int, block: int) -> Iterator[Case]:
    """Weights as changes: int4 against int8."""
    layouts = (8, block, 4, block)

    def prepare(add: bool) -> Prepared:
        x, rows = _values(numel), (1, CHUNKS)
        held, change = quantize(x, *rows, 8, block), quantize(x, *rows, 4, block)
        if add:
            return lambda: add_delta(held, change, numel // CHUNKS, *layouts), tensors_nbytes(held, change, held)
        return lambda: quantize_delta(x, held, *layouts), tensors_nbytes(x, held, change)

    yield Case("quantize int4 difference from int8", lambda: prepare(False))
    yield Case("add int4 difference to int8", lambda: prepare(True))


def own_cases(numel: int, block: int) -> Iterator[Case]:
    """All of this project's kernels."""
    for bits in (8, 4):
        yield quantize_case(numel, bits, block)
        yield dequantize_case(numel, bits, block)
        for peers in (4, 8):
            yield sum_case(numel, bits, block, peers)
        for out_bits in (8, 4)[bits == 4 :]:
            for peers in (4, 8):
                yield requantize_case(numel, bits, block, peers, out_bits)
        for error_block in (0, ERROR_BLOCK):
            yield feedback_case(numel, bits, block, error_block)
            yield requantize_feedback_case(numel, bits, block, 4, 4, error_block)
    yield from delta_cases(numel, block)
