"""Modules of benchmarks/, which are scripts: several folders have a run.py and a report.py."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RAW_NAME = re.compile(r"[a-z\d]:\S|[a-z]_[a-z]|\+[a-z]|\bw8|int4[a-z]|int[23]|momentum\d|start\d|outer\d")
"""Signs of a configuration's name, which readers of a figure don't know."""


def load(folder: str, name: str) -> ModuleType:
    """Import a module of a folder of benchmarks as its scripts do, and leave no trace of it: others have its name."""
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


def results() -> Iterator[tuple[Path, str, dict[str, Any]]]:
    """Yield the file, the name and the content of each run of all studies."""
    read = load("common", "result_files").read
    for study in sorted(BENCHMARKS.glob("*/results/*.json")):
        for name, run in read(study.parent, study.stem).items():
            yield study, name, run
