"""Modules of benchmarks/, which are scripts: several folders have a run.py and a report.py."""

from __future__ import annotations

import re
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RAW_NAME = re.compile(r"[a-z\d]:\S|[a-z]_[a-z]|\+[a-z]|\bw8|int4[a-z]|int2|momentum\d|start\d|outer\d")
"""Signs of a configuration's name, which readers of a figure don't know."""


def load(folder: str, name: str) -> ModuleType:
    """``benchmarks/<folder>/<name>.py`` with what it imports, as a script of that folder finds it.

    Nothing of it stays on ``sys.path`` or in ``sys.modules``, so that the next folder's modules of the same names are
    its own, and a folder of ours is not taken for someone's package.
    """
    path, known = list(sys.path), set(sys.modules)
    sys.path[:0] = [str(BENCHMARKS / folder), str(BENCHMARKS / "common")]
    try:
        return import_module(name)
    finally:
        sys.path[:] = path
        for added in set(sys.modules) - known:
            file = getattr(sys.modules[added], "__file__", None)
            if file and BENCHMARKS in Path(file).parents:
                del sys.modules[added]


def tiny_study() -> list[str]:
    """Options with which a study of the loss trains a tiny model in a few steps on the CPU, for one seed."""
    model = "--sequence 64 --hidden 32 --intermediate 64 --layers 1 --heads 2"
    work = "--device cpu --tokens 1e3 --batch 1 --validation-tokens 1e3 --seeds 0"
    return [*model.split(), *work.split(), "--text", str(sample_text())]


def sample_text() -> Path:
    """A folder of text to train on; always the same, since what was read once stays in the temporary folder."""
    folder = Path(tempfile.gettempdir(), "fsdp_zpp-test-text")
    folder.mkdir(exist_ok=True)
    for number in range(200):  # of which a few are held out
        (folder / f"{number}.txt").write_text(f"{number} and {number} makes {2 * number}.\n" * 9)
    return folder
