"""Bytes a second of each kernel, read and written, against a device copy in the same run. Needs one GPU.

python benchmarks/kernels.py --blocks 64 128 256 512 1024 2048 4096 --mib 1 4 16 64 256 1024 --out runs/kernels
python benchmarks/kernels.py --blocks 256 --mib 256 --only "int4 over"

Beside them, on the same values, what other libraries have for the same work, where they are installed
(``kernels_elsewhere.py``). A size is that of the values in 16 bits: of the input of a quantization, the output of a
dequantization, and of what all peers of a sum sent, before they quantized it. ``kernels_timing.py`` says how time is
taken.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import kernels_elsewhere
import torch
import triton
from fsdp_zpp.kernels import dequantize, dequantize_sum, dequantize_sum_quantize, quantize, quantize_corrected
from fsdp_zpp.kernels.difference import add_difference, quantize_difference
from kernels_timing import Case, Prepared, measure, tensors_nbytes

CHUNKS = 8
GRID = (2, 4)
BETA = 0.8
ERROR_BLOCK = 256


def _values(numel: int) -> torch.Tensor:
    return torch.randn(numel, device="cuda", dtype=torch.bfloat16)


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


def corrected_case(numel: int, bits: int, block: int, error_block: int) -> Case:
    """Quantization with error feedback, whose errors are read and written, too."""

    def prepare() -> Prepared:
        x = _values(numel)
        errors = torch.zeros(numel, device="cuda")
        if error_block:
            errors = quantize(errors, 1, CHUNKS, 8, error_block)
        payload = quantize(x, *GRID, bits, block)
        return (
            lambda: quantize_corrected(x, errors, *GRID, bits, block, error_block, BETA),
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


def difference_cases(numel: int, block: int) -> Iterator[Case]:
    """Weights as changes: int4 against int8."""
    layouts = (8, block, 4, block)

    def prepare(add: bool) -> Prepared:
        x, rows = _values(numel), (1, CHUNKS)
        held, change = quantize(x, *rows, 8, block), quantize(x, *rows, 4, block)
        if add:
            return lambda: add_difference(held, change, numel // CHUNKS, *layouts), tensors_nbytes(held, change, held)
        return lambda: quantize_difference(x, held, *layouts), tensors_nbytes(x, held, change)

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
            yield corrected_case(numel, bits, block, error_block)
    yield from difference_cases(numel, block)


def wanted(case: Case, only: str) -> bool:
    return re.search(only, case.name) is not None


def _compile(block: int, index: int) -> None:
    case = list(own_cases(2**19, block))[index]
    case.prepare()[0]()


def compile_all(blocks: list[int], only: str) -> None:
    """Fill Triton's cache from many processes at once: one after another, compiling takes most of the time."""
    names = list(enumerate(own_cases(2**19, blocks[0])))
    jobs = [(block, index) for block in blocks for index, case in names if wanted(case, only)]
    if len(jobs) < 2:
        return
    workers = min(os.cpu_count() or 1, 16, len(jobs))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(_compile, *job) for job in jobs]:
            done.result()


Rates = dict[str, dict[int, tuple[float, float]]]


def measure_block(block: int, sizes: list[int], only: str, copies: dict[int, float], failed: list[str]) -> Rates:
    """Bytes a second and share of a copy's, by kernel and size. What fails elsewhere is a line, and not the end."""
    rates: Rates = {}
    for mib in sizes:
        own = list(own_cases(mib * 2**19, block))
        for case in (*own, *kernels_elsewhere.cases(mib * 2**19, block)):
            if wanted(case, only):
                try:
                    rate = measure(case)
                except Exception as error:
                    if case in own:
                        raise
                    failed.append(f"not measured: {case.name}, block {block}, {mib} MiB ({type(error).__name__})")
                else:
                    rates.setdefault(case.name, {})[mib] = (rate, rate / copies[mib])
    return rates


def table(block: int, sizes: list[int], rates: Rates, copies: dict[int, float]) -> list[str]:
    """Markdown: kernels down, sizes across."""
    lines = [f"| block {block}, TB/s (of a copy) | " + " | ".join(f"{mib} MiB" for mib in sizes) + " |"]
    lines += ["|---|" + "---|" * len(sizes)]
    lines += ["| device copy | " + " | ".join(f"{copies[mib] / 1e12:.2f}" for mib in sizes) + " |"]
    for name, by_size in rates.items():
        cells = [f"{by_size[mib][0] / 1e12:.2f} ({by_size[mib][1]:.2f})" if mib in by_size else "" for mib in sizes]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, ""]


def versions() -> dict[str, str]:
    gpu = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    return gpu | kernels_elsewhere.versions()


def report(record: dict[str, Any], sizes: list[int], rates: dict[int, Rates]) -> str:
    """All tables, under what they were measured with and what was not."""
    lines = [", ".join(f"{name} {version}" for name, version in record["machine"].items()), ""]
    lines += [*(f"- {line}" for line in record["not measured"]), ""]
    for block, by_kernel in rates.items():
        lines += table(block, sizes, by_kernel, record["copy"])
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write a table for each block."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[256])
    parser.add_argument("--mib", type=int, nargs="+", default=[512], help="sizes of the values in 16 bits, in MiB")
    parser.add_argument("--only", default="", metavar="REGEX", help="kernels whose names hold a match")
    parser.add_argument("--out", type=Path, default=Path("runs/kernels"))
    arguments = parser.parse_args()

    compile_all(arguments.blocks, arguments.only)
    copies = {mib: measure(copy_case(mib * 2**19)) for mib in arguments.mib}
    record: dict[str, Any] = {"machine": versions(), "not measured": kernels_elsewhere.missing(), "copy": copies}
    rates: dict[int, Rates] = {}
    arguments.out.mkdir(parents=True, exist_ok=True)
    for block in arguments.blocks:
        rates[block] = measure_block(block, arguments.mib, arguments.only, copies, record["not measured"])
        # After every block: what has been measured outlives a run that is cut short.
        markdown = report(record, arguments.mib, rates)
        (arguments.out / "kernels.md").write_text(markdown)
        (arguments.out / "kernels.json").write_text(json.dumps(record | {"rate and share": rates}, indent=1))
    print(markdown)


if __name__ == "__main__":
    main()
