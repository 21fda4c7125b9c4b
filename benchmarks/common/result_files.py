"""Results: one JSON file a run, which says how it was made before what was measured.

    {"manifest": {...}, "arguments": {...}, "rows": [{...}, ...]}

A result may have more beside its rows. ``manifest.py`` says what a manifest holds; one with ``"recovered": true`` was
written after the run, from what the run printed and from when its figures were committed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Result = dict[str, Any]
NO_FIGURES = ("out", "worker", "case")
"""Options that say where a result goes, or that a script gives to its own processes."""


def write(path: Path, manifest: dict[str, Any], arguments: argparse.Namespace, rows: list[Row], **others: Any) -> None:
    """Write one run's result.

    Args:
        path: The file; its folder is made.
        manifest: When, where and how it was made.
        arguments: The command line's options, of which those that change no figure are left out.
        rows: What was measured, a row for each case.
        others: What else the result says.
    """
    options = {name: value for name, value in vars(arguments).items() if name not in NO_FIGURES}
    result = {"manifest": manifest, "arguments": options, **others, "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def read(folder: Path) -> dict[str, Result]:
    """All results of a folder, by their files' names without ``.json``."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
