"""Kernels of other libraries for the same work: DeepSpeed's and bitsandbytes'.

Each is measured where it is installed and takes the block. DeepSpeed's take fp16; their int8 and int4 are symmetric
codes with one fp32 scale a block like this project's, and a reduction keeps the width. bitsandbytes moves the same
bytes but looks codes up in a table.
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
    """Load a library's kernels, or return the error that stands in for them."""
    try:
        if name == "deepspeed":
            return import_module("deepspeed.ops.op_builder").QuantizerBuilder().load()
        return import_module("bitsandbytes.functional")
    except Exception as error:  # not installed, or its compiler is missing
        return error


def missing() -> list[str]:
    """Return a line for each library that is not measured."""
    errors = {name: error for name in MAKERS if isinstance(error := _load(name), Exception)}
    return [
        f"{name} ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})" for name, error in errors.items()
    ]


def versions() -> dict[str, str]:
    """Return the versions of the libraries that are measured."""
    numbers = {}
    for name in MAKERS:
        if not isinstance(_load(name), Exception):
            try:
                numbers[name] = version(name)
            except PackageNotFoundError:
                numbers[name] = "?"
    return numbers


def cases(numel: int, block: int) -> Iterator[Case]:
    """Yield all cases for this block."""
    for name, make in MAKERS.items():
        library = _load(name)
        if not isinstance(library, Exception):
            yield from make(library, numel, block)


def _deepspeed(library: Any, numel: int, block: int) -> Iterator[Case]:
    groups, kind = numel // block, library.Symmetric

    def quantize(bits: int) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        x = torch.randn(numel, device="cuda", dtype=torch.float16)
        return x, library.quantize(x, groups, bits, kind)

    def quantization(bits: int) -> Prepared:
        x, payload = quantize(bits)
        return lambda: library.quantize(x, groups, bits, kind), tensors_nbytes(x, *payload)

    def dequantization(bits: int) -> Prepared:
        x, payload = quantize(bits)
        return lambda: library.dequantize(*payload, groups, bits, kind), tensors_nbytes(x, *payload)

    def reduction(bits: int, peers: int) -> Prepared:
        _, payload = quantize(bits)
        call = lambda: library.quantized_reduction(*payload, groups, groups // peers, bits, kind, peers)  # noqa: E731
        return call, tensors_nbytes(*payload, *call())

    for bits in (8, 4):
        yield Case(f"DeepSpeed: quantize int{bits}", lambda b=bits: quantization(b))
        yield Case(f"DeepSpeed: dequantize int{bits}", lambda b=bits: dequantization(b))
        for peers in (4, 8) if block >= 256 else ():  # its reduction runs less than a warp for smaller groups
            name = f"DeepSpeed: dequantize + sum int{bits} over {peers} + quantize int{bits}"
            yield Case(name, lambda b=bits, p=peers: reduction(b, p))


def _bitsandbytes(library: Any, numel: int, block: int) -> Iterator[Case]:
    if block < 64:
        return
    ops, dtype = torch.ops.bitsandbytes, torch.bfloat16
    table = library.create_dynamic_map().cuda()

    # Its functions make a new table for each call, so these are its ops. Quantization is not measured: it does not run
    # in the stream that is captured.
    def dequantization(bits: int) -> Prepared:
        x = torch.randn(numel, device="cuda", dtype=dtype)
        if bits == 8:
            codes, scales = ops.quantize_blockwise(x, table, block)
            call = lambda: ops.dequantize_blockwise(codes, scales, table, block, dtype)  # noqa: E731
        else:
            codes, scales = ops.quantize_4bit(x, block, "nf4", torch.uint8)
            call = lambda: ops.dequantize_4bit(codes, scales, block, "nf4", (numel,), dtype)  # noqa: E731
        return call, tensors_nbytes(x, codes, scales)

    for bits, name in ((8, "dynamic 8 bits"), (4, "nf4")):
        yield Case(f"bitsandbytes: dequantize {name}", lambda b=bits: dequantization(b))


MAKERS = {"deepspeed": _deepspeed, "bitsandbytes": _bitsandbytes}
