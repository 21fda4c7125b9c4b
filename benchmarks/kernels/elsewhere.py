"""What other libraries have for the work of this project's kernels: DeepSpeed's CUDA kernels, bitsandbytes, torchao.

Each is measured where it is installed and takes the block. DeepSpeed's take fp16, as its int8 and int4 are symmetric
codes with one fp32 scale a block like ours; its reduction keeps the width. bitsandbytes moves the same bytes but looks
codes up in a table. torchao's primitives are compiled by torch, as it means them to be.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from timing import Case, Prepared, tensors_nbytes


@cache
def _load(name: str) -> Any:
    """A library's kernels, or the error that stands in for them."""
    try:
        if name == "deepspeed":
            return import_module("deepspeed.ops.op_builder").QuantizerBuilder().load()
        return import_module({"bitsandbytes": "bitsandbytes.functional"}.get(name, "torchao.quantization"))
    except Exception as error:  # not installed, or without what builds it: then it is not measured
        return error


LIBRARIES = ("deepspeed", "bitsandbytes", "torchao")


def missing() -> list[str]:
    """A line for each library that is not measured."""
    errors = {name: _load(name) for name in LIBRARIES}
    return [
        f"{name} ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        for name, error in errors.items()
        if isinstance(error, Exception)
    ]


def versions() -> dict[str, str]:
    """Of the libraries that are measured."""
    found = {}
    for name in LIBRARIES:
        if not isinstance(_load(name), Exception):
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                found[name] = "?"
    return found


def cases(numel: int, block: int) -> Iterator[Case]:
    """All that is there for this block."""
    makers = {"deepspeed": _deepspeed, "bitsandbytes": _bitsandbytes, "torchao": _torchao}
    for name, make in makers.items():
        library = _load(name)
        if not isinstance(library, Exception):
            yield from make(library, numel, block)


def _deepspeed(library: Any, numel: int, block: int) -> Iterator[Case]:
    groups, kind = numel // block, library.Symmetric

    def values() -> torch.Tensor:
        return torch.randn(numel, device="cuda", dtype=torch.float16)

    for bits in (8, 4):

        def quantize(bits: int = bits) -> Prepared:
            x = values()
            return lambda: library.quantize(x, groups, bits, kind), tensors_nbytes(
                x, *library.quantize(x, groups, bits, kind)
            )

        def dequantize(bits: int = bits) -> Prepared:
            x = values()
            codes, scales = library.quantize(x, groups, bits, kind)
            return lambda: library.dequantize(codes, scales, groups, bits, kind), tensors_nbytes(x, codes, scales)

        yield Case(f"DeepSpeed: quantize int{bits}", quantize)
        yield Case(f"DeepSpeed: dequantize int{bits}", dequantize)
        if block < 256:
            continue  # its reduction runs less than a warp for such a group
        for peers in (4, 8):

            def reduce(bits: int = bits, peers: int = peers) -> Prepared:
                codes, scales = library.quantize(values(), groups, bits, kind)

                def call() -> list[torch.Tensor]:
                    return library.quantized_reduction(codes, scales, groups, groups // peers, bits, kind, peers)

                return call, tensors_nbytes(codes, scales, *call())

            yield Case(f"DeepSpeed: dequantize + sum int{bits} over {peers} + quantize int{bits}", reduce)


def _bitsandbytes(library: Any, numel: int, block: int) -> Iterator[Case]:
    if block < 64:
        return
    ops, dtype = torch.ops.bitsandbytes, torch.bfloat16
    table = library.create_dynamic_map().cuda()

    # Its ops rather than its functions, which make a new table for each call.
    def quantize(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
        if bits == 8:
            return ops.quantize_blockwise(x, table, block)
        return ops.quantize_4bit(x, block, "nf4", torch.uint8)

    def dequantize(codes: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
        if bits == 8:
            return ops.dequantize_blockwise(codes, scales, table, block, dtype)
        return ops.dequantize_4bit(codes, scales, block, "nf4", (numel,), dtype)

    def prepare(bits: int, backwards: bool) -> Prepared:
        x = torch.randn(numel, device="cuda", dtype=dtype)
        codes, scales = quantize(x, bits)
        nbytes = tensors_nbytes(x, codes, scales)
        return (lambda: dequantize(codes, scales, bits)) if backwards else (lambda: quantize(x, bits)), nbytes

    for bits, name in ((8, "dynamic 8 bits"), (4, "nf4")):
        yield Case(f"bitsandbytes: quantize {name}", lambda b=bits: prepare(b, False))
        yield Case(f"bitsandbytes: dequantize {name}", lambda b=bits: prepare(b, True))


@cache
def _compiled_affine(block: int) -> tuple[Any, Any]:
    primitives = import_module("torchao.quantization.quant_primitives")
    shape, limits = (1, block), (-127, 127)

    def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales, zeros = primitives.choose_qparams_affine(
            x, primitives.MappingType.SYMMETRIC, shape, torch.int8, *limits, scale_dtype=torch.float32
        )
        return primitives.quantize_affine(x, shape, scales, zeros, torch.int8, *limits), scales

    def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return primitives.dequantize_affine(
            codes, shape, scales, None, torch.int8, *limits, output_dtype=torch.bfloat16
        )

    return torch.compile(quantize), torch.compile(dequantize)


def _torchao(_library: Any, numel: int, block: int) -> Iterator[Case]:
    quantize, dequantize = _compiled_affine(block)

    def prepare(backwards: bool) -> Prepared:
        x = torch.randn(numel // block, block, device="cuda", dtype=torch.bfloat16)
        torch._dynamo.mark_dynamic(x, 0)  # compiled once for all sizes
        codes, scales = quantize(x)
        torch._dynamo.mark_dynamic(codes, 0)
        torch._dynamo.mark_dynamic(scales, 0)
        nbytes = tensors_nbytes(x, codes, scales)
        return (lambda: dequantize(codes, scales)) if backwards else (lambda: quantize(x)), nbytes

    yield Case("torchao, compiled: quantize int8", lambda: prepare(False))
    yield Case("torchao, compiled: dequantize int8", lambda: prepare(True))
