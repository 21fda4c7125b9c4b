"""Where the CPU's time of a step goes; so far whose a Python file is."""

from __future__ import annotations

import re
from pathlib import Path

BACKWARD, STEP = "host_time::backward", "host_time::step"
"""Labels that host_traces.py puts around each backward and each step."""

OURS, FSDP, COMPILED, DTENSOR, C10D = "fsdp_zpp", "torch's FSDP", "compiled code", "DTensor", "collectives"
TRITON, AUTOGRAD, OPTIMIZER, MODEL = "Triton's launcher", "autograd", "optimizer", "model"
_FILES = {
    "benchmarks/": MODEL,  # the training loop
    "fsdp_zpp/bench/": MODEL,
    "fsdp_zpp": OURS,
    "torch/distributed/fsdp/": FSDP,
    "torch/distributed/_composable": FSDP,
    "torch/distributed/tensor/": DTENSOR,
    "torch/distributed/": C10D,
    "torch/_dynamo/": COMPILED,
    "torch/_functorch/": COMPILED,
    "torch/_inductor/": COMPILED,
    "torchinductor_": COMPILED,
    "triton/": TRITON,
    "torch/autograd/function.py": AUTOGRAD,
    "torch/autograd/graph.py": AUTOGRAD,
    "torch/optim/": OPTIMIZER,
    "torch/nn/": MODEL,
    "transformers/": MODEL,
}
"""Whose Python a file has, by the first of these that its path has; helpers are the callers'."""


def owner_of_file(path: str) -> str:
    """Return whose Python a file has; empty for what others only call, such as contextlib."""
    path = re.split(r"(?:site|dist)-packages/", path)[-1]
    return next((owner for part, owner in _FILES.items() if part in path), "")


def analyse(folder: Path) -> None:
    """Read the traces of a folder."""
