"""Compiles every kernel for an H100 or H200, on a machine without one.

Prints the names of the kernels compiled, those of all kernels, and how many more the second launches needed, which
differ from the first in all that launch.py takes to make no difference.

Takes the number of cases: the first is of sizes that nothing divides, the second of those that Triton specializes for.
Run in a process of its own, since whether kernels are compiled or interpreted is settled where they are defined.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fsdp_zpp.kernels import PayloadLayout, triton_backend
from fsdp_zpp.kernels.triton_backend import delta, feedback, nf4, quantize_sum, rows

MODULES: tuple[ModuleType, ...] = (quantize_sum, feedback, delta, rows, nf4)
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


def launch_all(numel: int, dtype: torch.dtype, bits: int, block: int, tail: int, factor: float) -> None:
    """Launch each kernel on two chunks of ``numel`` values."""
    values, errors = torch.zeros(2 * numel, dtype=dtype), torch.zeros(2 * numel)
    layout, base_layout = PayloadLayout(bits, block, tail), PayloadLayout(8, 256, tail)
    layout_of_coded = PayloadLayout(8, 256)
    coded_errors = torch.zeros((2, layout_of_coded.nbytes(numel)), dtype=torch.uint8)
    payload = torch.zeros((2, layout.nbytes(numel)), dtype=torch.uint8)
    base = torch.zeros((2, base_layout.nbytes(numel)), dtype=torch.uint8)
    grid = numel, 1, 2
    triton_backend.quantize(*grid, layout, dtype)(values)
    for peers in (1, 4, 9):
        triton_backend.dequantize_sum(peers, *grid, layout, dtype)(payload, values, factor)
    triton_backend.dequantize_sum_quantize(4, *grid, layout, base_layout)(payload, factor)
    for state, error_layout in ((errors, None), (coded_errors, layout_of_coded)):
        triton_backend.quantize_with_feedback(*grid, layout, error_layout, dtype)(values, state, factor)
        call = triton_backend.dequantize_sum_quantize_with_feedback(4, numel, 2, layout, layout, error_layout)
        call(payload, state, factor, factor)
    triton_backend.quantize_delta(2, numel, base_layout, layout, dtype)(values, base)
    triton_backend.add_delta(2, numel, base_layout, layout)(base, payload)
    triton_backend.dequantize_rows(2, numel, payload.stride(0), layout, dtype)(payload, values)
    triton_backend.dequantize_nf4_rows(2, numel, payload.stride(0), layout, dtype)(payload, values)


if __name__ == "__main__":
    compile_only()
    cases = [(1001, torch.float32, 4, 128), (2**15, torch.bfloat16, 8, 256)]
    cases = cases[: int(sys.argv[1])]
    for case in cases:
        launch_all(*case, 0, 0.5)
    print(*sorted(set(COMPILED.values())))
    print(*sorted(name for module in MODULES for name, each in vars(module).items() if isinstance(each, JITFunction)))
    before = len(COMPILED)
    for case in cases:
        launch_all(*case, 4, 1)  # a tail of one unit, for which Triton would specialize
    print(len(COMPILED) - before)
