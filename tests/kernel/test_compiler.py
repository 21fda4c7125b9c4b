"""Kernels that only the compiler would refuse: the interpreter runs kernels as Python, which allows for more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="all tests compile where there is a GPU")
@pytest.mark.parametrize("cases", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_kernel_compiles_for_a_gpu(tmp_path: Path, cases: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).with_name("compile_for_gpu.py")
    done = subprocess.run(
        [sys.executable, script, str(cases)], env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr[-3000:]
    compiled, functions, more = (set(line.split()) for line in done.stdout.splitlines())
    assert compiled == {name for name in functions if name.endswith("_kernel")}
    assert more == {"0"}
