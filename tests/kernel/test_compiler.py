"""Kernels that only the compiler would refuse: the interpreter runs kernels as Python, which allows for more.

As a script, this file compiles every kernel for an H100 or H200, on a machine without one. It prints the names of the
kernels compiled, and those of all kernels; second launches, which differ from the first in what launch.py takes to make
no difference, must compile nothing. It runs in a process of its own, since whether kernels are compiled or interpreted
is settled where they are defined.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cases import CALLS, TAKES_TAILS, on_triton, with_tails
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

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


def launch(cases: Sequence[str], numel: int, tail: int) -> None:
    """Launch the kernels of ops on chunks of ``numel`` values, of rows that end in a tail."""
    for case in cases:
        op, *rest = CALLS[case](numel)
        on_triton(op, *(with_tails(op, tuple(rest), tail) if case in TAKES_TAILS else rest))


@pytest.mark.skipif(torch.cuda.is_available(), reason="all tests compile where there is a GPU")
@pytest.mark.parametrize("which", ["one of each op", pytest.param("all", marks=pytest.mark.slow)])
def test_every_kernel_compiles_for_a_gpu(tmp_path: Path, which: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, __file__, which], env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr[-3000:]
    compiled, functions = (set(line.split()) for line in done.stdout.splitlines())
    assert compiled == {name for name in functions if name.endswith("_kernel")}


if __name__ == "__main__":
    compile_only()
    is_all = sys.argv[1] == "all"
    one_of_each_op = {CALLS[case](64)[0]: case for case in CALLS}
    chosen = list(CALLS if is_all else one_of_each_op.values())
    for numel in (1001, 2**15) if is_all else (1001,):
        launch(chosen, numel, 0)
        before = len(COMPILED)
        launch(chosen, numel, 4)  # a tail of one unit, for which Triton would specialize
        assert len(COMPILED) == before
    print(*sorted(set(COMPILED.values())))
    print(*sorted(name for module in MODULES for name, each in vars(module).items() if isinstance(each, JITFunction)))
