"""Modules of benchmarks/, which are scripts: several folders have a run.py and a report.py."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


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
